"""The command that measures perplexity, against Hugging Face's code."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagewire import LLM
from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.rounded_caches import rounded_caches
from pagewire.tools import perplexity

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = topics["specialnames"][20_000:21_000]  # which the demo model has not learnt
LENGTH, PARTS = 60, 2


@torch.inference_mode()
def theirs() -> tuple[float, float]:
    """Return the perplexity by Hugging Face's code, with exact and with rounded caches."""
    model = AutoModelForCausalLM.from_pretrained(
        demo_model_path(), dtype=torch.float32, attn_implementation="eager"
    )
    token_ids = LLM("demo", device="cpu").encode(TEXT, add_special_tokens=False)
    assert isinstance(token_ids, list)
    prompts = torch.tensor(token_ids[: LENGTH * PARTS]).view(PARTS, LENGTH)
    exact = model(prompts, labels=prompts).loss.exp().item()
    with rounded_caches(model):
        return exact, model(prompts, labels=prompts).loss.exp().item()


def test_perplexity_is_hugging_faces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text"
    file.write_text(TEXT, encoding="utf-8")
    sizes = ["--length", f"{LENGTH}", "--parts", f"{PARTS}", "--text", f"{file}"]
    perplexity.main(["--device", "cpu", *sizes])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    found = {name: float(value) for name, value in rows}
    assert list(found) == list(perplexity.FORMATS)
    exact, rounded = theirs()
    assert abs(exact - rounded) > 1e-3 * exact  # else they say nothing about formats
    assert found["float32"] == pytest.approx(exact, rel=2e-4)
    assert found["float32, KV cache in FP8"] == pytest.approx(rounded, rel=2e-4)


def test_a_text_that_is_too_short_is_refused() -> None:
    llm = LLM("demo", device="cpu")
    with pytest.raises(ValueError, match="tokens, not 2 times 1024"):
        perplexity.perplexity(llm, "What is a lambda?", 1024, 2)
