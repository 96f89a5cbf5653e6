"""Bad words are banned as tokenizers write them, wherever they are in a text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.request.sampling import bad_word_ids
from pagewire.shared.text.conversion import convert_tokenizer
from pagewire.shared.text.tokenizer import Tokenizer

MODELS = Path(__file__).resolve().parents[2] / "support" / "sentencepiece_models"
WORDS = ["import", " os", "the", "The cat", "  foo", "zebra", "naïve", "日本", "(", "don't", "\tx"]
BEFORE = ["", "a ", "\n", "x\n", "(", '"', "x. "]


@pytest.fixture(scope="module", params=["demo", "bpe", "bpe-without-prefix", "unigram"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """A byte-level tokenizer, and such as add a space to a text's beginning, or do not."""
    if request.param == "demo":
        return Tokenizer.from_dir(demo_model_path())
    path = tmp_path_factory.mktemp("model")
    shutil.copy(MODELS / f"{request.param}.model", path / "tokenizer.model")
    convert_tokenizer(path)
    return Tokenizer.from_dir(path)


def has(ids: list[int], part: tuple[int, ...]) -> bool:
    return any(tuple(ids[at : at + len(part)]) == part for at in range(len(ids)))


@pytest.mark.parametrize("word", WORDS)
def test_a_bad_word_is_banned_after_whatever_it_comes(tokenizer: Tokenizer, word: str) -> None:
    banned = bad_word_ids([word], tokenizer.encode_word)
    for before in BEFORE:
        ids = tokenizer.encode_word(before + word)
        assert any(has(ids, each) for each in banned), (before, tokenizer.token_strings(ids))


@pytest.mark.parametrize("word", WORDS)
def test_what_vllm_bans_is_banned(tokenizer: Tokenizer, word: str) -> None:
    bare, spaced = (tokenizer.encode_word(space + word.lstrip()) for space in ("", " "))
    vllms = [bare]
    if spaced[0] != bare[0] and len(spaced) == len(bare):
        vllms.append(spaced)
    banned = bad_word_ids([word], tokenizer.encode_word)
    assert all(any(has(ids, each) for each in banned) for ids in vllms)


def test_a_form_that_ends_with_another_takes_no_room(tokenizer: Tokenizer) -> None:
    banned = bad_word_ids(WORDS + WORDS, tokenizer.encode_word)
    assert len(set(banned)) == len(banned) <= 2 * len(WORDS)
    pairs = [(one, other) for one in banned for other in banned if one != other]
    assert not any(one[-len(other) :] == other for one, other in pairs)


def test_words_with_too_many_forms_or_tokens_are_refused() -> None:
    def encode(text: str) -> list[int]:  # other tokens in a text of another length
        return [len(text) * 1000 + ord(each) for each in text]

    with pytest.raises(InvalidRequestError, match="these 128 words are tokenized in 384 ways"):
        bad_word_ids([f"  {chr(each)}" for each in range(200, 328)], encode)
    with pytest.raises(InvalidRequestError, match=r"bad_words: 'x{40}' is 41 tokens: at most 32"):
        bad_word_ids(["x" * 40], encode)
