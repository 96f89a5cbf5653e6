"""From the workers' tokens to the text of an answer.

Entry point: `AnswerStream` (stream.py).
Read first: `stream.py` (one answer, until it ends), `served_model.py` (the tokenizer and limits).

May import: `shared.control.protocol`, `shared.model` (without torch), `shared.text`,
`shared.tool_calls`, `base`, `settings`, `request`. No HTTP.
"""
