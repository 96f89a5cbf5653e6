"""Conversations with tools as the chat template has them: Hugging Face's prompts, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.chat_messages import read_conversation
from pagewire.shared.text.chat_template import ChatOptions
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.formats import recognise_tools
from pagewire.shared.tool_calls.reasoning import recognise_reasoning
from pagewire.tests.support.tool_answers import TOOLS
from pagewire.tests.support.tool_models import SPECIAL, make_model, template_source

NAMES = sorted(SPECIAL)
REASONS = {
    "hermes": "think",
    "smollm3": "think",
    "olmo3": "think",
    "deepseek_v31": "think",
    "harmony": "harmony",
    "cohere2": "cohere",
    "granite": "granite",
}
PLAIN_TOOLS = [
    {"type": "function", "function": {**each["function"], "description": 'Says <it> & "that".'}}
    for each in TOOLS
]
CALL = {
    "id": "abcdefgh1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Łódź", "days": 2}'},
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What time is it?"}],
    [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "The weather?\n"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"degrees": 7}', "tool_call_id": "abcdefgh1"},
    ],
    [
        {"role": "user", "content": "The weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "7", "tool_call_id": "abcdefgh1"},
        {"role": "assistant", "content": "It is cold. ", "reasoning": "Seven.\n"},
        {"role": "user", "content": "Thanks"},
    ],
    [
        {"role": "user", "content": "Count"},
        {"role": "assistant", "content": "One, two, ", "reasoning_content": "Hm."},
    ],
]


class Pair:
    """A tokenizer of ours, and Hugging Face's of the same files."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        self.ours = Tokenizer.from_dir(path)
        self.theirs = AutoTokenizer.from_pretrained(path)

    def check(self, chat: list[dict[str, Any]], **options: Any) -> None:
        messages = read_conversation(chat)
        variables = options.pop("variables", {})
        asked = ChatOptions(variables=variables, **options)
        tools = options.pop("tools", None)
        options.setdefault("add_generation_prompt", True)
        expected = self.theirs.apply_chat_template(
            messages, tools=tools, return_dict=False, **options, **variables
        )
        assert self.ours.encode_chat(messages, asked) == expected
        text = self.theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, **options, **variables
        )
        assert self.ours.render_chat(messages, asked) == text


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("models")
    return {name: Pair(make_model(folder, name)) for name in NAMES}


