"""One answer of the offline `LLM` while it is computed."""

from __future__ import annotations

import msgspec

from pagewire.shared.base.errors import InvalidRequestError, RequestFailedError
from pagewire.shared.engine.offline.chats import ChatPrompt
from pagewire.shared.engine.offline.outputs import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    logprobs_of,
)
from pagewire.shared.engine.offline.prompts import TokenizedPrompt
from pagewire.shared.engine.step_output import StepOutput
from pagewire.shared.request.logprobs import Logprobs
from pagewire.shared.request.sampling import RequestSpec, SamplingParams
from pagewire.shared.text.answer_text import TextAssembler, TextFinishReason, TextRules
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.answer_parts import answer_parts


class LLMAnswer:
    """One answer while it is computed.

    Args:
        choice: index of the answer among those to its prompt.
        output: the output of its prompt, to which the answer is added.
        spec: the request's settings, with the answer's own seed.
        asked: the parameters that the caller has given.
        tokenizer: the model's; None if it has none.
        prompt: the prompt.
        streams: the answer has its text as it comes, not only at the end.

    Attributes:
        output_kind: what a stream yields, see `SamplingParams.output_kind`.
        error: why it failed, if it did.
    """

    def __init__(
        self,
        choice: int,
        output: RequestOutput,
        spec: RequestSpec,
        asked: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt: TokenizedPrompt,
        streams: bool = False,
    ) -> None:
        self._chat = prompt if isinstance(prompt, ChatPrompt) else None
        self.output, self.spec, self.output_kind = output, spec, asked.output_kind
        self.error: RequestFailedError | None = None
        self._result = CompletionOutput(choice, logprobs=None if spec.logprobs is None else [])
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]  # the first token has none
        output.outputs.append(self._result)
        self._tokenizer, self._rules = tokenizer, TextRules.of(asked, asked.stop_strings)
        if self._chat is not None:
            visible_tokens = self._chat.parsing.visible_tokens
            self._rules = msgspec.structs.replace(self._rules, visible_tokens=visible_tokens)
        self._assembler: TextAssembler | None = None
        if asked.stop_strings and tokenizer is None:
            raise InvalidRequestError(
                "stop needs a tokenizer.json, which the model lacks: use stop_token_ids", "stop"
            )
        if tokenizer is not None and (streams or asked.stop_strings):
            prompt_ids = output.prompt_token_ids
            chat = self._chat
            parts = None if chat is None else answer_parts(chat.syntax, chat.parsing)
            self._assembler = TextAssembler(tokenizer, prompt_ids, self._rules, parts)

    @property
    def has_ended(self) -> bool:
        """Whether it is complete, or has failed."""
        return self._result.finish_reason is not None or self.error is not None

    def add_step(self, step: StepOutput) -> bool:
        """Add a step's output; returns whether the answer has ended, perhaps with an `error`."""
        if step.finish_reason == "error" or step.finish_reason == "abort":
            self.error = RequestFailedError(step.error or "the engine failed")
            return True
        if step.prompt_logprobs is not None:
            self._prompt_logprobs += self._readable(step.prompt_logprobs.tokens)
        if step.cached_tokens is not None and self._result.index == 0:
            self.output.cached_tokens = step.cached_tokens
        return self.add(step.token_ids, step.finish_reason, step.logprobs)

    def add(
        self,
        token_ids: list[int],
        finish_reason: TextFinishReason | None,
        logprobs: Logprobs | None = None,
    ) -> bool:
        """Add tokens; returns whether the answer has ended."""
        result = self._result
        if self._assembler is None:
            result.token_ids.extend(token_ids)
            result.finish_reason = finish_reason
        else:
            delta = self._assembler.push(token_ids, finish_reason, logprobs)
            result.token_ids.extend(delta.token_ids)
            result.text += delta.text
            result.finish_reason = delta.finish_reason
            logprobs = delta.logprobs
        if logprobs is not None and result.logprobs is not None:
            result.logprobs += self._readable(logprobs)
        if result.finish_reason is None:
            return False
        self._finish()
        return True

    def _readable(self, logprobs: Logprobs) -> list[dict[int, Logprob]]:
        tokenizer = self._tokenizer
        return logprobs_of(logprobs, None if tokenizer is None else tokenizer.token_bytes.text)

    def _finish(self) -> None:
        result = self._result
        if self.spec.prompt_logprobs is not None and result.index == 0:
            self.output.prompt_logprobs = self._prompt_logprobs
        if self._assembler is not None:
            result.stop_reason = self._assembler.matched
        elif self._tokenizer is not None:  # without stop strings, the text is made only once
            text = TextAssembler(self._tokenizer, self.output.prompt_token_ids, self._rules)
            result.text = text.push(result.token_ids, "length").text
        if self._chat is not None:
            is_cut = result.finish_reason == "length" or result.stop_reason is not None
            result.message = self._chat.message(result.text, is_cut)
        last = result.token_ids[-1:]
        if result.stop_reason is None and result.finish_reason == "stop" and last:
            result.stop_reason = last[0] if last[0] in self.spec.stop_token_ids else None
