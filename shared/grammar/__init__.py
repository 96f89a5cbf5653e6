"""Structured output: a request's form as one grammar text, and which tokens it allows next.

    StructuredOutputs --grammar_text--> RequestSpec.grammar --> GrammarCompiler --> Follower
     (router, offline)                    (a text)               (on a worker)     (for a sequence)

A grammar text is llguidance's own serialised form. It is sent in messages between services, and
each worker compiles it. Which tokens are allowed next depends only on the text and the answer's
tokens so far. So an answer can continue after a preemption or on another worker.

Entry points: `grammar_text` (structures.py), `check_grammar` (compiler.py), `MaskFiller`
(masks.py).
Read first: `structures.py`, `limits.py` (which grammars are too large, and why all processes
agree), `masks.py` (masks of a step, and what happens when one is late).

May import: `shared.text.markers`; `added_tokens`, `tokenizer_files` and `tokenizer_loading` of
`shared.model`; `base`, `settings`, `request`. Never torch: the router imports it.
"""
