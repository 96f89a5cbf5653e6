"""Prompts of the simulated users."""

from __future__ import annotations

import random

from pagewire.loadtest import workloads
from pagewire.loadtest.workloads import MAX_TURNS, Ask, UserConversation


def contents(ask: Ask) -> list[str]:
    return [message["content"] for message in ask.messages]


def test_equal_seeds_ask_the_same() -> None:
    def asks(seed: int) -> list[Ask]:
        rng = random.Random(seed)
        return [
            UserConversation(rng).next_ask(),
            workloads.shared_prompt_ask(rng, seed),
            workloads.document_ask(rng),
            workloads.burst_ask(rng),
            workloads.cancelled_ask(rng),
        ]

    assert asks(1) == asks(1)
    assert all(one != other for one, other in zip(asks(1), asks(2), strict=True))


def test_a_conversation_grows_by_question_and_answer() -> None:
    conversation = UserConversation(random.Random(1))
    first = conversation.next_ask()
    conversation.add_answer("An answer.")
    second = conversation.next_ask()
    assert [message["role"] for message in second.messages] == ["user", "assistant", "user"]
    assert second.messages[:1] == first.messages
    assert second.messages[1]["content"] == "An answer."
    assert len(first.messages) == 1  # what was sent does not change afterwards


def test_a_question_without_an_answer_is_forgotten() -> None:
    conversation = UserConversation(random.Random(1))
    conversation.next_ask()
    again = conversation.next_ask()
    assert [message["role"] for message in again.messages] == ["user"]


def test_a_conversation_begins_again_after_its_last_turn() -> None:
    conversation = UserConversation(random.Random(1))
    lengths = []
    for _ in range(MAX_TURNS + 2):
        lengths.append(len(conversation.next_ask().messages))
        conversation.add_answer("Yes.")
    assert lengths == [*range(1, 2 * MAX_TURNS, 2), 1, 3]


def test_system_prompts_are_few_and_the_same_for_all_users() -> None:
    seen = set()
    for user in range(20):
        rng = random.Random(user)
        for _ in range(10):
            ask = workloads.shared_prompt_ask(rng, seed=7)
            assert [message["role"] for message in ask.messages] == ["system", "user"]
            seen.add(contents(ask)[0])
    assert len(seen) == workloads.SYSTEM_PROMPTS
    assert {len(prompt) for prompt in seen} == {workloads.SYSTEM_PROMPT_CHARS}


def test_documents_are_long_and_share_no_beginning() -> None:
    rng = random.Random(1)
    texts = [contents(workloads.document_ask(rng))[0] for _ in range(20)]
    assert all(workloads.DOCUMENT_CHARS[0] <= len(text) for text in texts)
    assert len({text[:200] for text in texts}) == len(texts)


def test_who_cancels_asks_for_more_than_it_hears() -> None:
    rng = random.Random(1)
    for _ in range(50):
        ask = workloads.cancelled_ask(rng)
        assert ask.cancel_after is not None
        assert 0 < ask.cancel_after < ask.max_tokens


def test_the_body_asks_for_exact_counts() -> None:
    body = workloads.burst_ask(random.Random(1)).body("some-model")
    assert body["model"] == "some-model"
    assert body["stream"] and body["return_token_ids"] and body["ignore_eos"]
    assert body["stream_options"] == {"include_usage": True}
