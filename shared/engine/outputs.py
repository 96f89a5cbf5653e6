"""What the offline `LLM` returns, in the shape of vLLM's outputs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: among the answers to its prompt.
        text: without the stop string that ended it.
        token_ids: with those of the stop string or the stop token that ended it.
        finish_reason: "stop" or "length".
        stop_reason: the stop string, or the one of `stop_token_ids`, that ended it; None if
            it was the model's own end of sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """What came of one prompt.

    `text`, `token_ids` and `finish_reason` are those of the first answer.

    Attributes:
        prompt: its text; None if token ids were given.
        outputs: the answers, `n` of them.
        cached_tokens: prompt tokens that were found in the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first answer ended."""
        return self.outputs[0].finish_reason
