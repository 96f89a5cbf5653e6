"""Text to token ids and back: tokenizer, chat templates, detokenizing, stop strings.

Entry point: `Tokenizer` (tokenizer.py).
Read first: `tokenizer.py`, `chat_template.py`, `literals.py` (special tokens that messages spell
out), `answer_text.py` (from tokens to text, up to a stop string).

May import: small modules of `shared`. Never torch: routers import it.
"""
