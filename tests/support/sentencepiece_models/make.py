"""Trains small SentencePiece models, and writes the library's tokens of some texts.

To be run by hand, with the packages sentencepiece and protobuf. The files that it writes are in the
tree, so that tests need neither. Usage: python make.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import sentencepiece

HERE = Path(__file__).parent
README = HERE.parents[2] / "README.md"
LLAMA = {"remove_extra_whitespaces": False, "byte_fallback": True}
RULES = "FB01\t66 69\nFF41\t61\n2026\t2E 2E 2E\n"  # ligature fi, wide a, ellipsis: in code points
MODELS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "normalization_rule_name": "identity", **LLAMA},
    "bpe-without-prefix": {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<|user|>", "12,", "\u2581\u2581", "\u2581\u2581\u2581", "\n\n"],
        **LLAMA,
    },
    "bpe-cleaned": {"model_type": "bpe", "rules": RULES},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "identity", **LLAMA},
    "unigram-cleaned": {"model_type": "unigram", "rules": RULES, "byte_fallback": True},
}
LETTERS = "abc def\n\t  12,.é北🎉▁ﬁａ…"


def texts(corpus: str) -> list[str]:
    """Return passages, and letters in any order. None has a control token's name."""
    source = random.Random(1)
    starts = [source.randrange(len(corpus) - 300) for _ in range(40)]
    found = [corpus[start : start + source.randrange(1, 80)] for start in starts]
    for _ in range(40):
        found.append("".join(source.choice(LETTERS) for _ in range(source.randrange(1, 25))))
    return ["", *(text for text in found if "</s>" not in text)]


def main() -> None:
    """Write a model and its tokens for each kind."""
    corpus = README.read_text(encoding="utf-8")
    expected = {}
    for name, options in MODELS.items():
        options = {**options}
        if rules := options.pop("rules", None):
            table = HERE / "rules.tsv"
            table.write_text(rules, encoding="utf-8")
            options["normalization_rule_tsv"] = str(table)
        sentencepiece.SentencePieceTrainer.train(
            input=str(README),
            model_prefix=str(HERE / name),
            vocab_size=400,
            minloglevel=2,
            **options,
        )
        (HERE / f"{name}.vocab").unlink()
        model = sentencepiece.SentencePieceProcessor(model_file=str(HERE / f"{name}.model"))
        expected[name] = {text: model.encode(text) for text in texts(corpus)}
    (HERE / "rules.tsv").unlink()
    lines = json.dumps(expected, ensure_ascii=True, separators=(",", ":")).replace("],", "],\n")
    (HERE / "expected.json").write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
