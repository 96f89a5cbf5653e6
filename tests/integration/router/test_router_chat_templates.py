"""Chat templates that the operator or a request brings, at a live router."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pagewire import LLM, SamplingParams
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import ConfigError, InvalidRequestError
from pagewire.shared.settings.config import RouterSettings
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, TEXT, LiveRouter, with_worker

CHAT = [{"role": "user", "content": "Hi"}]
SHOUT = "{% for message in messages %}{{ message.content | upper }}!{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

WRONG: list[tuple[str, str]] = [
    ("x\n{% for %}", "chat_template is not valid Jinja (line 2: Expected an expression, got"),
    ("\n\n{{ messages[7].content.x }}", "cannot render the messages (line 3: "),
    ("{{ 1 / 0 }}", "cannot render the messages (line 1: division by zero)"),
    ("a\n{{ raise_exception('roles must alternate') }}", "(line 2: roles must alternate)"),
    ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    ("(" * 300 + "{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "chat_template"),
    ("", "chat_template must be a string of 1 to"),
    ("{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "longer than 8000000 characters"),
    ("{{ 'x' * 999999999 }}", "takes more than 150 MiB"),
    ("{{ 7 ** (7 ** 9) }}", "chat_template takes more than 2 s of CPU time"),
]


async def answered(router: LiveRouter, path: str, body: dict[str, Any]) -> Any:
    response = await router.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_request_brings_its_template(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        body = {"model": MODEL, "messages": CHAT, "chat_template": SHOUT}
        expected = router.service.model.tokenizer.encode("HI!", add_special_tokens=False)
        assert (await answered(router, "/tokenize", body))["tokens"] == expected
        answer = await answered(router, "/v1/chat/completions", body)
        assert answer["usage"]["prompt_tokens"] == len(expected)
        assert TEXT.startswith(answer["choices"][0]["message"]["content"])
        large = body | {"padding": "x" * 9000}
        assert (await answered(router, "/v1/chat/completions", large))["choices"]
        plain = await answered(router, "/tokenize", {"messages": CHAT})
        assert plain["tokens"] != expected  # the others keep the model's

    with_worker(redis_url, scenario, trust_request_chat_template=True)


def test_a_wrong_template_is_the_clients_fault(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        for template, expected in WRONG:
            body = {"model": MODEL, "messages": CHAT, "chat_template": template}
            started = time.monotonic()
            response = await router.http.post("/v1/chat/completions", json=body)
            assert response.status_code == 400, (template, response.text)
            error = response.json()["error"]
            assert expected in error["message"], template
            assert "\n" not in error["message"]
            assert time.monotonic() - started < 30
        body["chat_template"] = ENDLESS
        escaped = json.dumps(body).replace("chat_template", "chat\\u005ftemplate")
        response = await router.http.post("/v1/chat/completions", content=escaped)
        assert response.status_code == 400
        assert "2 s of CPU time" in response.json()["error"]["message"]

    with_worker(redis_url, scenario, trust_request_chat_template=True)


def test_without_the_setting_a_large_body_has_no_template_either(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        body = {"model": MODEL, "messages": CHAT, "chat_template": SHOUT, "padding": "x" * 100_000}
        for each in (body, {**body, "padding": ""}):
            response = await router.http.post("/v1/chat/completions", json=each)
            assert response.status_code == 400
            assert "--trust-request-chat-template" in response.json()["error"]["message"]

    with_worker(redis_url, scenario)


def test_the_operators_template_takes_the_place_of_the_models(tmp_path: Path) -> None:
    file = tmp_path / "shout.jinja"
    file.write_text(SHOUT)
    model = ServedModel.load(RouterSettings(served_model_name="m", chat_template=file))
    assert model.tokenizer.render_chat(CHAT) == "HI!"
    llm = LLM("demo", device="cpu", chat_template=file)
    asked = SamplingParams(max_tokens=1)
    assert llm.chat(CHAT, asked)[0].prompt == "HI!"
    assert llm.chat(CHAT, asked, chat_template="<{{ messages[0].content }}>")[0].prompt == "<Hi>"
    with pytest.raises(InvalidRequestError, match=r"not valid Jinja \(line 1: "):
        llm.chat(CHAT, asked, chat_template="{{")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file or directory.* must be a file with a Jinja template"),
        (b"\xff\xfe", "it is not UTF-8"),
        (b"a\n{% if %}", r"wrong.jinja is not valid Jinja \(line 2: "),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: bytes | None, problem: str) -> None:
    file = tmp_path / "wrong.jinja"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        ServedModel.load(RouterSettings(served_model_name="m", chat_template=file))
    assert "\n" not in str(caught.value)
