"""Programs for those who work on Pagewire; none of them is in the wheel.

`demo_model/` trains the demo model, `invariance.py` measures batch invariance, and `kv_size.py`
counts the code of the KV path.
"""
