import subprocess
import sys
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.base.errors import ProtocolError, VersionMismatchError
from pagewire.shared.control.protocol import (
    MAX_FORKS,
    MAX_FRAME_BYTES,
    MAX_TEXT_CHARS,
    PROTOCOL_VERSION,
    Cancel,
    ControlMessage,
    Fork,
    Generate,
    Ping,
    Refused,
    TokenBatch,
    TokenOutput,
    clip_text,
    decode,
    encode,
)
from pagewire.shared.request.logprobs import MAX_POSITIONS, MAX_TOP, Logprobs, PromptLogprobs
from pagewire.shared.request.sampling import RequestSpec
from pagewire.tests.support.examples import MANY_EXAMPLES
from pagewire.tests.support.kv_layouts import kv_layout, model_identity
from pagewire.tests.support.message_values import values_of

MESSAGE_TYPES = get_args(ControlMessage)
PACK = msgspec.msgpack.encode
VERSION = bytes([PROTOCOL_VERSION])


MESSAGES = st.one_of([values_of(msgspec.inspect.type_info(kind)) for kind in MESSAGE_TYPES])


@st.composite
def mutated(draw: st.DrawFn, originals: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with a few places changed, put in, left out or cut off."""
    data = bytearray(draw(originals))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "insert", "delete", "cut", "repeat"])):
            case "change" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "insert":
                data[at:at] = draw(st.binary(max_size=6))
            case "delete":
                del data[at : at + draw(st.integers(1, 6))]
            case "cut":
                del data[at:]
            case "repeat":
                data[at:at] = data[at : at + 20]
    return bytes(data)


@given(message=MESSAGES)
def test_every_message_survives_the_wire(message: ControlMessage) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@MANY_EXAMPLES
@given(data=st.binary(max_size=200))
def test_random_bytes_raise_protocol_errors_only(data: bytes) -> None:
    for frame in (data, VERSION + data):
        try:
            decode(frame)
        except ProtocolError as exc:
            assert len(str(exc)) < 1000


@MANY_EXAMPLES
@given(frame=mutated(MESSAGES.map(encode)))
def test_mutated_frames_raise_protocol_errors_or_are_messages(frame: bytes) -> None:
    try:
        message = decode(frame)
    except ProtocolError:
        return
    frame = encode(message)  # compared as bytes: a NaN does not equal itself
    assert encode(decode(frame)) == frame


def with_fields(message: ControlMessage, /, **changes: Any) -> bytes:
    return VERSION + PACK(msgspec.to_builtins(message) | changes)


def test_the_largest_part_of_a_prompts_log_probabilities_is_a_small_message() -> None:
    size = 4 * MAX_POSITIONS * (1 + MAX_TOP)
    columns = Logprobs(1 + MAX_TOP, bytes(size), bytes(size), bytes(4 * MAX_POSITIONS))
    scored = TokenOutput(request_id="r", prompt_logprobs=PromptLogprobs(1, columns))
    message = TokenBatch(outputs=[scored])
    assert len(encode(message)) < 100_000
    for changed in (columns.ids[4:], columns.ids + b"0"):
        fields = [1, [columns.width, changed, columns.logprobs, columns.ranks]]
        output = {"request_id": "r", "prompt_logprobs": fields}
        with pytest.raises(ProtocolError, match="different lengths"):
            decode(with_fields(message, outputs=[output]))


BAD_FRAMES = {
    "empty": b"",
    "version-only": VERSION,
    "unknown-tag": VERSION + PACK({"type": "Shutdown"}),
    "no-tag": VERSION + PACK({}),
    "not-a-map": VERSION + PACK([1, 2]),
    "tag-no-utf8": VERSION + b"\x81\xa4type\xa2\xff\xfe",
    "key-no-utf8": VERSION + b"\x82\xa4type\xa4Ping\xa2\xff\xfe\x01",
    "trailing-bytes": encode(Ping()) + b"\x00",
    "nested-too-deep": VERSION + b"\x81\xa4type" + b"\x91" * 100_000,
    "unknown-field": with_fields(Cancel(request_id="r"), extra=1),
    "missing-field": VERSION + PACK({"type": "Cancel"}),
    "wrong-type": with_fields(Cancel(request_id="r"), request_id=7),
    "empty-id": with_fields(Cancel(request_id="r"), request_id=""),
    "long-id": with_fields(Cancel(request_id="r"), request_id="x" * 65),
    "bytes-as-text": with_fields(Cancel(request_id="r"), request_id=b"r"),
    "bad-literal": with_fields(
        Refused(request_id="r", reason="invalid", message=""), reason="because"
    ),
    "long-text": with_fields(
        Refused(request_id="r", reason="invalid", message=""), message="x" * (MAX_TEXT_CHARS + 1)
    ),
    "pong-of-a-negative-epoch": VERSION + PACK({"type": "Pong", "worker_id": "w", "epoch": -1}),
    "pong-of-a-huge-epoch": VERSION + PACK({"type": "Pong", "worker_id": "w", "epoch": 2**63}),
    "bool-as-number": VERSION + PACK({"type": "Pong", "worker_id": "w", "epoch": True}),
    "huge-declared-list": VERSION
    + b"\x82\xa4type\xa8Generate\xb0prompt_token_ids\xdd\xff\xff\xff\xff",
    "huge-declared-bytes": VERSION + b"\x82\xa4type\xa9KvRefusal\xa7address\xc6\xff\xff\xff\xff",
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_bad_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(frame)
    assert not isinstance(caught.value, VersionMismatchError)  # which would hide what is tested


@pytest.mark.parametrize("token", [-1, 2**31, 1.0, "1", None], ids=repr)
def test_token_ids_out_of_range_are_refused(token: Any) -> None:
    frame = VERSION + PACK(
        {"type": "Generate", "request_id": "r", "prompt_token_ids": [token], "spec": {}}
    )
    with pytest.raises(ProtocolError, match="prompt_token_ids"):
        decode(frame)


def test_requests_with_one_prompt_differ_in_id_and_seed() -> None:
    message = Generate(
        request_id="r",
        prompt_token_ids=[1, 2],
        spec=RequestSpec(seed=7, top_k=3),
        prefill_workers=["p"],
        forks=[Fork(request_id="s", seed=-(2**63)), Fork(request_id="t", seed=2**63 - 1)],
    )
    assert decode(encode(message)) == message
    each = message.each()
    assert [(one.request_id, one.spec.seed) for one in each] == [
        ("r", 7),
        ("s", -(2**63)),
        ("t", 2**63 - 1),
    ]
    for one in each:
        assert (one.forks, one.prompt_token_ids, one.prefill_workers) == ([], [1, 2], ["p"])
        assert one.spec.top_k == 3
        assert one.each() == [one]


def test_number_of_requests_in_a_message_is_bounded() -> None:
    forks = [Fork(request_id=str(index), seed=index) for index in range(MAX_FORKS + 1)]
    message = Generate(request_id="r", prompt_token_ids=[1], spec=RequestSpec(seed=7), forks=forks)
    with pytest.raises(ProtocolError, match="forks"):
        decode(encode(message))


def test_a_setting_that_this_side_does_not_know_is_refused() -> None:
    message = {"type": "Generate", "request_id": "r", "prompt_token_ids": [1]}
    assert isinstance(decode(VERSION + PACK({**message, "spec": {"top_k": 2}})), Generate)
    with pytest.raises(ProtocolError, match="top_q"):
        decode(VERSION + PACK({**message, "spec": {"top_q": 2}}))


def test_another_version_is_recognised() -> None:
    with pytest.raises(VersionMismatchError, match=f"version {PROTOCOL_VERSION + 1}"):
        decode(bytes([PROTOCOL_VERSION + 1]) + encode(Ping())[1:])


def test_frames_over_the_limit_are_neither_made_nor_read() -> None:
    prompt = [2**31 - 1] * (MAX_FRAME_BYTES // 5 + 1)
    message = Generate(request_id="r", prompt_token_ids=prompt, spec=RequestSpec())
    with pytest.raises(ProtocolError, match="Generate"):
        encode(message)
    with pytest.raises(ProtocolError, match=str(MAX_FRAME_BYTES)):
        decode(VERSION + bytes(MAX_FRAME_BYTES))


def test_a_hello_names_a_bounded_number_of_transports() -> None:
    hello = {
        "type": "KvHello",
        "worker_id": "w",
        "epoch": 1,
        "model_identity": msgspec.to_builtins(model_identity()),
        "layout": msgspec.to_builtins(kv_layout()),
        "slot_bytes": 1,
        "link": 1,
        "token": bytes(16),
        "endpoint": "tcp://127.0.0.1:1",
        "transports": {f"transport-{n}": b"" for n in range(9)},
    }
    with pytest.raises(ProtocolError, match="transports"):
        decode(VERSION + PACK(hello))


@given(text=st.text(alphabet=st.characters(), max_size=50).map(lambda t: t * 100))
def test_clipped_text_always_crosses(text: str) -> None:
    message = Refused(request_id="r", reason="invalid", message=clip_text(text))
    assert decode(encode(message)) == message


def test_text_that_is_no_unicode_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="Refused"):
        encode(Refused(request_id="r", reason="invalid", message="\ud800"))
    assert clip_text("a\ud800b") == "a?b"


TORCH_FREE = [
    "base.aio",
    "base.errors",
    "cluster.redis_client",
    "cluster.registry",
    "control.channel",
    "control.protocol",
    "engine.scheduling.status",
    "index.prefix_index",
    "kv.block_hash",
    "settings.config",
    "text.tokenizer",
]


def test_the_control_plane_never_imports_torch() -> None:
    imports = "; ".join(f"import pagewire.shared.{name}" for name in TORCH_FREE)
    code = f"{imports}; import sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
