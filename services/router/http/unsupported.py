"""Fields of other servers' APIs that would change the answer and are not supported here.

Ignoring one of them would give a client something else than it asked for, so each is refused
unless it has a value that asks for nothing. Fields unknown to us altogether are ignored. A field
that `SamplingFields` has is supported, whatever is said here.
"""

from __future__ import annotations

from typing import Any

from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.sampling import SamplingFields

_OFF = (None, False)
_ZERO = (None, 0)

# The values that each field may have because they ask for nothing.
_COMMON: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "cache_salt": (None,),
    "frequency_penalty": _ZERO,
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": _OFF,
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_p": _ZERO,
    "min_tokens": _ZERO,
    "presence_penalty": _ZERO,
    "priority": _ZERO,
    "regex": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": _OFF,
}
REFUSED_IN_COMPLETIONS = _COMMON | {
    "add_special_tokens": (None, True),
    "best_of": (None, 1),
    "prompt_embeds": (None,),
    "suffix": (None, ""),
}
REFUSED_IN_CHATS = _COMMON | {
    "add_generation_prompt": (None, True),
    "add_special_tokens": _OFF,
    "audio": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": _OFF,
    "documents": (None, []),
    "echo": _OFF,
    "function_call": (None, "none"),
    "functions": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "tool_choice": (None, "none"),
    "tools": (None,),
    "web_search_options": (None,),
}


def refuse_unsupported(body: dict[str, Any], chat: bool) -> None:
    """Check a request's body.

    Raises:
        InvalidRequestError: it asks for something that is not supported, naming the field.
    """
    for name, neutral in (REFUSED_IN_CHATS if chat else REFUSED_IN_COMPLETIONS).items():
        if name in SamplingFields.__struct_fields__:
            continue
        if name in body and not any(_same(body[name], value) for value in neutral):
            raise InvalidRequestError(f"{name} is not supported", name)


def _same(value: object, neutral: object) -> bool:
    """Whether they are equal, and of one kind: in Python, False equals 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
