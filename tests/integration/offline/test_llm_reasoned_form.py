"""Forms after reasoning with the offline `LLM`: free reasoning, then what was asked for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pagewire import LLM, SamplingParams, StructuredOutputs
from pagewire.shared.engine.offline.chats import read_chats
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.request.sampling import SamplingDefaults
from pagewire.shared.tool_calls.syntax import ChatSyntax

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
    prompt, free = _free_reasoning(llm)
    assert len(free) == 40  # no grammar ends the reasoning
    (answer,) = _replayed(llm, prompt, free[:20], 1)
    assert 10 <= json.loads(answer)["size"] <= 99


def test_after_a_preemption() -> None:
    """Reasoning and form are followed again from the answer's tokens alone."""
    llm = make_llm(enable_prefix_caching=False)
    prompt, free = _free_reasoning(llm)
    alone = _replayed(llm, prompt, free[:24], 8)
    assert len(set(alone)) > 2
    assert llm.core.scheduler.table.num_preemptions == 0
    small = make_llm(enable_prefix_caching=False, num_blocks=24, max_model_len=128)
    assert _replayed(small, prompt, free[:24], 8) == alone
    assert small.core.scheduler.table.num_preemptions > 0
    assert all(10 <= json.loads(answer)["size"] <= 99 for answer in alone)


def _free_reasoning(llm: LLM) -> tuple[list[int], list[int]]:
    """Return a prompt, and reasoning of the model that has not ended."""
    asked = msgspec.structs.replace(ASKED, max_tokens=40, n=1)
    (output,) = llm.chat(CHAT, asked, use_tqdm=False, continue_final_message=True)
    return output.prompt_token_ids, output.token_ids


def _replayed(llm: LLM, prompt: list[int], reasoning: list[int], count: int) -> list[str]:
    """Return what comes after reasoning that ends; each of the answers has its own seed."""
    tokenizer, core = llm.tokenizer, llm.core
    assert tokenizer is not None
    known = [*reasoning, *tokenizer.encode_word("</think>\n")]
    spec = msgspec.structs.replace(
        ASKED.resolve(SamplingDefaults(), 60), grammar=_grammar_of(llm), max_tokens=60
    )
    eos = llm.engine.config.eos_token_ids
    specs = [msgspec.structs.replace(spec, seed=seed) for seed in range(count)]
    sequences = [
        new_sequence(f"again {index}", prompt, each, eos, known) for index, each in enumerate(specs)
    ]
    for sequence in sequences:
        core.sequences.add(sequence)
    while core.has_work:
        core.step()
    return [tokenizer.decode(each.token_ids[len(prompt) + len(known) :]) for each in sequences]


def _grammar_of(llm: LLM) -> str:
    """The grammar of such an answer, as `LLM.chat` makes it."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None and ASKED.structured_outputs is not None
    syntax = ChatSyntax.choose(
        tokenizer.template_source, "auto", "think", tokenizer.marker_token_id
    )
    vocab_size = llm.engine.config.vocab_size
    (chat,) = read_chats([CHAT], tokenizer, vocab_size, syntax, {"continue_final_message": True})
    form = grammar_text(ASKED.structured_outputs)
    (grammar,) = chat.with_form(form).grammars
    assert grammar is not None and "reasoning_end" in grammar
    return grammar
