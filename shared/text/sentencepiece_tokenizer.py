"""Makes a fast tokenizer of a SentencePiece model: the same tokens, in the form that is served."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.text.sentencepiece_file import KINDS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # values of a token's `type`
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how tokens spell a space


def sentencepiece_tokenizer(
    model: Any, config: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> tokenizers.Tokenizer:
    """Return a tokenizer that cuts a text as SentencePiece does.

    `legacy: false` in the configuration makes the text between special tokens begin without a
    space, as in Hugging Face's tokenizers; then one space at the start of a text is the one that
    SentencePiece would add.

    Args:
        model: the file's `ModelProto`.
        config: of tokenizer_config.json; may be empty.
        added: further tokens, by their ids.

    Raises:
        ModelLoadError: an added token has another id than it would get; one line.
    """
    backend = tokenizers.Tokenizer(_pieces_model(model))
    prefix = bool(config.get("add_prefix_space", True)) and model.normalizer_spec.add_dummy_prefix
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


def _pieces_model(model: Any) -> Any:
    trainer = model.trainer_spec
    unk_id = trainer.unk_id if trainer.unk_id >= 0 else None
    if KINDS[trainer.model_type] == "unigram":
        scored = [(token.piece, token.score) for token in model.pieces]
        return models.Unigram(scored, unk_id, trainer.byte_fallback)
    vocab = {token.piece: index for index, token in enumerate(model.pieces)}
    return models.BPE(
        vocab,
        _merges(model),
        unk_token=None if unk_id is None else model.pieces[unk_id].piece,
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
    )


def _merges(model: Any) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make another one, those of the highest score first.

    SentencePiece joins any two neighbours that make a token, in this order.
    """
    joined = (NORMAL, UNUSED)
    ids = {token.piece: index for index, token in enumerate(model.pieces) if token.type in joined}
    scores = [token.score for token in model.pieces]
    merges = []
    for text in sorted(ids, key=lambda text: (-scores[ids[text]], ids[text])):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _cleaning(model: Any) -> list[Any]:
    steps: list[Any] = []
    rules = model.normalizer_spec
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return steps


def _add_tokens(backend: tokenizers.Tokenizer, model: Any, added: Mapping[int, AddedToken]) -> None:
    """Add the tokens that are found in a text before it is cut."""
    own = {
        index: AddedToken(
            token.piece,
            # Of spaces that are spelled already.
            normalized=SPACE in token.piece,
            special=token.type != USER_DEFINED,
        )
        for index, token in enumerate(model.pieces)
        if token.type in (UNKNOWN, CONTROL, USER_DEFINED)
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


def _add_ends(backend: tokenizers.Tokenizer, model: Any, config: Mapping[str, Any]) -> None:
    """Begin and end texts with special tokens, by default as Llama's and Gemma's tokenizers do."""
    bos_id, eos_id = model.trainer_spec.bos_id, model.trainer_spec.eos_id
    begins = bool(config.get("add_bos_token", True)) and bos_id >= 0
    ends = bool(config.get("add_eos_token", False)) and eos_id >= 0
    ids = [bos_id] * begins, [eos_id] * ends
    names = [[model.pieces[index].piece for index in side] for side in ids]
    if begins or ends:
        single, pair = ([*names[0], f"${text}", *names[1]] for text in "AB")
        second = [f"{part}:1" for part in pair]
        backend.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *second],
            special_tokens=[(model.pieces[index].piece, index) for index in ids[0] + ids[1]],
        )
