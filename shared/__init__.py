"""What every service shares."""
