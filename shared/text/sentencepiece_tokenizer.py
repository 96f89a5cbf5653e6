"""Makes a fast tokenizer of a SentencePiece model: the same tokens, in the form that is served."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.text.sentencepiece_file import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
)

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how tokens spell a space


def sentencepiece_tokenizer(
    model: SentencePieceModel, config: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> tokenizers.Tokenizer:
    """Return a tokenizer that cuts a text as SentencePiece does.

    `legacy: false` in the configuration makes the text between special tokens begin without a
    space, as in Hugging Face's tokenizers; then one space at the start of a text is the one that
    SentencePiece would add.

    Args:
        model: the file's content.
        config: of tokenizer_config.json; may be empty.
        added: further tokens, by their ids.

    Raises:
        ModelLoadError: an added token has another id than it would get; one line.
    """
    backend = tokenizers.Tokenizer(_pieces_model(model))
    prefix = bool(config.get("add_prefix_space", True)) and model.add_dummy_prefix
    steps = _cleaning(model)
    if prefix and config.get("legacy") is False:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    else:
        steps += [normalizers.Prepend(SPACE)] if prefix else []
        steps += [normalizers.Replace(" ", SPACE)]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    ends = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(ends + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    _add_tokens(backend, model, added)
    _add_ends(backend, model, config)
    return backend


def _pieces_model(model: SentencePieceModel) -> Any:
    unknown = model.pieces[model.unk_id].text if model.unk_id >= 0 else None
    if model.kind == "unigram":
        scored = [(piece.text, piece.score) for piece in model.pieces]
        unk_id = model.unk_id if model.unk_id >= 0 else None
        return models.Unigram(scored, unk_id, model.byte_fallback)
    vocab = {piece.text: index for index, piece in enumerate(model.pieces)}
    return models.BPE(
        vocab,
        _merges(model),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make another one, those of the highest score first.

    SentencePiece joins any two neighbours that make a token, in this order.
    """
    joined = (NORMAL, UNUSED)
    ids = {piece.text: index for index, piece in enumerate(model.pieces) if piece.kind in joined}
    merges = []
    for text in sorted(ids, key=lambda text: (-model.pieces[ids[text]].score, ids[text])):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _cleaning(model: SentencePieceModel) -> list[Any]:
    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return steps


def _add_tokens(
    backend: tokenizers.Tokenizer, model: SentencePieceModel, added: Mapping[int, AddedToken]
) -> None:
    """Add the tokens that are found in a text before it is cut."""
    own = {
        index: AddedToken(
            piece.text,
            # Of spaces that are spelled already.
            normalized=SPACE in piece.text,
            special=piece.kind != USER_DEFINED,
        )
        for index, piece in enumerate(model.pieces)
        if piece.kind in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    tokens = dict(sorted({**own, **added}.items()))  # further ones get their ids in this order
    for special, group in itertools.groupby(tokens.values(), lambda token: bool(token.special)):
        (backend.add_special_tokens if special else backend.add_tokens)(list(group))
    for index, token in tokens.items():
        if backend.token_to_id(token.content) != index:
            raise ModelLoadError(
                f"the added token {token.content!r} has the id {index}, which does not fit the "
                f"{len(model.pieces)} tokens of tokenizer.model"
            )


def _add_ends(
    backend: tokenizers.Tokenizer, model: SentencePieceModel, config: Mapping[str, Any]
) -> None:
    """Begin and end texts with special tokens, by default as Llama's and Gemma's tokenizers do."""
    begins = bool(config.get("add_bos_token", True)) and model.bos_id >= 0
    ends = bool(config.get("add_eos_token", False)) and model.eos_id >= 0
    ids = [model.bos_id] * begins, [model.eos_id] * ends
    names = [[model.pieces[index].text for index in side] for side in ids]
    if begins or ends:
        single, pair = ([*names[0], f"${text}", *names[1]] for text in "AB")
        second = [f"{part}:1" for part in pair]
        backend.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *second],
            special_tokens=[(model.pieces[index].text, index) for index in ids[0] + ids[1]],
        )
