"""`pagewire convert`, and vocab.json with merges.txt against transformers' tokenizers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import transformers

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.conversion import convert_tokenizer
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.unit.text.test_sentencepiece import EXPECTED, MODELS

README = Path(__file__).resolve().parents[3] / "README.md"
TEXTS = (
    "Hello world",
    "  It's 1234 lamps,\n\n\tisn't it?  ",
    "Größe 北京 \N{WAVING HAND SIGN}",
    "a<|endoftext|>b",
    *README.read_text(encoding="utf-8").splitlines()[:40],
)


def write_bpe_files(path: Path, tokenizer_class: str | None) -> None:
    """Train a byte-level BPE, and save it in the older form."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train([str(README)], vocab_size=500, special_tokens=["<|endoftext|>"])
    trained.save_model(str(path))
    config = {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    if tokenizer_class is not None:
        config["tokenizer_class"] = tokenizer_class
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_bpe_files_have_the_tokens_of_transformers_class(tmp_path: Path, name: str) -> None:
    write_bpe_files(tmp_path, name)
    theirs = getattr(transformers, name)(
        str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), unk_token="<|endoftext|>"
    )
    convert_tokenizer(tmp_path)
    ours = Tokenizer.from_dir(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


def test_bpe_files_of_no_known_class_are_refused(tmp_path: Path) -> None:
    write_bpe_files(tmp_path, None)
    with pytest.raises(ModelLoadError) as caught:
        convert_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tokenizer.json").exists()


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pagewire.services.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_refusal_names_the_command_which_writes_the_file(tmp_path: Path) -> None:
    shutil.copy(MODELS / "bpe.model", tmp_path / "tokenizer.model")
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.from_dir(tmp_path)
    command = f"`pagewire convert {tmp_path}` makes it"
    assert command in str(caught.value)
    done = run("convert", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'tokenizer.json'}: 400 tokens\n"
    text, ids = next((text, ids) for text, ids in EXPECTED["bpe"].items() if len(ids) > 5)
    assert Tokenizer.from_dir(tmp_path).encode(text) == [1, *ids]
    assert not list(tmp_path.glob("*.part*"))


def test_a_tokenizer_that_is_there_stays(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    shutil.copy(demo_model_path() / "tokenizer.json", file)
    shutil.copy(MODELS / "bpe.model", tmp_path / "tokenizer.model")
    before = file.read_bytes()
    assert convert_tokenizer(tmp_path) == file
    assert file.read_bytes() == before


def test_nothing_to_convert_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    done = run("convert", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "there is neither tokenizer.model nor vocab.json and merges.txt" in done.stderr


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model"])
def test_forms_that_are_not_converted_are_named(tmp_path: Path, name: str) -> None:
    """Those of Mistral's later models and of Moonlight."""
    (tmp_path / name).write_text("{}")
    message = rf"tokenizer\.json is missing, and {name} is not converted: copy tokenizer\.json and"
    for read in (Tokenizer.from_dir, convert_tokenizer):
        with pytest.raises(ModelLoadError, match=message):
            read(tmp_path)
