"""What a body of `/v1/embeddings` may ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagewire.services.router.http.api.openai import embeddings as embedding_inputs
from pagewire.services.router.http.api.openai.embeddings import MAX_INPUTS, read_embedding
from pagewire.services.router.http.api.openai.generation import EmbeddingForm
from pagewire.services.router.http.api_errors import ContextLengthError
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import ModelNotFoundError
from pagewire.shared.model.pooling import PoolingRules
from pagewire.tests.support.request_bodies import CONTEXT, MODEL, embedding, encoded, refusal

BOS = MODEL.tokenizer.encode("")


def ids_of(**body: Any) -> list[list[int]]:
    return [prompt.token_ids for prompt in embedding(**body).prompts]


def with_rules(model: ServedModel, **body: Any) -> EmbeddingForm:
    found = read_embedding(encoded({"model": "m", "input": "Hi", **body}), model)
    assert found.embedding is not None
    return found.embedding


def test_inputs_are_texts_or_tokens_one_or_several() -> None:
    text = MODEL.tokenizer.encode("a text")
    assert ids_of(input="a text") == [text]
    assert ids_of(input=["a text", "b"]) == [text, MODEL.tokenizer.encode("b")]
    assert ids_of(input=[5, 6]) == [[5, 6]]
    assert ids_of(input=[[5, 6], [7]]) == [[5, 6], [7]]
    assert ids_of(input="a text", add_special_tokens=False) == [text[len(BOS) :]]
    assert ids_of(input=["a text", [5]][:1], truncate_prompt_tokens=2) == [text[-2:]]
    assert ids_of(input=[5] * CONTEXT, truncate_prompt_tokens=-1) == [[5] * (CONTEXT - 1)]
    assert len(ids_of(input=["a"] * MAX_INPUTS)) == MAX_INPUTS


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "must not have an empty string"),
        ({"input": ["a", ""]}, "input", "must not have an empty string"),
        ({"input": []}, "input", "input must be a string, a list of strings"),
        ({"input": [[]]}, "input", "input must be a string, a list of strings"),
        ({"input": ["a", 5]}, "input", "input must be a string, a list of strings"),
        ({"input": [5, True]}, "input", "none of them empty"),
        ({"input": [-1]}, "input", "input: token ids must lie between 0 and"),
        ({"input": [10**6]}, "input", "input: token ids must lie between 0 and"),
        ({"input": {"a": 1}}, "input", "input must be a string"),
        ({"input": None}, "input", "input must be a string"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "at most 2048 prompts in one request"),
        ({"input": [5] * CONTEXT}, "input", "at most 511 tokens here. However, input 0 has 512"),
        ({"input": "x" * 200_000}, "input", "maximum context length"),
        ({"encoding_format": "hex"}, "encoding_format", "encoding_format must be"),
        ({"dimensions": 0}, "dimensions", "dimensions must be a positive integer"),
        ({"dimensions": "many"}, "dimensions", "dimensions must be a positive integer"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be an integer from 1"),
        ({"normalize": "yes"}, "normalize", "normalize must be"),
        ({"user": 5}, "user", "user must be a string"),
        ({"model": None}, "model", "model must be"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str, words: str) -> None:
    error = refusal(embedding, **body)
    assert error.param == param
    assert words in error.message


def test_errors_have_openais_kinds() -> None:
    assert isinstance(refusal(embedding, input=[5] * CONTEXT), ContextLengthError)
    assert isinstance(refusal(embedding, model="other"), ModelNotFoundError)
    assert refusal(lambda: read_embedding(b"{", MODEL)).message.startswith("the body is")
    assert refusal(lambda: read_embedding(b'{"model": "m"}', MODEL)).code == (
        "missing_required_parameter"
    )


def test_the_tokens_and_numbers_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_inputs, "MAX_INPUT_TOKENS", 1000)
    assert len(ids_of(input=[[5] * 500] * 2)) == 2
    assert "more than 1000 tokens" in refusal(embedding, input=[[5] * 500] * 3).message
    monkeypatch.setattr(embedding_inputs, "MAX_NUMBERS", 3 * MODEL.hidden_size)
    assert len(ids_of(input=["a"] * 3)) == 3
    error = refusal(embedding, input=["a"] * 4)
    assert f"4 embeddings of {MODEL.hidden_size} numbers are too many" in error.message
    assert error.param == "input"


def test_unknown_fields_are_counted() -> None:
    assert embedding(input_type="query", user="me").unknown_fields == 1


def test_the_form_is_the_models_unless_asked_otherwise() -> None:
    assert embedding().embedding == EmbeddingForm("last", True, None, False)
    model = replace(MODEL, pooling=PoolingRules("mean", normalize=False))
    assert with_rules(model) == EmbeddingForm("mean", False, None, False)
    assert with_rules(model, normalize=True, encoding_format="base64") == EmbeddingForm(
        "mean", True, None, True
    )
    assert with_rules(model, normalize=None, encoding_format=None, dimensions=None) == (
        with_rules(model, encoding_format="float")
    )


def test_dimensions_are_for_models_whose_files_say_so() -> None:
    size = MODEL.hidden_size
    assert embedding(dimensions=size).embedding == embedding().embedding
    error = refusal(embedding, dimensions=8)
    assert error.param == "dimensions"
    assert f"dimensions must be {size}, or be left out" in error.message
    any_size = replace(MODEL, pooling=PoolingRules(is_matryoshka=True))
    assert with_rules(any_size, dimensions=8).dimensions == 8
    error = refusal(lambda: with_rules(any_size, dimensions=size + 1))
    assert error.message == f"dimensions must be at most {size}, not {size + 1}"
    some = replace(MODEL, pooling=PoolingRules(is_matryoshka=True, sizes=(8, 16)))
    assert with_rules(some, dimensions=16).dimensions == 16
    error = refusal(lambda: with_rules(some, dimensions=12))
    assert error.message == f"dimensions must be one of 8, 16, {size}, not 12"


def test_a_model_whose_files_ask_for_something_else_is_refused_in_words() -> None:
    model = replace(MODEL, pooling="modules.json: modules of type 'Dense' are not supported")
    error = refusal(lambda: with_rules(model))
    assert error.param == "model"
    assert error.message == (
        "This model makes no embeddings: modules.json: modules of type 'Dense' are not supported."
    )
