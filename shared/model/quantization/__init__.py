"""How config.json describes quantised weights; one file for each of its dialects.

What stores and multiplies weights in these formats is in `shared/model/layers`. Nothing here
imports torch, because the router and `pagewire estimate` read configurations, too.

Read first: `config.py` (what all dialects are read into), `reader.py` (which are read).

May import: `fields`, `safetensors_header` and `text_part` of `shared.model`.
"""
