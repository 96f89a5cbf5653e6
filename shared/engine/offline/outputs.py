"""What the offline `LLM` returns, in the shape of vLLM's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pagewire.shared.request.logprobs import Token
from pagewire.shared.request.sampling_types import OutputKind
from pagewire.shared.tool_calls.answer import ParsedMessage


@dataclass(slots=True)
class Logprob:
    """One token's log probability at one position.

    Attributes:
        logprob: its natural logarithm, from the raw logits unless `logprobs_mode` is "processed".
        rank: 1 for the most likely token.
        decoded_token: its text; None if the model has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# One dictionary for each position, by token id; its first entry is the position's own token.
Logprobs = list[dict[int, Logprob]]


@dataclass(slots=True)
class CompletionOutput:
    """One of the answers to a prompt.

    Attributes:
        index: its index among the answers to its prompt.
        text: its text, without the stop string that ended it.
        token_ids: its tokens, including those of the stop string or stop token that ended it.
        finish_reason: "stop" or "length".
        stop_reason: the stop string or the token of `stop_token_ids` that ended it; else None.
        logprobs: those of each token, if `SamplingParams.logprobs` asks for them.
        message: content, reasoning and tool calls, if it is an answer of `LLM.chat`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Logprobs | None = None
    message: ParsedMessage | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt, and all answers to it.

    `text`, `token_ids` and `finish_reason` are the first answer's.

    Attributes:
        prompt: its text; None if token ids were given.
        prompt_token_ids: all tokens of the prompt.
        outputs: its `n` answers.
        cached_tokens: number of prompt tokens that were found in the prefix cache.
        prompt_logprobs: those of each prompt token (None for the first one), if
            `SamplingParams.prompt_logprobs` asks for them.
        index: index of the prompt among those of the call.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    index: int = 0

    @property
    def finished(self) -> bool:
        """Whether all answers to the prompt have ended."""
        return all(answer.finish_reason is not None for answer in self.outputs)

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first answer has ended; None if it has not."""
        return self.outputs[0].finish_reason


class OutputReader:
    """Reads an output that grows, for a consumer that may be slower.

    Args:
        output: the output of one prompt.
        kind: what the consumer gets, see `SamplingParams.output_kind`.
    """

    def __init__(self, output: RequestOutput, kind: OutputKind) -> None:
        self.output = output
        self._kind = kind
        self._read = [_size(answer) for answer in output.outputs]

    def news(self) -> RequestOutput | None:
        """Return a copy of what the consumer gets now; None if nothing is new for it."""
        sizes = [_size(answer) for answer in self.output.outputs]
        if sizes == self._read or (self._kind == "final" and not self.output.finished):
            return None
        starts = self._read if self._kind == "delta" else [_NOTHING] * len(sizes)
        self._read = sizes
        parts = zip(self.output.outputs, starts, strict=True)
        return replace(self.output, outputs=[_since(answer, start) for answer, start in parts])


_Size = tuple[int, int, int, bool]  # characters, tokens, log probabilities, whether it has ended
_NOTHING: _Size = (0, 0, 0, False)


def _size(answer: CompletionOutput) -> _Size:
    has_ended = answer.finish_reason is not None
    return len(answer.text), len(answer.token_ids), len(answer.logprobs or ()), has_ended


def _since(answer: CompletionOutput, start: _Size) -> CompletionOutput:
    chars, tokens, logprobs, _ = start
    return replace(
        answer,
        text=answer.text[chars:],
        token_ids=answer.token_ids[tokens:],
        logprobs=None if answer.logprobs is None else answer.logprobs[logprobs:],
    )


def logprobs_of(tokens: Iterable[Token], text_of: Callable[[int], str] | None) -> Logprobs:
    """Return the log probabilities of tokens by id.

    Args:
        tokens: each with its most likely alternatives.
        text_of: returns a token's text; None if the model has no tokenizer.
    """
    found = []
    for token in tokens:
        ranked = [(token.id, token.logprob, token.rank)]
        ranked += [(other, value, rank) for rank, (other, value) in enumerate(token.top, start=1)]
        position: dict[int, Logprob] = {}
        for token_id, value, rank in ranked:
            text = None if text_of is None else text_of(token_id)
            position.setdefault(token_id, Logprob(value, rank, text))
        found.append(position)
    return found
