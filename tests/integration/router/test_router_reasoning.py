"""Reasoning, and forms after it, with OpenAI's client and a worker that answers given tokens."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL
from pagewire.tests.support.scenarios import Ask
from pagewire.tests.support.tool_answers import TOOLS
from pagewire.tests.support.tool_models import ToolModels
from pagewire.tests.support.weather_chats import (
    ANALYSIS,
    CALLS,
    QUESTION,
    QUESTION_TEXT,
    THINKS,
    calls_in,
    read,
)


def test_a_form_in_the_final_channel(ask: Ask, tool_models: ToolModels) -> None:
    class Answer(BaseModel):
        size: int

    message = Tokenizer.from_dir(tool_models["harmony"]).marker_token_id("<|message|>")

    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        answer = client.chat.completions.parse(
            model=MODEL, messages=QUESTION, response_format=Answer
        )
        assert answer.choices[0].message.parsed == Answer(size=12)
        assert answer.choices[0].finish_reason == "stop"
        grammar = worker.generated[0].spec.grammar or ""
        assert "final" in grammar and f"<[{message}]>" in grammar and "size" in grammar
        begun: Any = [*QUESTION, {"role": "assistant", "content": '{"si'}]
        client.chat.completions.create(
            model=MODEL,
            messages=begun,
            response_format={"type": "json_object"},
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
        )
        assert "final" not in (worker.generated[1].spec.grammar or "")

    ask(ANALYSIS + '<|channel|>final<|message|>{"size": 12}<|return|>', scenario, "harmony")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_split_off_and_counted(ask: Ask, stream: bool) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        extra = {"stream_options": {"include_usage": True}} if stream else {}
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=TOOLS, stream=stream, **extra
        )
        if stream:
            chunks = list(answer)
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            texts = {
                name: "".join(getattr(delta, name, None) or "" for delta in deltas)
                for name in ("reasoning", "reasoning_content", "content")
            }
            usage = chunks[-1].usage
        else:
            message = answer.choices[0].message
            names = ("reasoning", "reasoning_content", "content")
            texts = {name: getattr(message, name) or "" for name in names}
            assert read(message.tool_calls) == CALLS
            usage = answer.usage
        assert texts == {
            "reasoning": "Two calls.",
            "reasoning_content": "Two calls.",
            "content": "",
        }
        counted = usage.completion_tokens_details.reasoning_tokens
        assert 4 < counted < usage.completion_tokens - 20

    ask(THINKS + calls_in(), scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_comes_after_the_reasoning(ask: Ask, tool_models: ToolModels, stream: bool) -> None:
    close = f"<[{Tokenizer.from_dir(tool_models['hermes']).marker_token_id('</think>')}]>"

    class Answer(BaseModel):
        size: int

    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": QUESTION,
            "response_format": Answer,
        }
        if stream:
            with client.chat.completions.stream(**asked) as events:
                kinds = {event.type for event in events}
                answer = events.get_final_completion()
            assert "content.delta" in kinds
        else:
            answer = client.chat.completions.parse(**asked)
        (choice,) = answer.choices
        assert choice.message.parsed == Answer(size=12)
        assert choice.message.model_extra["reasoning"] == "Two calls."
        assert choice.finish_reason == "stop"
        grammar = worker.generated[0].spec.grammar or ""
        assert close in grammar and "size" in grammar
        none = {"chat_template_kwargs": {"enable_thinking": False}}
        client.chat.completions.parse(**asked, extra_body=none)
        assert close not in (worker.generated[1].spec.grammar or "")

    ask(THINKS + '{"size": 12}', scenario)


def test_reasoning_may_be_left_out(ask: Ask) -> None:
    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, extra_body={"include_reasoning": False}
        )
        message = answer.choices[0].message
        assert (message.content, hasattr(message, "reasoning")) == ("Yes.", False)

    ask(THINKS + "Yes.", scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_for_the_answer(ask: Ask, stream: bool) -> None:
    """Here it is also in the reasoning, and is `\\n\\n`, which comes after reasoning."""

    def scenario(client: openai.OpenAI, worker: FakeDecodeWorker) -> None:
        stops: Any = {"stop": [" calls", "\n\n"]}
        if stream:
            with client.chat.completions.stream(model=MODEL, messages=QUESTION, **stops) as events:
                chat: Any = events.get_final_completion()
            with client.responses.stream(
                model=MODEL, input=QUESTION_TEXT, extra_body=stops
            ) as response_events:
                list(response_events)
                response = response_events.get_final_response()
        else:
            chat = client.chat.completions.create(model=MODEL, messages=QUESTION, **stops)
            response = client.responses.create(model=MODEL, input=QUESTION_TEXT, extra_body=stops)
        (choice,) = chat.choices
        assert (choice.message.content, choice.finish_reason) == ("Yes: two", "stop")
        assert choice.message.model_extra["reasoning"] == "Two calls."
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output[0].content[0].text == "Two calls."
        assert response.output_text == "Yes: two"

    ask(THINKS + "Yes: two calls\n\nNo.", scenario)
