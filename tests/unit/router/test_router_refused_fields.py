"""Bodies that are refused, and by which name."""

import pytest

from pagewire.services.router.http.api_errors import describe
from pagewire.services.router.http.body_processes.body_process import read_body
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.request.sampling import SamplingFields
from pagewire.tests.support.request_bodies import (
    MODEL,
    chat,
    completion,
    refusal,
)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "Hi", "temperature": NaN}',
        b'{"model": "m", "prompt": "Hi", "temperature": Infinity}',
        b'{"model": "m", "prompt": "Hi", "temperature": 1e999}',
        b'{"model": "m", "prompt": "Hi", "n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda raw: repr(raw[:40]),
)
def test_a_body_that_is_no_json_object_is_refused(raw):
    for kind in ("completion", "chat"):
        with pytest.raises(InvalidRequestError) as caught:
            read_body(kind, raw, MODEL)
        assert describe(caught.value).status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", 1e9),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", "all"),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_k", 2**40),
        ("seed", "x"),
        ("seed", 1.5),
        ("seed", 2**63),
        ("n", 0),
        ("n", 129),
        ("n", 10**9),
        ("n", 1e9),
        ("n", "2"),
        ("stop", 5),
        ("stop", ["x"] * 17),
        ("stop", ["x"] * 10_000),
        ("stop", {"a": 1}),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", [1] * 65),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", "often"),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-30),
        ("repetition_penalty", 101),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {str(10**6): 1}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("min_tokens", -1),
        ("min_tokens", 10**6),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [1, 10**6]),
        ("allowed_token_ids", [1] * 16_385),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", ["x"] * 129),
        ("bad_words", ["x" * 257]),
        ("bad_words", ["xyq" * 80]),
        ("bad_words", [f"{n} q z q z q z q" for n in range(128)]),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", "no"),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("cache_salt", 5),
        ("slo_gap_s", 0),
        ("slo_gap_s", "0.1"),
        ("service_tier", "fast"),
        ("priority", 1.5),
        ("priority", 2**63),
        ("user", 5),
        ("user", "x" * 513),
        ("safety_identifier", ["x"]),
        ("prompt_cache_key", "x" * 513),
        ("session_id", 5),
        ("session_id", "x" * 513),
        ("prompt_cache_retention", "2h"),
        ("store", "yes"),
        ("metadata", {"x": 1}),
        ("metadata", {"x" * 65: ""}),
        ("metadata", {"x": "y" * 513}),
        ("ignore_eos", "yes"),
        ("stream", "true"),
        ("stream_options", 1),
        ("model", 5),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field, value):
    for call in (completion, chat):
        error = refusal(call, **{field: value})
        assert error.param.partition("[")[0] == field
        assert field in error.message
        assert len(error.message) < 300


def test_a_max_tokens_of_as_many_digits_as_python_prints_is_refused():
    for call in (completion, chat):
        assert refusal(call, max_tokens=10**4300 - 1).param == "max_tokens"


@pytest.mark.parametrize("field", [*SamplingFields.__struct_fields__, "logprobs"])
def test_every_field_of_sampling_is_read_and_checked(field):
    for call in (completion, chat):
        error = refusal(call, **{field: {"a": 1}})
        assert error.param == field
        rule = "logprobs must be a boolean, " if (call, field) == (chat, "logprobs") else None
        assert error.message.startswith(rule or f"{field} must be ")
        assert "not {'a': 1}" in error.message
        assert call(**{field: None}).prompts[0].spec == call().prompts[0].spec


def test_sampling_itself_is_a_field_that_nobody_knows():
    assert completion(sampling={"temperature": 1.0}).prompts == completion().prompts


@pytest.mark.parametrize("value", [0, -1, -(2**63), 2**63, "5", 1.5])
def test_the_newer_name_of_max_tokens_is_named_by_itself(value):
    error = refusal(chat, max_completion_tokens=value)
    assert error.param == "max_completion_tokens"
    assert "max_completion_tokens" in error.message


def test_a_wrong_item_is_named_by_its_index():
    assert refusal(completion, stop=["a", ""]).param == "stop[1]"
    assert refusal(completion, stop=["a", "b" * 257]).param == "stop[1]"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("suffix", "end"),
        ("stop_regex", "[.]"),
        ("truncation_side", "right"),
        ("no_stop_trim", True),
        ("kv_transfer_params", {"remote": "10.0.0.1"}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_supported_in_completions_is_refused_by_name(field, value):
    error = refusal(completion, **{field: value})
    assert (error.param, error.message) == (field, f"{field} is not supported")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("thinking_token_budget", 100),
        ("echo", True),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_supported_in_chat_is_refused_by_name(field, value):
    error = refusal(chat, **{field: value})
    assert (error.param, error.message) == (field, f"{field} is not supported")


def test_a_template_of_a_request_is_refused_unless_the_operator_allows_it():
    error = refusal(chat, chat_template="{{ x }}")
    assert (error.param, error.code) == ("chat_template", "unsupported_parameter")
    assert error.message == (
        "chat_template is not allowed unless the operator sets --trust-request-chat-template"
    )
    error = refusal(chat, chat_template_kwargs={"chat_template": "{{ x }}"})
    assert error.param == "chat_template_kwargs"
    assert "chat_template_kwargs cannot have chat_template" in error.message
