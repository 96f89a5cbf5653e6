"""Tokens that other files than tokenizer.json add or name, against Hugging Face's AutoTokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer

Files = dict[str, Any]  # contents by names without `.json`
CONFIG, MAP, ADDED = "tokenizer_config", "special_tokens_map", "added_tokens"
TEXTS = (
    "The <new> lambda  <img> [sep]\n<|end|> x<new>y <|bos|>THE lambdas",
    "<x> <NEW>  a<img>b  <|user|> [SEP][SEP] The",
)
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def token(content: str, *flags: str) -> Files:
    return {"content": content, **{flag: flag in flags for flag in FLAGS}}


def typed(content: str, **flags: bool) -> Files:
    return {"__type": "AddedToken", "content": content, **flags}


def listed(*tokens: Files, first: int = 2048) -> Files:
    return {"added_tokens_decoder": dict(enumerate(tokens, start=first))}


# What is in the files besides the demo model's tokenizer.json; the last value: tokens that this
# file does not list as added.
CASES: dict[str, tuple[Files, tuple[str, ...]]] = {
    "listed-new": ({CONFIG: listed(token("<new>", "special"), token("<img>", "lstrip"))}, ()),
    "listed-of-the-vocabulary": (
        {CONFIG: listed(token("<|user|>", "special"), token("<|end|>"), first=3)},
        ("<|user|>", "<|end|>"),
    ),
    "listed-with-other-flags": (
        {CONFIG: listed(token("<|end|>", "lstrip", "rstrip"), token("The", "single_word"))},
        (),
    ),
    "listed-and-normalized": ({CONFIG: listed(token("<new>", "normalized")), "lower": True}, ()),
    "listed-under-other-ids": ({CONFIG: listed(token("<new>"), token("<img>"), first=5000)}, ()),
    "listed-and-named": (
        {CONFIG: {**listed(token("<new>")), "cls_token": "<new>", "sep_token": "[SEP]"}},
        (),
    ),
    "named": (
        {
            CONFIG: {
                "bos_token": "<|bos|>",
                "eos_token": typed("<|end|>", rstrip=True),
                "mask_token": typed("<img>", lstrip=True, normalized=False),
                "image_token": "<x>",
                "boi_token": typed("[SEP]"),
                "unk_token": None,
                "add_bos_token": True,
            }
        },
        ("<|bos|>", "<|end|>"),
    ),
    "named-in-an-object": (
        {CONFIG: {"extra_special_tokens": {"image_token": "<img>", "other": typed("<new>")}}},
        (),
    ),
    "named-in-a-newer-object": (
        {CONFIG: {"model_specific_special_tokens": {"image_token": "<img>", "x": typed("<new>")}}},
        (),
    ),
    "named-in-both-objects": (
        {
            CONFIG: {
                "model_specific_special_tokens": {"image_token": "<img>", "x": "<new>"},
                "extra_special_tokens": {"image_token": "[SEP]"},
            }
        },
        (),
    ),
    "named-and-in-a-newer-object": (
        {CONFIG: {"image_token": "<x>", "model_specific_special_tokens": {"boi_token": "<img>"}}},
        (),
    ),
    "in-a-newer-object-and-without-a-name": (
        {
            CONFIG: {
                "model_specific_special_tokens": {"image_token": "<img>"},
                "extra_special_tokens": ["<new>"],
            }
        },
        (),
    ),
    "without-a-name": ({CONFIG: {"extra_special_tokens": ["<img>", typed("[SEP]")]}}, ()),
    "without-a-name-in-older-files": ({CONFIG: {"additional_special_tokens": ["<img>"]}}, ()),
    "older-files": (
        {
            CONFIG: {"sep_token": "The", "image_token": "<img>"},
            MAP: {
                "sep_token": "[SEP]",
                "pad_token": {"content": "<x>", "lstrip": True},
                "image_token": "<x>",
                "additional_special_tokens": ["<|user|>", "<img>"],
            },
            ADDED: {"<new>": 2048, "[SEP]": 2049},
        },
        ("<|user|>",),
    ),
    "older-files-that-do-not-count": (
        {CONFIG: listed(token("<new>")), MAP: {"sep_token": "[SEP]"}, ADDED: {"<img>": 2048}},
        (),
    ),
    "older-files-alone": ({MAP: {"cls_token": "<new>"}, ADDED: {"<new>": 2048}}, ()),
    "special-tokens-are-text": ({CONFIG: {"split_special_tokens": True}}, ()),
}


def write(path: Path, files: Files, unlisted: tuple[str, ...] = ()) -> Path:
    shutil.copy(demo_model_path() / "tokenizer.json", path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    added = [each for each in tokenizer["added_tokens"] if each["content"] not in unlisted]
    normalizer = {"type": "Lowercase"} if files.get("lower") else None
    contents = {name: content for name, content in files.items() if name != "lower"}
    contents["tokenizer"] = {**tokenizer, "added_tokens": added, "normalizer": normalizer}
    for name, content in contents.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(("files", "unlisted"), CASES.values(), ids=CASES)
def test_tokens_are_hugging_faces(tmp_path: Path, files: Files, unlisted: tuple[str, ...]) -> None:
    write(tmp_path, files, unlisted)
    (tmp_path / "config.json").write_text("{}")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_dir(tmp_path)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    names = theirs.special_tokens_map
    source = "|".join(f"{{{{ {name} }}}}" for name in [*names, "unk_token", "sep_token"])
    chat = [{"role": "user", "content": "Hi"}]
    expected = theirs.apply_chat_template(chat, chat_template=source, tokenize=False)
    assert ours.with_template(source).render_chat(chat) == expected
    assert ours.bos_token_id == theirs.bos_token_id


REFUSED: dict[str, tuple[Files, str]] = {
    "a list of tokens": ({CONFIG: {"added_tokens_decoder": []}}, "must be an object, not []"),
    "an index": (
        {CONFIG: {"added_tokens_decoder": {"one": token("a")}}},
        "the added token 'one' must be an id with a content",
    ),
    "a text": (
        {CONFIG: {"added_tokens_decoder": {"1": "a"}}},
        "the added token '1' must be an id with a content, not 'a'",
    ),
    "no content": (
        {CONFIG: {"added_tokens_decoder": {"1": {"special": True}}}},
        "the token 1 must be a text, or an object with a content",
    ),
    "a number": ({CONFIG: {"sep_token": 3}}, "the token sep_token must be a text, or an object"),
    "extra": ({CONFIG: {"extra_special_tokens": "a"}}, "extra_special_tokens must be a list of"),
    "older": ({ADDED: {"a": "b"}}, "the added token 'b' must be an id with a content"),
}


@pytest.mark.parametrize(("files", "problem"), REFUSED.values(), ids=REFUSED)
def test_files_of_another_form_are_refused(tmp_path: Path, files: Files, problem: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.from_dir(write(tmp_path, files))
    assert problem in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
