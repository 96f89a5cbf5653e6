"""What a router answers is what its OpenAPI document says, and what it refuses likewise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire import __version__
from pagewire.services.router.http.openapi.pages import DOCS_PATHS
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.api_document import JSON, STREAM, Document, document
from pagewire.tests.support.browser import Browser, browser
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter, live_router, with_worker
from pagewire.tests.support.tool_answers import TOOLS, written
from pagewire.tests.support.tool_models import make_model

STRICT = Document(document(), is_strict=True)
LAX = Document(document())
POSTS = [path for path, methods in STRICT.api["paths"].items() if "post" in methods]
WITH_BODIES = [path for path in POSTS if "requestBody" in STRICT.api["paths"][path]["post"]]
EXAMPLES = {
    path: STRICT.api["paths"][path]["post"]["requestBody"]["content"][JSON]["example"]
    for path in WITH_BODIES
}
CANDIDATES: tuple[Any, ...] = ({"_": 1}, [[]], True, "\x00", -0.5, None)
MISSING = "resp_" + "0" * 32
ANSWER = "<think>\nA clock.\n</think>\n\n" + written(TOOL_FORMATS["hermes"], [("clock", {})])
HELLO = [{"role": "user", "content": "Which time?"}]
FUNCTIONS = [{"type": "function", **each["function"]} for each in TOOLS]
ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "clock"}],
}
MESSAGE_TOOLS = [{"name": "clock", "input_schema": {"type": "object"}}]
CALLED = [
    {"role": "user", "content": [{"type": "input_text", "text": "Which time?"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"type": "function_call", "call_id": "a", "name": "clock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "It is noon."},
]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/completions", {"prompt": ["Hi", "Ho"], "n": 2, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": "Hi", "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": "Hi", "return_token_ids": True}),
    ("/v1/completions", {"prompt": "Hi", "timings": True, "service_tier": "auto"}),
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "timings": True, "n": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "prompt_logprobs": 1}),
    ("/v1/chat/completions", {"messages": HELLO, "return_token_ids": True}),
    ("/v1/responses", {"input": "Which time?"}),
    ("/v1/responses", {"input": CALLED, "tools": FUNCTIONS, "max_output_tokens": 3}),
    ("/v1/responses", {"input": "Hi", "tools": FUNCTIONS, "reasoning": {"effort": "high"}}),
    ("/v1/responses", {"input": "Hi", "timings": True}),
    ("/v1/responses", {"input": "Hi", "tools": FUNCTIONS, "tool_choice": ALLOWED}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 64, "timings": True}),
    ("/v1/responses", {"input": "Hi", "include": ["message.output_text.logprobs"]}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 64, "tools": MESSAGE_TOOLS}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 64, "thinking": {"type": "adaptive"}}),
    ("/v1/messages/count_tokens", {"messages": HELLO}),
    ("/v1/responses/input_tokens", {"input": "Hi"}),
    ("/v1/embeddings", {"input": ["Hi", "Ho"]}),
    ("/v1/embeddings", {"input": "Hi", "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [72, 101]}),
]
STREAMED = [each for each in REQUESTS if STREAM in STRICT.response("post", each[0], 200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "hermes")


def check(answer: httpx.Response, method: str, path: str) -> Any:
    """Check an answer in JSON by the document; return it."""
    content = STRICT.response(method, path, answer.status_code)
    assert answer.headers["content-type"] == JSON
    STRICT.check(content[JSON]["schema"], answer.json())
    return answer.json()


def test_each_answer_has_the_fields_of_its_schema_and_no_others(
    redis_url: str, model: Path
) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.answer = Tokenizer.from_dir(model).encode(ANSWER, add_special_tokens=False)
        kept = []
        for path, body in REQUESTS:
            answer = await router.http.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200, (body, answer.text)
            found = check(answer, "post", path)
            if path == "/v1/responses":
                kept.append(found["id"])
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 9, "thread": {"type": "create"}}
        refused = await router.http.post("/v1/messages", json=body)
        assert check(refused, "post", "/v1/messages")["error"]["details"]
        for path in ("/v1/models", "/version", "/health", "/ready"):
            check(await router.http.get(path), "get", path)
        check(await router.http.get(f"/v1/models/{MODEL}"), "get", "/v1/models/{model_id}")
        one = "/v1/responses/{response_id}"
        for name in kept:
            check(await router.http.get(f"/v1/responses/{name}"), "get", one)
            page = await router.http.get(f"/v1/responses/{name}/input_items")
            assert check(page, "get", f"{one}/input_items")["data"]
            refused = await router.http.post(f"/v1/responses/{name}/cancel")
            assert refused.status_code == 400
            check(refused, "post", f"{one}/cancel")
            check(await router.http.delete(f"/v1/responses/{name}"), "delete", one)

    with_worker(redis_url, main, model=str(model), served_model_name=MODEL)


def test_each_event_of_a_stream_has_the_fields_of_its_schema(redis_url: str, model: Path) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.answer = Tokenizer.from_dir(model).encode(ANSWER, add_special_tokens=False)
        for path, body in STREAMED:
            if "prompt_logprobs" in body:
                continue
            asked = {"model": MODEL, **body, "stream": True}
            if "stream_options" in STRICT.body(path)["properties"] and path != "/v1/responses":
                asked["stream_options"] = {"include_usage": True}
            answer = await router.http.post(path, json=asked)
            assert answer.status_code == 200, answer.text
            content = STRICT.response("post", path, 200)[STREAM]
            assert answer.headers["content-type"].startswith(STREAM)
            lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            events = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
            assert len(events) > 3
            kinds = content["schema"]["properties"]["data"]["anyOf"][-1]["contentSchema"]["anyOf"]
            for event in events:
                STRICT.check(kinds[0], event)

    with_worker(redis_url, main, model=str(model), served_model_name=MODEL)


def test_refusals_have_the_form_that_the_document_says(redis_url: str) -> None:
    async def main() -> None:
        async with live_router(redis_url) as router:
            assert (await router.http.get("/ready")).status_code == 503
            check(await router.http.get("/ready"), "get", "/ready")
            for path in WITH_BODIES:
                wrong = await router.http.post(path, content=b"{")
                assert wrong.status_code == 400
                check(wrong, "post", path)
                body = {**EXAMPLES[path], "model": "another"}
                other = await router.http.post(path, json=body)
                assert other.status_code == 404
                check(other, "post", path)
            for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel")):
                found = await router.http.request(method, f"/v1/responses/{MISSING}{path}")
                assert found.status_code == 404
                check(found, method.lower(), f"/v1/responses/{{response_id}}{path}")

    run_async(main())


@pytest.mark.parametrize("path", WITH_BODIES)
def test_each_field_of_a_wrong_type_is_refused_by_name(redis_url: str, path: str) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.generated.clear()
        tried = set()
        for name, schema in STRICT.body(path)["properties"].items():
            validator = LAX.validator(schema)
            for value in CANDIDATES:
                if validator.is_valid(value):
                    continue
                body = {**EXAMPLES[path], "model": MODEL, name: value}
                answer = await router.http.post(path, json=body)
                assert answer.status_code in (400, 404), (name, value, answer.text)
                error = check(answer, "post", path)["error"]
                assert name in error["message"], (name, value, error)
                if "param" in error:
                    assert error["param"].startswith(name), (name, value, error)
                tried.add(name)
        assert STRICT.body(path)["properties"].keys() == tried
        assert not worker.generated

    with_worker(redis_url, main)


def test_the_document_needs_a_key_and_the_page_asks_for_it(redis_url: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: key-of-alice\n")

    async def main() -> None:
        async with live_router(redis_url, api_key_file=keys) as router:
            refused = await router.http.get("/openapi.json")
            assert refused.status_code == 401
            headers = {"authorization": "Bearer key-of-alice"}
            found = await router.http.get("/openapi.json", headers=headers)
            assert found.json() == document(needs_key=True, model=MODEL)
            for path in DOCS_PATHS:
                page = await router.http.get(path)
                assert page.status_code == 200
                assert "default-src 'none'" in page.headers["content-security-policy"]
                assert "connect-src 'self'" in page.headers["content-security-policy"]
                if "swagger-ui" not in path:
                    assert "://" not in page.text
                    assert __version__ not in page.text
        async with live_router(redis_url) as router:
            assert (await router.http.get("/openapi.json")).json() == document(model=MODEL)

    run_async(main())


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as found:
        yield found


def operation(name: str) -> str:
    """The element of an operation on the page, as JavaScript."""
    return f"document.querySelector('[id$=-{name}]')"


TOKENIZE = operation("post_tokenize")
STATUS = f"{TOKENIZE}.querySelector('.live-responses-table .response .response-col_status')"


async def try_tokenize(page: Browser) -> str:
    """Open an operation, send its example as it is, and return the status that the page shows."""
    for control, shows in (
        (".opblock-summary-control", f"{TOKENIZE}.querySelector('.execute')"),
        (".execute", STATUS),
    ):
        # Swagger UI drops a click that comes while it still resolves the operation.
        click = f"!!{shows} || ({TOKENIZE}.querySelector('{control}')?.click(), !!{shows})"
        await asyncio.to_thread(page.wait_for, click)
    status: str = await asyncio.to_thread(page.evaluate, f"{STATUS}.textContent")
    return status.strip()


@pytest.mark.browser
def test_a_browser_shows_each_route_and_sends_an_example(redis_url: str, page: Browser) -> None:
    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        await asyncio.to_thread(page.show, f"{router.url}/docs")
        await asyncio.to_thread(page.wait_for, "document.documentElement.dataset.shown")
        shown = "[...document.querySelectorAll('.opblock-summary-path')]"
        paths = await asyncio.to_thread(page.evaluate, f"{shown}.map((e) => e.dataset.path)")
        assert set(paths) == set(STRICT.api["paths"])
        assert await try_tokenize(page) == "200"
        assert page.complaints == []

    with_worker(redis_url, main)


@pytest.mark.browser
def test_a_browser_shows_the_document_once_it_has_a_key(
    redis_url: str, page: Browser, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: key-of-alice\n")

    def give(key: str) -> str:
        set_key = f"document.getElementById('key-text').value = {json.dumps(key)}"
        return f"{set_key}; document.querySelector('#key button').click()"

    async def main() -> None:
        async with live_router(redis_url, api_key_file=keys) as router:
            await asyncio.to_thread(page.show, f"{router.url}/docs", width=360, height=700)
            await asyncio.to_thread(page.wait_for, "!document.getElementById('key').hidden")
            await asyncio.to_thread(page.evaluate, give("wrong"))
            says = "document.getElementById('notice').textContent === 'The key is not valid.'"
            await asyncio.to_thread(page.wait_for, says)
            await asyncio.to_thread(page.evaluate, give("key-of-alice"))
            await asyncio.to_thread(page.wait_for, "document.documentElement.dataset.shown")
            assert await asyncio.to_thread(page.evaluate, "document.getElementById('key').hidden")
            assert await try_tokenize(page) == "200"

    run_async(main(), 60)
