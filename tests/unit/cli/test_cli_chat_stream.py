"""The streaming client's pure parts: events, replies, URLs, and what a terminal is shown."""

import itertools
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.cli.client import sse
from pagewire.services.cli.client.anatomy import anatomy
from pagewire.services.cli.client.chat import TerminalChat
from pagewire.services.cli.client.endpoint_errors import EndpointError
from pagewire.services.cli.client.endpoint_url import base_url, may_use_proxy, root_url
from pagewire.services.cli.client.openai_client import (
    DIALECTS,
    ChunkReader,
    Reply,
)
from pagewire.services.cli.client.openai_messages import Chunk
from pagewire.services.cli.client.sse import EventParser
from pagewire.services.cli.terminal import cut_note, describe, printable
from pagewire.shared.base.errors import ConfigError

STREAM = (
    b': hello\r\ndata: {"a":"\xe2\x80\xa8"}\r\n\r\n'
    b"event: x\ndata:one\ndata: two\n\n\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a":"\xe2\x80\xa8"}', b"one\ntwo", b"[DONE]"]


def chunk(**fields: object) -> Chunk:
    return msgspec.convert(fields, Chunk)


def text_chunk(text: str, ids: list[int] | None = None, end: str | None = None) -> Chunk:
    return chunk(choices=[{"text": text, "token_ids": ids, "finish_reason": end}])


def replied(*timed: tuple[float, Chunk]) -> Reply:
    reply = Reply()
    for now, each in timed:
        reply.take(each, now, keep_text=True)
    return reply


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_how_the_bytes_arrive(cuts: list[int]) -> None:
    parser, found = EventParser(), []
    bounds = [0, *sorted(cuts), len(STREAM)]
    for low, high in itertools.pairwise(bounds):
        found += parser.feed(STREAM[low:high])
    assert found == EVENTS


@pytest.mark.parametrize(
    "parts",
    [[b"data: " + b"x" * 100], [b"data: " + b"x" * 30 + b"\n"] * 4],
    ids=["a-line", "many-lines"],
)
def test_event_without_end_is_refused(parts: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 64)
    parser = EventParser()
    with pytest.raises(EndpointError, match="more than 64 bytes"):
        for part in parts:
            list(parser.feed(part))


def test_tokens_count_by_their_ids() -> None:
    reply = replied(
        (0.1, chunk(choices=[{"delta": {"role": "assistant", "content": ""}}])),
        (0.5, text_chunk("a", [1])),
        (0.7, text_chunk("", [2])),  # the start of a character
        (1.0, text_chunk("bcd", [3, 4, 5], "length")),
        (1.1, chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 9})),
    )
    assert (reply.ttft, reply.num_tokens, reply.text) == (0.5, 5, "abcd")
    assert reply.gaps() == pytest.approx([0.2, 0.1, 0.1, 0.1])
    assert reply.tokens_per_s == pytest.approx(4 / 0.5)
    assert reply.finish_reason == "length"
    assert reply.cached_tokens is None


def test_text_after_the_last_token_is_no_token() -> None:
    reply = replied((0.5, text_chunk("a", [1])), (0.6, text_chunk("held back", None, "stop")))
    assert reply.num_tokens == 1
    assert reply.tokens_per_s is None


