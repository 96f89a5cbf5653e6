"""`/tokenize`, `/detokenize` and `/version` at a live router, with Hugging Face as the truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from pagewire import __version__
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter, with_worker
from pagewire.tests.support.tool_answers import CLOCK
from pagewire.tests.support.tool_models import make_model

CHAT = [{"role": "user", "content": "The weather in Łódź?"}, {"role": "assistant", "content": "It"}]
TEXT = "The café 🌍"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "hermes")


async def found(router: LiveRouter, path: str, **body: Any) -> Any:
    response = await router.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokens_are_hugging_faces(redis_url: str, model: Path) -> None:
    truth = transformers.AutoTokenizer.from_pretrained(model)

    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        for special in (True, False):
            ids = truth.encode(TEXT, add_special_tokens=special)
            answer = await found(router, "/tokenize", prompt=TEXT, add_special_tokens=special)
            assert answer == {
                "count": len(ids),
                "max_model_len": router.service.max_model_len,
                "tokens": ids,
                "token_strs": None,
            }
            assert await found(router, "/detokenize", tokens=ids) == {"prompt": truth.decode(ids)}
        answer = await found(router, "/tokenize", model=MODEL, prompt=TEXT, return_token_strs=True)
        assert answer["token_strs"] == truth.convert_ids_to_tokens(answer["tokens"])
        assert (await found(router, "/tokenize", prompt="", add_special_tokens=False))["count"] == 0
        assert await found(router, "/detokenize", tokens=[]) == {"prompt": ""}

    with_worker(redis_url, scenario, model=str(model))


def test_tokens_of_conversations(redis_url: str, model: Path) -> None:
    truth = transformers.AutoTokenizer.from_pretrained(model)

    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        cases: list[dict[str, Any]] = [
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"continue_final_message": True, "add_generation_prompt": False},
            {"add_generation_prompt": True, "tools": [CLOCK]},
        ]
        for case in cases:
            ids = truth.apply_chat_template(CHAT, tokenize=True, return_dict=False, **case)
            answer = await found(router, "/tokenize", messages=CHAT, **case)
            assert answer["tokens"] == ids, case

    with_worker(redis_url, scenario, model=str(model))


def test_large_bodies_are_read_in_a_process(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        text = "long " * 30_000
        answer = await found(router, "/tokenize", prompt=text, return_token_strs=True)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 30_000
        again = await found(router, "/detokenize", tokens=answer["tokens"])
        assert text in again["prompt"]

    with_worker(redis_url, scenario)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "either prompt or messages"),
    ("/tokenize", {"prompt": "x", "messages": CHAT}, "either prompt or messages"),
    ("/tokenize", {"prompt": 5}, "prompt must be a string"),
    ("/tokenize", {"prompt": "x" * 2_000_000}, "maximum context length"),
    ("/tokenize", {"messages": []}, "messages must be a list of 1 to"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("/detokenize", {}, "tokens is required"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0] must be an integer from 0"),
    ("/detokenize", {"tokens": [10**6]}, "tokens must be token ids below"),
    ("/detokenize", {"tokens": [1], "model": "other"}, "does not exist"),
    ("/detokenize", {"tokens": [10**6], "model": "other"}, "does not exist"),
    ("/tokenize", {"prompt": "x", "model": ""}, "does not exist"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * 10**6}], "model": "m"}, "`m`"),
]


def test_wrong_bodies_are_refused(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        for path, body, message in WRONG:
            response = await router.http.post(path, json=body)
            assert response.status_code == (404 if "model" in body else 400), body
            assert message in response.json()["error"]["message"]

    with_worker(redis_url, scenario)


def test_the_version(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        assert (await router.http.get("/version")).json() == {"version": __version__}

    with_worker(redis_url, scenario)
