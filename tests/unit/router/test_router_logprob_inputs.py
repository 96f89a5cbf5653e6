"""Log probabilities as requests ask for them: fields that go together, and what is refused."""

from dataclasses import replace

import pytest

from pagewire.services.router.http.api.openai.generation import read_completion
from pagewire.tests.support.request_bodies import MODEL, chat, completion, encoded, refusal


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
