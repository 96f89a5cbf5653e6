"""Programs for those who work on Pagewire; none of them is in the wheel.

`demo_model/` trains the demo model, `invariance.py` measures batch invariance, and `recording.py`
records what a command prints as a picture.
"""
