"""Trains the demo model, and names the prompts on which its greedy choices are clear.

Start with `train.py`. `corpus.py` and `batches.py` say what the model learns, `prompts.py` and
`margins.py` how sure it is afterwards. The result lies in `shared/model/demo/`. This package may
import shared, and transformers, which serving does without.
"""
