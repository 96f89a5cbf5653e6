"""`LLM`: an engine without a network, with prompts and outputs of the same form as vLLM's.

    llm.py          the class; llm_answer.py and llm_progress.py: its answers and its progress bar
    prompts.py      the forms of prompts; chats.py: of conversations
    outputs.py      what it returns
    beam_search.py  `LLM.beam_search`; embeddings.py: `LLM.embed`

Entry point: `LLM` (llm.py).

May import: what the engine may, and all of the engine.
"""
