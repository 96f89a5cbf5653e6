"""Tool calls and reasoning in answers: what a model writes for them, allowed and read back.

Entry points: `ChatSyntax` (syntax.py), which a model's chat template chooses, and `answer_parser`
(answer.py), which reads one answer.
Read first: `formats.py` (one row for each way to write calls; grammar and parser are made from it),
`parser.py` (parts of text in, events out), `grammar.py` (what an answer may be, for llguidance).
`definitions.py` has the tools of a request, `reasoning.py` the text before an answer, `calls.py`,
`xml_calls.py` and `scanner.py` read one call and one value, `harmony.py` reads answers in messages,
`shown.py` fits conversations to templates.

May import: `shared.text`, small modules of `shared`. Pure, and never torch: routers import it.
"""
