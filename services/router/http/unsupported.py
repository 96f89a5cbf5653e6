"""Refuses fields of other servers' APIs that would change the answer, unsupported here.

If one of them were ignored, the client would get another answer than it asked for. So each is
refused unless its value changes nothing. Fields that are not known at all are ignored. In chats and
completions, a field in `SamplingFields` is supported, even if it is listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pagewire.shared.base.errors import UNDECODABLE, InvalidRequestError
from pagewire.shared.request.sampling import SamplingFields

_OFF = (None, False)
MAX_NEUTRAL_BYTES = 256  # no value that asks for nothing is longer: so the others need no decoding

# The values that each field may have because they ask for nothing.
_COMMON: dict[str, tuple[Any, ...]] = {
    "custom_logit_processor": (None,),
    "ebnf": (None,),
    "guided_whitespace_pattern": (None,),
    "json_schema": (None,),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "no_stop_trim": _OFF,
    "regex": (None,),
    "repetition_detection": (None,),
    "return_hidden_states": _OFF,
    "stop_regex": (None, "", []),
    "structural_tag": (None,),
    "thinking_token_budget": (None,),
    "truncation_side": (None, "left"),
    "use_beam_search": _OFF,
}


def _unsupported(fields: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    supported = {*SamplingFields.__struct_fields__}
    return {name: values for name, values in fields.items() if name not in supported}


REFUSED_IN_COMPLETIONS = _unsupported(
    _COMMON | {"best_of": (None, 1), "prompt_embeds": (None,), "suffix": (None, "")}
)
REFUSED_IN_CHATS = _unsupported(
    _COMMON
    | {
        "audio": (None,),
        "documents": (None, []),
        "echo": _OFF,
        "function_call": (None, "none"),
        "functions": (None,),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "web_search_options": (None,),
    }
)


# Fields of chats that responses have by another name, or have no place for.
REFUSED_IN_RESPONSES = REFUSED_IN_CHATS | {
    "add_generation_prompt": (None, True),
    "chat_template": (None,),
    "continue_final_message": _OFF,
    "logprobs": _OFF,
    "max_completion_tokens": (None,),
    "max_tokens": (None,),
    "messages": (None,),
    "n": (None, 1),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "response_format": (None,),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
}
NAMES_IN_RESPONSES = {
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def refuse_unsupported(
    fields: Mapping[str, msgspec.Raw],
    refused: Mapping[str, tuple[Any, ...]],
    names: Mapping[str, str] | None = None,
) -> None:
    """Check a request's body.

    Args:
        fields: of the body, encoded.
        refused: unsupported fields, each with the values that it may have.
        names: the fields to use in place of some of these.

    Raises:
        InvalidRequestError: it asks for something that is not supported, naming the field.
    """
    for name, neutral in refused.items():
        if name in fields and not _is_neutral(fields[name], neutral):
            problem = f"{name} is not supported"
            if names is not None and name in names:
                problem += f" here: use {names[name]}"
            raise InvalidRequestError(problem, name, "unsupported_parameter")


def _is_neutral(encoded: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    if memoryview(encoded).nbytes > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(encoded)
    except UNDECODABLE:  # a number that no float can hold, or text that is not UTF-8
        return False
    return any(_same(value, each) for each in neutral)


def _same(value: object, neutral: object) -> bool:
    """Whether they are equal, and of one kind: in Python, False equals 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