def test_without_ids_usage_says_how_many_tokens_came() -> None:
    usage = {
        "prompt_tokens": 8,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    reply = replied(
        (0.5, text_chunk("a b")), (1.5, text_chunk("c d", None, "stop")), (1.5, chunk(usage=usage))
    )
    assert reply.num_tokens == 9
    assert reply.tokens_per_s == pytest.approx(8.0)
    assert reply.gaps() == [1.0]
    assert reply.cached_tokens == 4


def test_without_ids_and_usage_each_part_of_the_text_is_a_token() -> None:
    reply = replied((0.5, text_chunk("a b")), (0.6, text_chunk("")), (1.5, text_chunk("c d")))
    assert reply.num_tokens == 2


def test_reasoning_is_text_whatever_its_name() -> None:
    deltas = [{"reasoning": "x"}, {"reasoning_content": "y"}, {"content": "z"}]
    timed = [(0.1, chunk(choices=[{"delta": delta}])) for delta in deltas]
    assert replied(*timed).text == "xyz"


def test_dialects_go_from_all_fields_to_the_oldest_api() -> None:
    bodies = [each.body({"model": "m", "seed": None}, {"ignore_eos": True}) for each in DIALECTS]
    usage = {"stream_options": {"include_usage": True}}
    assert bodies[2] == {"model": "m", "stream": True}
    assert bodies[1] == bodies[2] | usage
    assert bodies[0] == bodies[1] | {"return_token_ids": True, "ignore_eos": True}


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_url_with_and_without_version(url: str) -> None:
    assert base_url(url) == "http://h:1/v1"
    assert root_url(url) == "http://h:1"


@pytest.mark.parametrize(
    "url",
    ["", "h", "localhost:80", "ftp://h", "http://", "http://h:x", "http://h?a=b", "http://[::1"],
)
def test_wrong_url_is_a_setting(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        base_url(url)


def test_proxies_are_not_asked_for_this_machine() -> None:
    urls = ["http://127.0.0.1:1", "http://localhost", "http://[::1]:1", "https://example.com"]
    assert [may_use_proxy(url) for url in urls] == [False, False, False, True]


def test_conversation_keeps_system_message_and_history() -> None:
    talk = TerminalChat("be brief", {"model": "m"})
    talk.add("one", "1")
    talk.add("nothing", "")
    body = talk.body("two")
    said = [(message["role"], message["content"]) for message in body["messages"]]
    assert said == [("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two")]
    assert body["model"] == "m"
    talk.reset()
    assert [message["content"] for message in talk.body("two")["messages"]] == ["be brief", "two"]


def test_line_about_a_reply() -> None:
    usage = {
        "prompt_tokens": 60,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 48},
    }
    reply = replied((0.12, text_chunk("a", [1])), (1.12, text_chunk("b", [2, 3], "stop")))
    reply.take(chunk(usage=usage), 1.2, keep_text=True)
    line = "TTFT 120 ms · 2.0 tokens/s · 3 tokens · 48 of 60 prompt tokens cached"
    assert describe(reply) == line


def test_line_about_an_empty_reply() -> None:
    assert describe(Reply(finish_reason="stop")) == "0 tokens"
    assert describe(Reply(arrivals=array("d", [2.5]), counts=array("l", [1]))) == (
        "TTFT 2.50 s · 1 token"
    )


def test_a_model_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\r\n\td\x7f") == "a[2Jbc\n\td"


@pytest.mark.parametrize(
    ("end", "max_tokens", "parts"),
    [
        ("stop", 2, ()),
        ("length", 2, ("cut at --max-tokens 2", "higher")),
        ("length", None, ("cut", "--max-tokens")),
    ],
)
def test_an_answer_that_was_cut_says_so(
    end: str, max_tokens: int | None, parts: tuple[str, ...]
) -> None:
    line = cut_note(replied((0.1, text_chunk("a", [1, 2], end))), max_tokens)
    assert bool(line) == (end == "length")
    assert all(part in line for part in parts)


LOCAL = {
    "prefill": {"worker": "decode-1", "ms": 3.0},
    "transfer": None,
    "decode": {"worker": "decode-1", "mean_step_ms": None},
}
CROSSED = {
    "prefill": {"worker": "prefill-0", "ms": 8.04},
    "transfer": {"bytes": 98_304, "transport": "zmq"},
    "decode": {"worker": "decode-0", "mean_step_ms": 2.06},
}


@pytest.mark.parametrize(
    ("timings", "line"),
    [
        (None, ""),
        ({"prompt_ms": 7.5, "predicted_n": 3}, ""),  # llama.cpp's
        ([1, 2], ""),
        ({"choices": "none"}, ""),
        ({"choices": [{"decode": {"worker": None}}]}, ""),
        ({"choices": [LOCAL]}, "decode-1 computed the prompt in 3.0 ms and wrote the answer"),
        (
            {"choices": [CROSSED]},
            "prefill-0 computed the prompt in 8.0 ms · 98.3 kB of KV crossed by zmq · "
            "decode-0 wrote the answer, 2.1 ms a token",
        ),
    ],
    ids=["none", "another-servers", "a-list", "other-choices", "not-known", "local", "crossed"],
)
def test_a_line_says_which_workers_computed_an_answer(
    timings: dict[str, Any] | list[int] | None, line: str
) -> None:
    data = b"data: " + msgspec.json.encode({"choices": [], "timings": timings}) + b"\n\n"
    [read] = ChunkReader().feed(data)
    assert anatomy(replied((1.0, read)).timings) == line
