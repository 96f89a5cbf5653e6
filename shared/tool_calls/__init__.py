"""Tool calls and reasoning in answers: the grammars that allow them, and parsers.

Entry points: `ChatSyntax` (syntax.py), which is chosen by a model's chat template, and
`answer_parser` (answer.py), which returns the parser of one answer.
Read first: `formats.py` (one row for each way to write calls; grammar and parser are made from it),
`parser.py` (chunks of text in, events out), `grammar.py` (the grammar of an answer).
`definitions.py` has the tools of a request, `reasoning.py` the text before an answer,
`answer_parts.py` says in which text stop strings count, `calls.py`, `xml_calls.py` and `scanner.py`
read one call and one value, `harmony.py` reads answers in messages, `template_fixes.py` fits
conversations to templates, `tool_request.py` makes parsers' options and grammars of a request.
Where a call writes its arguments one by one, `argument_shapes.py` says which there are,
`value_schemas.py` makes the schema of each, `python_values.py` lets it have constants of Python,
and `written_values.py` says how a value is written that does not show its type.

May import: `shared.text`, `grammar`, `base`, `settings`, `request`. Pure, and never torch: routers
import it.
"""
