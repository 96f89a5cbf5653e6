"""From the workers' tokens to the text of answers.

Entry point: `AnswerSet` (answers.py): all answers to one request as one stream of deltas.
Read first: `answers.py`, `stream.py` (one answer), `served_model.py` (the tokenizer and limits).

May import: `services.router.dispatch`, `shared.text`. No HTTP.
"""
