"""Programs for those who work on Pagewire; none of them is in the wheel."""
