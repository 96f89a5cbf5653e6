"""SentencePiece models against the library's own tokens, which tests/support has."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.text.conversion import convert_tokenizer
from pagewire.shared.text.sentencepiece_file import read_sentencepiece
from pagewire.shared.text.tokenizer import Tokenizer

MODELS = Path(__file__).resolve().parents[2] / "support" / "sentencepiece_models"
EXPECTED: dict[str, dict[str, list[int]]] = json.loads((MODELS / "expected.json").read_text())


def convert(path: Path, name: str, **files: dict[str, Any]) -> Tokenizer:
    """Convert a model in a directory that has further files."""
    shutil.copy(MODELS / f"{name}.model", path / "tokenizer.model")
    for stem, content in files.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    assert convert_tokenizer(path) == path / "tokenizer.json"
    return Tokenizer.from_dir(path)


@pytest.mark.parametrize("name", EXPECTED)
def test_tokens_are_sentencepieces(tmp_path: Path, name: str) -> None:
    tokenizer = convert(tmp_path, name)
    for text, ids in EXPECTED[name].items():
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [1, *ids]


@pytest.mark.parametrize("name", ["bpe", "bpe-without-prefix", "unigram"])
def test_texts_come_back(tmp_path: Path, name: str) -> None:
    tokenizer = convert(tmp_path, name)
    for text, ids in EXPECTED[name].items():
        if "▁" not in text:  # which spells a space
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("begins", "ends", "expected"),
    [(False, False, ([], [])), (True, True, ([1], [2])), (False, True, ([], [2]))],
)
def test_special_tokens_at_the_ends(
    tmp_path: Path, begins: bool, ends: bool, expected: tuple[list[int], list[int]]
) -> None:
    config = {"add_bos_token": begins, "add_eos_token": ends}
    assert convert(tmp_path, "bpe", tokenizer_config=config).special_ends == expected


def test_special_tokens_in_a_text(tmp_path: Path) -> None:
    """Each part after one begins with a space, as with Llama's first tokenizers; or none does."""
    legacy = convert(tmp_path, "bpe")
    (tmp_path / "tokenizer.json").unlink()
    later = convert(tmp_path, "bpe", tokenizer_config={"legacy": False})
    one, word = (legacy.encode(text, add_special_tokens=False) for text in ("a", "the a"))
    assert legacy.encode("the a</s>a") == [1, *word, 2, *one]
    inner = later.encode("the a</s>a")
    assert inner[:-1] == [1, *word, 2] and later.decode(inner) == "the aa"
    for text, ids in EXPECTED["bpe"].items():
        if not text.startswith((" ", "▁")):
            assert later.encode(text, add_special_tokens=False) == ids


def test_added_tokens(tmp_path: Path) -> None:
    config = {
        "added_tokens_decoder": {
            "401": {"content": "<|end|>", "special": True},
            "402": {"content": "<think>", "special": False},
        }
    }
    tokenizer = convert(tmp_path, "bpe", tokenizer_config=config, added_tokens={"<|pad|>": 400})
    assert tokenizer.encode("<|end|><think><|pad|>", add_special_tokens=False) == [401, 402, 400]
    assert tokenizer.decode([401, 402, 400]) == "<think><|pad|>"
    assert tokenizer.vocab_size == 403


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"added_tokens": {"<|end|>": 500}}, "'<|end|>' has the id 500, which does not fit"),
        ({"added_tokens": {"<|end|>": 7}}, "'<|end|>' has the id 7, which does not fit the 400"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "must be an id with a content"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "not supported"),
        ({"added_tokens": {"<|end|>": [1]}}, "must be an id with a content"),
    ],
)
def test_added_tokens_that_do_not_fit(
    tmp_path: Path, files: dict[str, dict[str, Any]], reason: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        convert(tmp_path, "bpe", **files)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("name", EXPECTED)
def test_broken_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    whole = (MODELS / f"{name}.model").read_bytes()
    source = random.Random(5)
    file = tmp_path / "tokenizer.model"
    samples = [whole[: source.randrange(len(whole))] for _ in range(25)]
    for _ in range(25):
        changed = bytearray(whole)
        for _ in range(20):
            changed[source.randrange(len(changed))] = source.randrange(256)
        samples.append(bytes(changed))
    samples += [
        b"",
        b"\xff" * 100,
        source.randbytes(500),
        b'{"version": "1.0"}',
        b"IQ== 0\nIg== 1\n",
    ]
    refused = 0
    for sample in samples:
        file.write_bytes(sample)
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
        try:
            convert_tokenizer(tmp_path)
        except ModelLoadError as exc:
            assert "\n" not in str(exc)
            refused += 1
    assert refused > 25


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    with file.open("wb") as stream:
        stream.truncate((64 << 20) + 1)
    with pytest.raises(ModelLoadError, match="more than 64 MiB"):
        read_sentencepiece(file)
