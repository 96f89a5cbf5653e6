"""Bounds and types of what a request may ask for, with the texts that errors show.

Where a list comes as a sequence from callers and travels as a tuple, the `Meta` of both is here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.request.logprobs import MAX_TOP
from pagewire.shared.request.structured_outputs import MAX_GRAMMAR_CHARS

MAX_STOP_TOKEN_IDS = 64
MAX_EOS_TOKEN_IDS = 64  # per model; a device slot has room for these and a request's together
MAX_CHOICES = 16_384
# At most what a device slot has room for, see kernels/shaping_tables.py.
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32
MAX_BAD_TOKENS = 1024  # tokens of all bad words together
MAX_BAD_STRINGS = 128  # each is mostly two bad words: with and without a space before it
MAX_BAD_CHARS = 256
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_SALT_CHARS = 256

Temperature = Annotated[float, Meta(ge=0, le=100, description="a number between 0 and 100")]
TopP = Annotated[float, Meta(gt=0, le=1, description="a number greater than 0 and at most 1")]
TOP_K = "0 (all tokens) or a positive integer below 2**31"
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a 64-bit integer")]
MaxTokens = Annotated[int, Meta(ge=1, lt=2**31, description="an integer from 1 to 2**31 - 1")]
TokenId = Annotated[int, Meta(ge=0, lt=2**31, description="an integer from 0 to 2**31 - 1")]
GapObjective = Annotated[
    float, Meta(gt=0, le=3600, description="a number of seconds greater than 0 and at most 3600")
]
# Of `prompt_cache_retention` and of the ttl in `cache_control`: none, 5 minutes, an hour, a day.
RetainSeconds = Literal[0, 300, 3600, 86400]
# A digest of a conversation's name and its owner's.
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP, description=f"an integer from 0 to {MAX_TOP}")]
NumChoices = Annotated[
    int, Meta(ge=1, le=MAX_CHOICES, description=f"an integer from 1 to {MAX_CHOICES}")
]
STOP_TOKEN_IDS = Meta(
    max_length=MAX_STOP_TOKEN_IDS, description=f"a list of at most {MAX_STOP_TOKEN_IDS} token ids"
)
Grammar = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_GRAMMAR_CHARS,
        description=f"the text of a grammar, at most {MAX_GRAMMAR_CHARS} characters",
    ),
]
# As `is_well_formed` in shared/http/request_id.py has them.
LogId = Annotated[
    str, Meta(min_length=1, max_length=128, description="a text of at most 128 characters")
]
OwnerName = Annotated[
    str, Meta(min_length=1, max_length=64, description="a name of at most 64 characters")
]
CacheSalt = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description=f"a string of 1 to {MAX_SALT_CHARS} characters",
    ),
]
LogprobsMode = Literal["raw", "processed"]
OutputKind = Literal["cumulative", "delta", "final"]
StopString = Annotated[str, Meta(min_length=1)]
MinP = Annotated[float, Meta(ge=0, le=1, description="a number between 0 and 1")]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="a number between -2 and 2")]
# Not 0: the logits of all tokens that have occurred would be equal.
RepetitionPenalty = Annotated[
    float, Meta(ge=0.01, le=100, description="a number between 0.01 and 100")
]
MinTokens = Annotated[int, Meta(ge=0, lt=2**31, description="an integer from 0 to 2**31 - 1")]
Biases = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(
        max_length=MAX_BIASES,
        description=f"an object of at most {MAX_BIASES} token ids, each with a number between "
        "-100 and 100",
    ),
]
ALLOWED_TOKEN_IDS = Meta(
    min_length=1,
    max_length=MAX_ALLOWED_TOKEN_IDS,
    description=f"a list of 1 to {MAX_ALLOWED_TOKEN_IDS} token ids",
)
BadWord = Annotated[
    tuple[TokenId, ...],
    Meta(
        min_length=1,
        max_length=MAX_BAD_WORD_TOKENS,
        description=f"1 to {MAX_BAD_WORD_TOKENS} token ids",
    ),
]
BadString = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_BAD_CHARS,
        description=f"a string of 1 to {MAX_BAD_CHARS} characters",
    ),
]
BAD_STRINGS = Meta(
    max_length=MAX_BAD_STRINGS, description=f"a list of at most {MAX_BAD_STRINGS} strings"
)
PromptLength = Annotated[
    int, Meta(ge=-1, lt=2**31, description="an integer from 1 to 2**31 - 1, or -1 for what fits")
]


def last_tokens(token_ids: list[int], count: int | None, longest: int) -> list[int]:
    """Return what `truncate_prompt_tokens` leaves of a prompt.

    Args:
        token_ids: the prompt.
        count: the value of the field, a `PromptLength`; None keeps all.
        longest: what -1 means.

    Raises:
        InvalidRequestError: it is 0.
    """
    if count == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be an integer from 1 to 2**31 - 1, or -1 for what fits, "
            "not 0",
            "truncate_prompt_tokens",
        )
    return token_ids if count is None else token_ids[-(max(1, longest) if count < 0 else count) :]
