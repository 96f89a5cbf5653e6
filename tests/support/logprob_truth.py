"""Log probabilities by Hugging Face's own implementation, in float32."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pagewire.shared.model.demo import demo_model_path

TOLERANCE = 1e-4


class LogprobTruth:
    """Asks a model for the log probabilities of whole texts.

    Args:
        model: a model of Hugging Face's classes, in float32; None: the demo model.
    """

    def __init__(self, model: Any = None) -> None:
        if model is None:
            path = demo_model_path()
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._model = model

    @torch.inference_mode()
    def of(self, token_ids: list[int]) -> torch.Tensor:
        """Return log probabilities [n, vocab]; row i is for the token after `token_ids[i]`."""
        logits = self._model(torch.tensor([token_ids])).logits[0]
        return torch.log_softmax(logits.float(), -1)

    def check(
        self, prompt: list[int], answer: list[int], found: list[dict[int, float] | None], top: int
    ) -> None:
        """Check the log probabilities of the last `len(found)` tokens of a text.

        Args:
            prompt: tokens of the prompt.
            answer: tokens of the answer, after the prompt.
            found: for each of the last tokens: log probabilities of itself and its alternatives, by
                token id; None for the text's first token.
            top: number of alternatives.
        """
        token_ids = [*prompt, *answer]
        truth = self.of(token_ids)
        first = len(token_ids) - len(found)
        for position, by_id in enumerate(found, start=first):
            if position == 0:
                assert by_id is None
                continue
            assert by_id is not None
            row = truth[position - 1]
            best = row.topk(top).values.tolist()
            values = sorted(by_id.values(), reverse=True)
            assert token_ids[position] in by_id
            assert top <= len(by_id) <= top + 1
            assert all(abs(a - b) <= TOLERANCE for a, b in zip(values, best, strict=False))
            for token_id, logprob in by_id.items():
                assert abs(logprob - row[token_id].item()) <= TOLERANCE, position
