"""Programs for those who work on Pagewire; none of them is in the wheel.

`demo_model/` trains the demo model, and `invariance.py` measures batch invariance.
"""
