"""A vocabulary as large as those of current models, made from Python's sources in a few seconds."""

from __future__ import annotations

import itertools
import json
import re
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import pre_tokenizers

EOS = 0
_NUM_CHARS = 8_000_000
# What tokens are made of: words with the space before them, up to three digits, marks, white space.
_PARTS = re.compile(r" ?[^\W\d_]+|\d{1,3}| ?(?:[^\w\s]|_)+\n*|\s+")


@cache
def large_vocabulary(size: int = 128_000) -> LLTokenizer:
    """Return a byte-level vocabulary of this size: the most frequent parts and their beginnings.

    It has no merges, which masks do not need.
    """
    counts: Counter[str] = Counter()
    for text in _sources():
        counts.update(_PARTS.findall(text))
    whole = [part for part, _ in counts.most_common()]
    begun = (part[:cut] for part in whole for cut in range(1, len(part)))
    others = (f" {i:x}{end}" for end in ("", *"ghijklmnopqrstuvwxyz") for i in range(4096, 65_536))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = dict.fromkeys(["<|end|>", *sorted(level.alphabet())])
    for part in itertools.chain(whole, begun, others):
        ((token, _),) = level.pre_tokenize_str(part[:16])
        tokens[token] = None
        if len(tokens) == size:
            break
    content = {
        "version": "1.0",
        "added_tokens": [{"id": EOS, "content": "<|end|>", "special": True} | _FLAGS],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        | {"trim_offsets": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        | {"trim_offsets": True},
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": []},
    }
    return LLTokenizer(json.dumps(content), eos_token=EOS)


_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def _sources() -> list[str]:
    texts, missing = [], _NUM_CHARS
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(file.read_text(encoding="utf-8", errors="replace")[:missing])
        missing -= len(texts[-1])
    return texts
