"""Log probabilities as requests ask for them: fields that go together, and what is refused."""

from dataclasses import replace

import pytest

from pagewire.services.router.http.api.openai.generation import read_chat, read_completion
from pagewire.services.router.http.api.responses.inputs import read_response, with_history
from pagewire.tests.support.request_bodies import MODEL, chat, completion, encoded, refusal

LONG = replace(MODEL, max_model_len=1 << 17)
SAY = {"role": "user", "content": "Hi"}
INCLUDED = ["message.output_text.logprobs"]


def long_completion(**body):
    return read_completion(encoded({"model": "m", "prompt": "Hi", "logprobs": 20, **body}), LONG)


def long_chat(**body):
    asked = {"model": "m", "messages": [SAY], "logprobs": True, "top_logprobs": 20, **body}
    return read_chat(encoded(asked), LONG)


def long_response(**body):
    asked = {"model": "m", "input": "Hi", "include": INCLUDED, "top_logprobs": 20, **body}
    return read_response(with_history(encoded(asked), b""), LONG)


@pytest.mark.parametrize(
    ("asked", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities_of_a_chat(asked, logprobs):
    read = chat(**asked, prompt_logprobs=2)
    assert read.prompts[0].spec.logprobs == logprobs
    assert read.prompts[0].spec.prompt_logprobs == 2
    assert read.prompt_logprobs


@pytest.mark.parametrize(
    ("asked", "of_answer", "of_prompt", "echo"),
    [
        ({"logprobs": 0}, 0, None, None),
        ({"logprobs": 20}, 20, None, None),
        ({"logprobs": 3, "echo": True}, 3, 3, "Hi"),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 1}, 3, 1, "Hi"),
        ({"echo": True}, None, None, "Hi"),
    ],
)
def test_log_probabilities_of_a_completion(asked, of_answer, of_prompt, echo):
    read = completion(**asked)
    (prompt,) = read.prompts
    found = (prompt.spec.logprobs, prompt.spec.prompt_logprobs, prompt.echo)
    assert found == (of_answer, of_prompt, echo)
    assert read.prompt_logprobs == ("prompt_logprobs" in asked)


@pytest.mark.parametrize("call", [completion, chat])
def test_tokens_in_and_out(call):
    assert not call().return_token_ids and not call().names_by_id
    read = call(return_token_ids=True, return_tokens_as_token_ids=True)
    assert read.return_token_ids and read.names_by_id


def test_a_response_has_a_bounded_number_of_prompt_token_ids():
    def long(**body):
        asked = {"model": "m", "prompt": [[5] * 900] * 64, **body}
        return read_completion(encoded(asked), replace(MODEL, max_model_len=1024))

    assert long(return_token_ids=True, n=72).n == 72
    error = refusal(long, return_token_ids=True, n=73)
    assert error.param == "return_token_ids" and "at most 4194304" in error.message
    assert long(n=73).n == 73


def test_an_echo_alone_generates_nothing():
    read = completion(max_tokens=0, echo=True, logprobs=1)
    assert not read.generates and read.prompts[0].spec.max_tokens == 1
    assert completion(max_tokens=1, echo=True).generates
    assert completion(echo=True).generates


