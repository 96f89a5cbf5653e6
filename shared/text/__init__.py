"""Text to token ids and back: tokenizer, chat templates, detokenizing, stop strings.

Entry point: `Tokenizer` (tokenizer.py).
Read first: `tokenizer.py`, `detokenizer.py` (holds a character back until all of its tokens are
there), `chat_template.py`, `literals.py` (special tokens that messages spell out), `markers.py`
(special tokens that grammars name), `stop_strings.py` (finds a stop string, and holds back text
that may begin one), `answer_text.py` (an answer: both, one after the other), `conversion.py` (makes
a tokenizer.json of older forms).

May import: `tokenizer_files` and `tokenizer_loading` of `shared.model`, `base`, `settings`,
`request`. Never torch: routers import it.
"""
