"""Sampling parameters: what a caller asks for, the model's defaults, and what comes of both."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.kernels import shaping_tables
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.request import sampling_types as bounds
from pagewire.shared.request.sampling import RequestSpec, SamplingDefaults, SamplingParams
from pagewire.shared.request.sampling_types import MAX_CHOICES, MAX_STOP_TOKEN_IDS
from pagewire.shared.request.structured_outputs import StructuredOutputs

DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, max_tokens=512)

GOOD = [
    {},
    {"temperature": 0.0},
    {"temperature": 100.0},
    {"temperature": np.float64(0.8)},
    {"top_p": 1e-6},
    {"top_k": 1},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"max_tokens": 1},
    {"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS))},
    {"stop_token_ids": range(3)},
]
BAD = [
    ("temperature", -0.1),
    ("temperature", 100.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", 2**31),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("max_tokens", 0),
    ("max_tokens", 2**31),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (2**31,)),
    ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS + 1))),
    ("log_id", 5),
]


@pytest.mark.parametrize("fields", GOOD, ids=lambda fields: ",".join(fields) or "defaults")
def test_values_in_range_are_taken(fields: dict[str, Any]) -> None:
    RequestSpec(**fields).validate()


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{f}={v!r:.12}" for f, v in BAD])
def test_values_out_of_range_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        RequestSpec(**{field: value}).validate()
    assert caught.value.param == field


@given(value=st.floats())
def test_no_float_slips_through_as_temperature_or_top_p(value: float) -> None:
    for field, ok in (("temperature", 0 <= value <= 100), ("top_p", 0 < value <= 1)):
        try:
            RequestSpec(**{field: value}).validate()
        except InvalidRequestError:
            assert not ok
        else:
            assert ok


def test_a_refusal_is_short_whatever_was_asked_for() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RequestSpec(stop_token_ids=(1,) * 500_000).validate()
    assert len(caught.value.message) < 300


def test_what_is_unset_has_the_models_defaults() -> None:
    resolved = SamplingParams().resolve(DEFAULTS, 99)
    assert resolved == RequestSpec(temperature=0.6, top_p=0.9, top_k=20, max_tokens=99)
    plain = SamplingParams().resolve(SamplingDefaults(), 16)
    assert plain == RequestSpec()


def test_what_is_set_wins_even_where_it_equals_the_usual_default() -> None:
    asked = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=700)
    resolved = asked.resolve(DEFAULTS, 99)
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == (1.0, 1.0, 0)
    assert resolved.max_tokens == 700  # the model's is a default, not a cap
    assert SamplingParams(top_k=-1).resolve(DEFAULTS, 99).top_k == 0


def test_the_length_of_an_answer_is_the_models_where_it_fits() -> None:
    assert DEFAULTS.answer_length(room=4000, otherwise=16) == 512
    assert DEFAULTS.answer_length(room=100, otherwise=16) == 100
    assert SamplingDefaults().answer_length(room=4000, otherwise=16) == 16
    assert SamplingDefaults().answer_length(room=7, otherwise=16) == 7


ASKED_BADLY: list[tuple[str, Any]] = [
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", -1),
    ("top_p", "all"),
    ("top_k", 1.5),
    ("top_k", -2),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("seed", "x"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", {"a": 1}),
    ("stop_token_ids", 5),
    ("stop_token_ids", "abc"),
    ("stop_token_ids", ["a"]),
    ("ignore_eos", 1),
    ("n", 0),
    ("n", 1.0),
    ("n", MAX_CHOICES + 1),
    ("bad_words", "text"),
    ("logit_bias", {1: 1000.0}),
]


@pytest.mark.parametrize(
    ("field", "value"), ASKED_BADLY, ids=[f"{f}={v!r:.12}" for f, v in ASKED_BADLY]
)
def test_what_is_asked_for_wrongly_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("token", ["a", None, True, 1.0, -1, 2**31, 10**400, [1]], ids=reprlib.repr)
def test_a_stop_token_that_is_wrong_is_named_among_those_that_are_right(token: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(stop_token_ids=[*range(20), token])
    expected = f"stop_token_ids[20] must be an integer from 0 to 2**31 - 1, not {token!r:.15}"
    assert caught.value.message.startswith(expected)
    assert caught.value.param == "stop_token_ids"
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_a_number_in_quotes_is_refused_as_no_number(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} must be a number .* not '1'"):
        SamplingParams(**{field: "1"})


def test_stop_strings_come_one_or_several() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


@pytest.mark.parametrize("form", [StructuredOutputs(choice=["a"]), {"choice": ["a"]}])
def test_a_range_of_tokens_may_come_with_a_form(form: Any) -> None:
    asked = SamplingParams(allowed_token_ids=range(5), structured_outputs=form)
    assert asked.resolve(SamplingDefaults(), 16).allowed_token_ids == (0, 1, 2, 3, 4)
    with pytest.raises(InvalidRequestError, match="structured_outputs must be an object, not 5"):
        SamplingParams(structured_outputs=5)


def test_a_misspelt_parameter_is_refused_with_the_nearest_one() -> None:
    misspelt: dict[str, Any] = {"temprature": 0.5}
    unknown: dict[str, Any] = {"use_beam_search": True}
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**misspelt)
    expected = "SamplingParams has no field temprature; did you mean temperature?"
    assert caught.value.message == expected
    with pytest.raises(InvalidRequestError, match="no field use_beam_search; it has temperature, "):
        SamplingParams(**unknown)


def test_parameters_are_shown_where_they_differ_from_the_defaults() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    asked = SamplingParams(temperature=0, stop=["a"])
    assert repr(asked) == "SamplingParams(temperature=0, stop=['a'])"


def test_choices_have_seeds_of_their_own_that_follow_from_the_first() -> None:
    spec = RequestSpec(seed=42)
    seeds = [spec.for_choice(choice).seed for choice in range(16)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 16
    assert seeds == [spec.for_choice(choice).seed for choice in range(16)]
    for choice in range(16):
        spec.for_choice(choice).validate()
    assert RequestSpec().for_choice(3).seed is None


def test_a_device_slot_has_room_for_all_that_a_request_may_ask_for() -> None:
    assert shaping_tables.MOST_BIASES >= bounds.MAX_BIASES
    assert shaping_tables.MOST_BAD_WORDS >= bounds.MAX_BAD_WORDS >= 2 * bounds.MAX_BAD_STRINGS
    assert shaping_tables.MOST_BAD_TOKENS >= bounds.MAX_BAD_TOKENS
    assert shaping_tables.HISTORY >= bounds.MAX_BAD_WORD_TOKENS
    stops = bounds.MAX_STOP_TOKEN_IDS + bounds.MAX_EOS_TOKEN_IDS
    assert stops <= shaping_tables.MOST_STOPS
    assert shaping_tables.HISTORY & (shaping_tables.HISTORY - 1) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": ((7,), (8, 9), (5,))},
        {"min_tokens": 1, "stop_token_ids": (7, 5)},
        {"min_tokens": 1, "stop_token_ids": (7,), "bad_words": ((5,),)},
        {"min_tokens": 1, "bad_words": ((5,),)},  # 7 is the model's own end
    ],
)
def test_allowed_tokens_that_other_fields_forbid_all_are_refused(fields: dict[str, Any]) -> None:
    spec = RequestSpec(allowed_token_ids=(7, 5), max_tokens=4, **fields)
    with pytest.raises(InvalidRequestError, match="bad_words and min_tokens do not forbid") as no:
        spec.check_vocabulary(10, (7,))
    assert no.value.param == "allowed_token_ids"
    RequestSpec(allowed_token_ids=(7, 5, 6), max_tokens=4, **fields).check_vocabulary(10, (7,))


def test_the_models_end_may_be_the_only_token_that_is_allowed() -> None:
    for fields in ({}, {"min_tokens": 2, "ignore_eos": True}):
        RequestSpec(allowed_token_ids=(7,), **fields).check_vocabulary(10, (7,))