@pytest.mark.parametrize(
    ("call", "asked", "param", "message"),
    [
        (completion, {"logprobs": 21}, "logprobs", "from 0 to 20"),
        (completion, {"logprobs": -1}, "logprobs", "from 0 to 20"),
        (completion, {"logprobs": True}, "logprobs", "not True"),
        (completion, {"logprobs": "5"}, "logprobs", "not '5'"),
        (completion, {"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        (completion, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streamed"),
        (completion, {"max_tokens": 0}, "max_tokens", "0 with echo"),
        (completion, {"max_tokens": 0, "echo": False}, "max_tokens", "0 with echo"),
        (chat, {"max_tokens": 0}, "max_tokens", "a positive integer"),
        (chat, {"logprobs": 1}, "logprobs", "boolean"),
        (chat, {"top_logprobs": 2}, "top_logprobs", "logprobs is true"),
        (chat, {"top_logprobs": 2, "logprobs": False}, "top_logprobs", "logprobs is true"),
        (chat, {"top_logprobs": 21, "logprobs": True}, "top_logprobs", "from 0 to 20"),
        (chat, {"top_logprobs": True, "logprobs": True}, "top_logprobs", "integer"),
        (chat, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streamed"),
    ],
)
def test_log_probabilities_that_cannot_be_had_are_refused_by_name(call, asked, param, message):
    error = refusal(call, **asked)
    assert error.param == param
    assert message in error.message


def test_a_response_with_too_many_log_probabilities_of_prompts_is_refused():
    prompts = [[5] * 400] * 64
    error = refusal(completion, prompt=prompts, n=16, prompt_logprobs=20)
    assert error.param == "prompt_logprobs" and "at most 1048576" in error.message
    assert refusal(completion, prompt=prompts, n=16, logprobs=20, echo=True).param == "logprobs"
    assert completion(prompt=prompts, n=16, prompt_logprobs=1)
    assert completion(prompt=prompts, n=16, logprobs=20)


@pytest.mark.parametrize(
    ("call", "asked", "field", "most"),
    [
        (long_completion, {"prompt": ["a", "b"], "n": 128, "max_tokens": 600}, "max_tokens", 195),
        (long_completion, {"max_tokens": 50_000}, "max_tokens", 49_932),
        (long_completion, {"logprobs": 0, "n": 64, "max_tokens": 20_000}, "max_tokens", 16_384),
        (long_chat, {"n": 128, "max_tokens": 400}, "max_tokens", 390),
        (long_chat, {"n": 2, "max_completion_tokens": 30_000}, "max_completion_tokens", 24_966),
        (long_response, {"max_output_tokens": 50_000}, "max_output_tokens", 49_932),
        # The last event of its stream has all of them.
        (long_response, {"max_output_tokens": 50_000, "stream": True}, "max_output_tokens", 49_932),
    ],
)
def test_a_response_with_too_many_log_probabilities_of_answers_is_refused(call, asked, field, most):
    error = refusal(call, **asked)
    assert error.param == field
    assert error.message.startswith(f"{field} must be at most {most}, not {asked[field]}: ")
    assert "1048576" in error.message
    length = call(**{**asked, field: most}).prompts[0].spec.max_tokens
    assert length == most


@pytest.mark.parametrize(
    ("call", "asked", "length"),
    [
        (long_completion, {"max_tokens": 4096}, 4096),
        (long_completion, {"max_tokens": 131_000, "logprobs": 7}, 131_000),
        (long_completion, {"max_tokens": 131_000, "stream": True}, 131_000),
        (long_completion, {"max_tokens": 131_000, "logprobs": None}, 131_000),
        (long_chat, {"max_tokens": 131_000, "stream": True}, 131_000),
        (long_chat, {"max_tokens": 131_000, "logprobs": False, "top_logprobs": 0}, 131_000),
        (long_response, {"max_output_tokens": 131_000, "include": [], "top_logprobs": 0}, 131_000),
    ],
)
def test_log_probabilities_of_ordinary_answers_are_not_refused(call, asked, length):
    assert call(**asked).prompts[0].spec.max_tokens == length


def test_without_max_tokens_answers_are_as_long_as_their_log_probabilities_allow():
    assert long_chat().prompts[0].spec.max_tokens == 49_932
    assert long_chat(n=128).prompts[0].spec.max_tokens == 390
    assert long_chat(stream=True).prompts[0].spec.max_tokens > 130_000
    assert long_response().prompts[0].spec.max_tokens == 49_932
    assert long_completion(n=128).prompts[0].spec.max_tokens == 16
    prompts = long_completion(prompt=["Hi"] * 64, n=128).prompts
    assert {prompt.spec.max_tokens for prompt in prompts} == {6}
