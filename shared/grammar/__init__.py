"""Structured output: what a request asks for as one grammar text, and which tokens that allows.

    StructuredOutputs --grammar_text--> RequestSpec.grammar --> GrammarCompiler --> Follower
     (router, offline)                    (a text)               (on a worker)     (a sequence's)

A grammar text is llguidance's own serialised form. It crosses the services' messages; each worker
compiles it by itself. What is allowed next is a pure function of the text and the answer's token
ids so far, so an answer goes on after a preemption or on another worker where it was.

Entry points: `grammar_text` (structures.py), `check_grammar` (compiler.py), `MaskFiller`
(masks.py).
Read first: `structures.py`, `limits.py` (what is too large, and why all agree), `masks.py` (masks
of a step, and what becomes of a late one).

May import: `shared.text.markers`, small modules of `shared`. Never torch: the router imports it.
"""
