"""The tokens that grammars know: those of all of a model's files, if the model has them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.compiler import check_grammar
from pagewire.shared.grammar.matcher import Matcher, allowed_tokens
from pagewire.shared.grammar.structures import regex_grammar
from pagewire.shared.grammar.vocabulary import load_vocabulary, mask_words
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.conversion import convert_tokenizer
from pagewire.tests.support.unknown_tokens import UNKNOWN, VOCAB, edit, model_with_unknown_token

SENTENCEPIECE = Path(__file__).resolve().parents[2] / "support" / "sentencepiece_models"
ENDS = (1,)


def model_of(path: Path, name: str) -> Path:
    """Make a directory with a vocabulary of one kind."""
    if name == "byte-level":
        return model_with_unknown_token(path)
    path.mkdir()
    shutil.copy(SENTENCEPIECE / f"{name}.model", path / "tokenizer.model")
    convert_tokenizer(path)
    return path


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("byte-level", (VOCAB, 2000, 1000)),
        ("bpe", (399, 350)),
        ("unigram", (399, 350)),
    ],
)
def test_tokens_without_a_row_are_left_out(
    tmp_path: Path, name: str, limits: tuple[int, ...]
) -> None:
    model = model_of(tmp_path / "model", name)
    for limit in limits:
        vocabulary = load_vocabulary(model, limit, ENDS)
        assert vocabulary.vocab_size == limit
        mask = Matcher(check_grammar(regex_grammar("(.|\n)*"), vocabulary)).fill_mask(
            mask_words(limit)
        )
        assert mask is not None
        allowed = allowed_tokens(mask)
        assert limit // 2 < len(allowed) and max(allowed) == limit - 1
        whole = load_vocabulary(model, 4096, ENDS)
        assert [whole.decode_bytes([each]) for each in range(limit)] == [
            vocabulary.decode_bytes([each]) for each in range(limit)
        ]


def test_a_token_without_a_row_cannot_be_named(tmp_path: Path) -> None:
    model = model_with_unknown_token(tmp_path / "model")
    grammar = f"start: {UNKNOWN}"
    assert check_grammar(grammar, load_vocabulary(model, VOCAB + 1, ENDS))
    with pytest.raises(InvalidRequestError, match=UNKNOWN):
        check_grammar(grammar, load_vocabulary(model, VOCAB, ENDS))


def test_tokens_that_another_file_lists_can_be_named(tmp_path: Path) -> None:
    model = shutil.copytree(demo_model_path(), tmp_path / "model")
    edit(model / "tokenizer_config.json", added_tokens_decoder={VOCAB: {"content": UNKNOWN}})
    vocabulary = load_vocabulary(model, VOCAB + 1, ENDS)
    matcher = Matcher(check_grammar(f"start: {UNKNOWN}", vocabulary))
    mask = matcher.fill_mask(mask_words(VOCAB + 1))
    assert mask is not None and allowed_tokens(mask) == [VOCAB]


@pytest.mark.parametrize("how", ["moved there", "written over"])
def test_other_files_at_the_same_path_are_another_vocabulary(tmp_path: Path, how: str) -> None:
    model = model_with_unknown_token(tmp_path / "model")
    first = load_vocabulary(model, VOCAB + 1, ENDS)
    assert load_vocabulary(model, VOCAB + 1, ENDS) is first
    file = model / "tokenizer.json"
    changed = file.read_text().replace(UNKNOWN, "<old>")  # of the same length
    if how == "moved there":
        shutil.copytree(model, tmp_path / "other")
        (tmp_path / "other" / file.name).write_text(changed)
        shutil.rmtree(model)
        (tmp_path / "other").rename(model)
    else:
        file.write_text(changed)
    assert load_vocabulary(model, VOCAB + 1, ENDS).decode_str([VOCAB]) == "<old>"


def test_another_file_that_lists_tokens_is_another_vocabulary(tmp_path: Path) -> None:
    model = shutil.copytree(demo_model_path(), tmp_path / "model")
    assert load_vocabulary(model, VOCAB + 1, ENDS).decode_str([VOCAB]) != UNKNOWN
    edit(model / "tokenizer_config.json", added_tokens_decoder={VOCAB: {"content": UNKNOWN}})
    assert load_vocabulary(model, VOCAB + 1, ENDS).decode_str([VOCAB]) == UNKNOWN
