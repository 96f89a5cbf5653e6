"""Measures the perplexity of a model by the formats of weights, activations and KV cache.

    python -P -m pagewire.tools.perplexity [MODEL] [--others DIR ...] [--text FILE]

A text is cut into parts of equally many tokens; each is a prompt, of which every token but the
first is predicted from those before it. Perplexity is e to the mean negative log probability of
these tokens. Without `--text`, the text is what the demo model has learnt: the beginnings of topics
of Python's manual.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from pagewire import LLM, SamplingParams
from pagewire.tools.demo_model.corpus import load_corpus

# Settings of an engine, by what a row of the table is called.
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32, KV cache in FP8": {"dtype": "float32", "kv_cache_dtype": "fp8"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, KV cache in FP8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "bfloat16, weights in FP8": {"dtype": "bfloat16", "quantization": "fp8"},
    "bfloat16, both in FP8": {
        "dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8",
    },
}  # fmt: skip


def perplexity(llm: LLM, text: str, length: int, parts: int) -> float:
    """Return the perplexity of the first parts of a text.

    Args:
        llm: the model.
        text: longer than the parts.
        length: tokens of a part.
        parts: how many are read.

    Raises:
        ValueError: the text is too short.
    """
    token_ids = llm.encode(text, add_special_tokens=False)
    if len(token_ids) < length * parts:
        raise ValueError(f"the text has {len(token_ids)} tokens, not {parts} times {length}")
    prompts = [token_ids[start : start + length] for start in range(0, length * parts, length)]
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    total = 0.0
    for output in llm.generate(prompts, scored, use_tqdm=False):
        places = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        total -= sum(entries[token].logprob for token, entries in places if entries is not None)
    return math.exp(total / (parts * (length - 1)))


def main(arguments: list[str] | None = None) -> None:
    """Measure the perplexity with each format and print a table."""
    parser = argparse.ArgumentParser(description="Measure perplexity by format.")
    parser.add_argument("model", nargs="?", default="demo", help="a directory, a hub id, or demo")
    parser.add_argument("--others", nargs="*", default=[], help="quantised copies of the model")
    parser.add_argument("--text", type=Path, help="the text to measure on, in UTF-8")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each part of the text")
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    text = "".join(load_corpus().documents)
    if options.text is not None:
        text = options.text.read_text(encoding="utf-8")
    rows = [(name, {"model": options.model, **settings}) for name, settings in FORMATS.items()]
    rows += [(other, {"model": other, "dtype": "bfloat16"}) for other in options.others]
    print("| format | perplexity |\n| --- | --- |")
    for name, settings in rows:
        llm = LLM(**settings, device=options.device)
        print(
            f"| {name} | {perplexity(llm, text, options.length, options.parts):.4f} |", flush=True
        )
        del llm


if __name__ == "__main__":
    main()
