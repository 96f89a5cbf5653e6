"""Images, audio, video and files in messages of each API: refused by name, and never repeated."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pagewire.services.router.http.api.responses.inputs import with_history
from pagewire.services.router.http.body_processes.body_messages import BodyKind
from pagewire.services.router.http.body_processes.body_process import read_body
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.text.chat_messages import read_conversation
from pagewire.tests.support.request_bodies import MODEL, encoded

DATA = "iVBORw0KGgoAAAANSUhEUg" * 2
URL = f"data:image/png;base64,{DATA}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
TEXT = {"type": "text", "text": "What is this?"}

CHAT_PARTS: list[tuple[str, dict[str, Any]]] = [
    ("images are", {"type": "image_url", "image_url": {"url": URL}}),
    ("images are", {"image_url": URL, "type": "image_url"}),
    ("audio is", {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}),
    ("video is", {"type": "video_url", "video_url": {"url": URL}}),
    ("files are", {"type": "file", "file": {"file_data": DATA}}),
]


def message_of(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hi"}, {"role": "user", "content": content}]


def refused(kind: BodyKind, body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> str:
    caplog.set_level(logging.DEBUG)
    raw = encoded({"model": "m", **({"max_tokens": 5} if kind == "message" else {}), **body})
    if kind == "response":
        raw = with_history(raw, b"")
    with pytest.raises(InvalidRequestError) as caught:
        read_body(kind, raw, MODEL)
    for text in (caught.value.message, caught.value.param or "", caplog.text):
        for part in (DATA[:6], DATA[-6:]):
            assert part not in text
    return caught.value.message


@pytest.mark.parametrize(("what", "part"), CHAT_PARTS)
def test_in_chats(what: str, part: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    expected = f"messages[1].content[1]: {what} not supported, only text is"
    messages = message_of([TEXT, part])
    assert refused("chat", {"messages": messages}, caplog) == expected
    assert refused("tokenize", {"messages": messages}, caplog) == expected
    with pytest.raises(InvalidRequestError) as caught:
        read_conversation(messages)  # what `LLM.chat` takes
    assert caught.value.message == expected


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("images are", {"type": "input_image", "image_url": URL}),
        ("audio is", {"type": "input_audio", "input_audio": {"data": DATA}}),
        ("files are", {"type": "input_file", "file_data": DATA, "filename": "a.pdf"}),
    ],
)
def test_in_responses(what: str, part: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    text = {"type": "input_text", "text": "?"}
    expected = f"input[1].content[1]: {what} not supported, only text is"
    assert refused("response", {"input": message_of([text, part])}, caplog) == expected
    output = [{"type": "function_call_output", "call_id": "a", "output": [part]}]
    expected = f"input[0].output[0]: {what} not supported, only text is"
    assert refused("response", {"input": output}, caplog) == expected


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("images are", {"type": "image", "source": SOURCE}),
        ("files are", {"type": "document", "source": SOURCE}),
        ("files are", {"type": "container_upload", "file_id": "x"}),
    ],
)
def test_in_messages(what: str, part: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    found = refused("message", {"messages": message_of([TEXT, part])}, caplog)
    assert found.endswith(f"content[1]: {what} not supported, only text is")
    nested = {"type": "tool_result", "tool_use_id": "x", "content": [part]}
    found = refused("message", {"messages": message_of([nested])}, caplog)
    assert found.endswith(f"content[0]: {what} not supported, only text is")


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text"}, CHAT_PARTS[0][1]],
        {"type": "image_url", "image_url": URL},
        [{"type": "x", "image_url": URL}],
        [{"image_url": {"url": URL}}],
        [{"type": ["image_url"], "data": URL}],
    ],
    ids=str,
)
def test_another_error_next_to_an_image_has_no_data(
    content: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kinds: list[tuple[BodyKind, str]] = [
        ("chat", "messages"),
        ("message", "messages"),
        ("response", "input"),
    ]
    for kind, field in kinds:
        refused(kind, {field: message_of(content)}, caplog)
    refused("chat", {"messages": [{"role": "x", "content": content}] * 2}, caplog)
    refused("chat", {"messages": {"content": content}}, caplog)