@pytest.mark.parametrize("tools", [None, PLAIN_TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("chat", CHATS, ids=["user", "result", "answer", "reasoning"])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_hugging_faces(
    pairs: dict[str, Pair], name: str, chat: list[dict[str, Any]], tools: Any
) -> None:
    pairs[name].check(chat, tools=tools)
    pairs[name].check(chat, tools=tools, add_generation_prompt=False)
    pairs[name].check(chat, tools=tools, variables={"enable_thinking": False})
    pairs[name].check(chat, tools=tools, variables={"open_reasoning": True, "other": [1, {"a": 2}]})


@pytest.mark.parametrize("content", ["One, two, ", "One", "  One\n", "x" * 99, "a\n\nb \n "])
@pytest.mark.parametrize("name", NAMES)
def test_continued_messages_are_hugging_faces(
    pairs: dict[str, Pair], name: str, content: str
) -> None:
    chat = [CHATS[3][0], {"role": "assistant", "content": content}]
    pairs[name].check(chat, add_generation_prompt=False, continue_final_message=True)


@given(data=st.data())
def test_any_arguments_and_descriptions_are_hugging_faces(
    pairs: dict[str, Pair], data: st.DataObject
) -> None:
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=4,
    )
    arguments = data.draw(st.dictionaries(st.text(max_size=4), values, max_size=3))
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    schema = data.draw(st.dictionaries(st.text(max_size=4), values, max_size=3))
    tool = {
        "type": "function",
        "function": {"name": "f", "description": data.draw(st.text()), "parameters": schema},
    }
    chat = [CHATS[0][0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    for pair in pairs.values():
        pair.check(chat, tools=[tool])


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_in_tools_and_calls_are_text(pairs: dict[str, Pair], name: str) -> None:
    """Only the template's own special tokens are tokens, whatever tools spell out."""
    tokenizer, special = pairs[name].ours, SPECIAL[name]
    ids = {tokenizer.marker_token_id(text) for text in [*special, "<|end|>", "<|bos|>"]}

    def count(make: Callable[[str], str]) -> int:
        literal = make(special[0])
        function = {"name": "f", "arguments": {literal: [literal], "b": {"c": literal}}}
        parameters = {"type": "object", "properties": {literal: {"enum": [literal]}}}
        tool = {"name": "f", "description": literal, "parameters": parameters}
        chat = read_conversation(
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "tool_calls": [{"id": "abcdefghi", "function": function}]},
                {"role": "tool", "content": literal, "tool_call_id": "abcdefghi"},
                {"role": "user", "content": "And?"},
            ]
        )
        options = ChatOptions([{"type": "function", "function": tool}], {"unused": literal})
        found = tokenizer.encode_chat(chat, options)
        assert tokenizer.decode(found, False) == tokenizer.render_chat(chat, options)
        return len([each for each in found if each in ids])

    assert count(lambda text: text) == count(lambda text: "x")


@pytest.mark.parametrize("name", NAMES)
def test_formats_are_recognised_by_the_template(name: str) -> None:
    found = recognise_tools(template_source(name))
    assert found is not None
    assert found.name == {"smollm3": "hermes"}.get(name, name)
    reasoning = recognise_reasoning(template_source(name))
    assert (None if reasoning is None else reasoning.name) == REASONS.get(name)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("", None),
        ("<tool_call>{{ x }}</tool_call> <function=f>", None),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral_args"),
        ("as [func_name1(params_name1=params_value1, ...)]", "pythonic"),
    ],
)
def test_other_templates(source: str, name: str | None) -> None:
    found = recognise_tools(source)
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "tool_call_id"),
        ({"role": "system", "content": "x", "reasoning": "a"}, "reasoning"),
        ({"role": "user", "content": "x", "reasoning_content": "a"}, "reasoning_content"),
        ({"role": "tool", "tool_call_id": "a"}, "content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "content"),
    ],
    ids=str,
)
def test_fields_of_another_role_are_refused(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_conversation([message])
    assert caught.value.param == f"messages[0].{field}"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_an_answer_may_be_reasoning_alone(field: str) -> None:
    (message,) = read_conversation([{"role": "assistant", "content": None, field: "Hm."}])
    assert (message["content"], message["reasoning"]) == ("", "Hm.")


SAID: list[tuple[Any, dict[str, Any]]] = [
    ('{"city": "Oslo", "days": 2}', {"city": "Oslo", "days": 2}),
    ({"city": "Oslo"}, {"city": "Oslo"}),
    ('{"city": "Osl', {"city": "Osl"}),  # an answer of ours that was cut
    ('{"city": "Oslo", "da', {"city": "Oslo"}),
    ('{"city": ', {}),
    *[(text, {}) for text in ("", None, "{", "[]", "5", '"{}"', "null", "city: Oslo", "[" * 999)],
]


@pytest.mark.parametrize("name", NAMES)
def test_each_template_takes_back_any_arguments(pairs: dict[str, Pair], name: str) -> None:
    for said, read in SAID:
        call = {**CALL, "function": {"name": "get_weather", "arguments": said}}
        clean = {**CALL, "function": {"name": "get_weather", "arguments": read}}
        texts = []
        for each in (call, clean):
            answer = {"role": "assistant", "content": None, "tool_calls": [each]}
            result = {"role": "tool", "content": "7", "tool_call_id": CALL["id"]}
            chat = read_conversation(
                [CHATS[0][0], answer, result, {"role": "user", "content": "x"}]
            )
            texts.append(pairs[name].ours.render_chat(chat, ChatOptions(PLAIN_TOOLS)))
        assert texts[0] == texts[1]


def test_a_template_that_drops_the_last_message_cannot_go_on_with_it(
    pairs: dict[str, Pair],
) -> None:
    chat = read_conversation([{"role": "developer", "content": "x"}])
    with pytest.raises(InvalidRequestError) as caught:
        pairs["mistral"].ours.encode_chat(chat, ChatOptions(continue_final_message=True))
    assert caught.value.param == "continue_final_message"
