"""`LLM`: the engine in the caller's process, with prompts and outputs in vLLM's form.

    llm.py          the class; llm_answer.py: one answer; llm_progress.py: the progress bar
    prompts.py      the forms of prompts; chats.py: the forms of conversations
    outputs.py      what `LLM` returns
    beam_search.py  `LLM.beam_search`; embeddings.py: `LLM.embed`

Entry point: `LLM` (llm.py).

May import: what the engine may, and all of the engine.
"""
