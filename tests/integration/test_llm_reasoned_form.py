"""Forms after reasoning with the offline `LLM`: free reasoning, then what was asked for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pagewire import LLM, SamplingParams, StructuredOutputs
from pagewire.shared.engine.sequence import new_sequence
from pagewire.shared.sampling import SamplingDefaults

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["size"],
    "additionalProperties": False,
}
# The demo does not think by itself: the message that it goes on with has opened the reasoning.
CHAT = [{"role": "user", "content": "A list?"}, {"role": "assistant", "content": "<think>So"}]
ASKED = SamplingParams(
    temperature=1.0,
    seed=5,
    max_tokens=400,
    n=3,
    logit_bias={},
    structured_outputs=StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
)


def make_llm(**settings: Any) -> LLM:
    options = {"device": "cpu", "dtype": "float32", "reasoning_parser": "think", **settings}
    return LLM("demo", **options)


def test_an_answer_without_reasoning_has_the_form() -> None:
    outputs = make_llm().chat(CHAT[:1], ASKED, use_tqdm=False)[0].outputs
    for output in outputs:
        assert output.message is not None
        if not output.text.startswith("<think>"):
            assert 10 <= json.loads(output.message.content or "")["size"] <= 99


def test_reasoning_is_free_and_the_form_comes_after_it() -> None:
    """Also where the answer is replayed from the middle of its reasoning, as after a migration."""
    llm = make_llm()
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    (prompt,) = llm.chat(
        CHAT, msgspec.structs.replace(ASKED, max_tokens=40, n=1), use_tqdm=False,
        continue_final_message=True, add_generation_prompt=False,
    )  # fmt: skip
    free = prompt.outputs[0].token_ids
    assert len(free) == 40  # no grammar ends the reasoning
    grammar = _grammar_of(llm)
    known = [*free[:20], *tokenizer.encode_word("</think>\n")]
    spec = msgspec.structs.replace(
        ASKED.resolve(SamplingDefaults(), 400), grammar=grammar, max_tokens=60
    )
    eos = llm.engine.config.eos_token_ids
    sequence = new_sequence("again", prompt.prompt_token_ids, spec, eos, known)
    core = llm.engine.core
    core.add(sequence)
    while core.has_work:
        core.step()
    answer = sequence.token_ids[len(prompt.prompt_token_ids) + len(known) :]
    assert 10 <= json.loads(tokenizer.decode(answer))["size"] <= 99


def _grammar_of(llm: LLM) -> str:
    """The grammar that the engine has compiled for such an answer."""
    filler = llm.engine.core.constraints.filler
    assert filler is not None
    return next(text for text in filler._compiler._cached if "reasoning_end" in text)
