"""Programs for those who work on Pagewire; none of them is in the wheel.

`demo_model/` trains the demo model, `invariance.py` measures batch invariance, `line_budget.py`
compares the lines of each package with its budget, and `recording.py` records what a command prints
as a picture.
"""
