"""Sampling defaults from a model's `generation_config.json`, as vLLM and SGLang apply them.

A request that leaves a parameter out gets the value in `SamplingDefaults`. As in vLLM and SGLang,
`do_sample` is not applied: a temperature of 0 makes a model greedy.
"""

from __future__ import annotations

import dataclasses
import logging
import reprlib
from pathlib import Path
from typing import Any

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.model.config import GENERATION_FILE, read_json
from pagewire.shared.model.fields import Fields
from pagewire.shared.request.sampling import RequestSpec, SamplingDefaults
from pagewire.shared.settings.types import GenerationConfig

logger = logging.getLogger(__name__)

# Names in the file -> names of `SamplingDefaults`.
_APPLIED = {field.name: field.name for field in dataclasses.fields(SamplingDefaults)}
_APPLIED["max_new_tokens"] = _APPLIED.pop("max_tokens")
# Fields that change tokens in Hugging Face's `generate`, and their values without effect.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "do_sample": (True,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "renormalize_logits": (False,),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


def load_sampling_defaults(path: Path, mode: GenerationConfig) -> SamplingDefaults:
    """Read the sampling defaults in a model directory, and log those that are not applied.

    Args:
        path: the model's directory; without the file there are no defaults.
        mode: if "none", the file is not read.

    Raises:
        ModelLoadError: the file cannot be read, or a value is out of range; one line.
    """
    file = path / GENERATION_FILE
    if mode == "none" or not file.exists():
        return SamplingDefaults()
    fields = Fields(read_json(file), str(file))
    given = {
        ours: _checked(fields, theirs, ours)
        for theirs, ours in _APPLIED.items()
        if fields.raw.get(theirs) is not None
    }
    is_greedy = given.get("temperature") == 0  # as with do_sample=False
    ignored = [
        f"{name}={reprlib.repr(fields.raw[name])}"
        for name, neutral in _NOT_APPLIED.items()
        if fields.raw.get(name) is not None and fields.raw[name] not in neutral
        if not (name == "do_sample" and is_greedy)
    ]
    if ignored:
        logger.warning("%s has fields that are not applied: %s", file, ", ".join(ignored))
    return SamplingDefaults(**given)


def _checked(fields: Fields, theirs: str, ours: str) -> Any:
    value = fields.raw[theirs]
    if theirs == "top_k" and value == -1:  # in some files: all tokens
        value = 0
    try:
        RequestSpec(**{ours: value}).validate()
    except InvalidRequestError as exc:
        raise fields.error(
            f"{theirs}{exc.message.removeprefix(ours)}; correct it, or leave the file's sampling "
            "defaults out with --generation-config none"
        ) from exc
    return value
