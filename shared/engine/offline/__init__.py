"""`LLM`: the engine in the caller's process, with prompts and outputs in vLLM's form.

    llm.py          `LLM`; async_llm.py: `AsyncLLM`; model.py: what both have in common
    llm_answer.py   one answer while it is computed; llm_progress.py: the progress bar
    prompts.py      the forms of prompts; chats.py: the forms of conversations
    outputs.py      what both return
    beam_search.py  `LLM.beam_search`; embeddings.py: `LLM.embed`

Entry points: `LLM` (llm.py), `AsyncLLM` (async_llm.py).

May import: what the engine may, and all of the engine.
"""
