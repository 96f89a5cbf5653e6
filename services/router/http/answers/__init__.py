"""From the tokens of workers to JSON in OpenAI's form.

    TokenOutput --> answer_set.py (runs all answers to a request) --> formats.py --> JSON, events

Read first: `answer_set.py`, `formats.py`. `parsed_chat.py` is the format of chats with tools or
reasoning. `objects.py` and `timing_objects.py` have the types of all that is written, for the
OpenAPI document; tests compare them with responses.

May import: `inputs`, `dispatch` and `text` of the router.
"""
