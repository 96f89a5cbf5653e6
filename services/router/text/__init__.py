"""From the workers' tokens to the text of an answer.

Entry point: `AnswerStream` (stream.py).
Read first: `stream.py`, `served_model.py` (the tokenizer and limits).

May import: `services.router.dispatch`, `shared.text`. No HTTP.
"""
