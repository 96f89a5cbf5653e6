"""A session that pauses on workers whose KV pools other requests fill many times."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pagewire.tests.support.local_cluster import local_cluster

pytestmark = pytest.mark.timeout(180)


def test_the_next_turn_of_a_session_finds_its_prompt_and_its_answer() -> None:
    options = ("--device", "cpu", "--num-blocks", "64", "--max-model-len", "512")
    with local_cluster(*options) as cluster, httpx.Client(base_url=cluster.url, timeout=60) as http:

        def ask(prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
            body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | fields
            body |= {"model": "pagewire-demo", "return_token_ids": True}
            response = http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        turns = {}
        for content, fields in ((100, {}), (200, {"session_id": "s"})):
            prompt = [content] * 200
            answer = ask(prompt, 40, **fields)
            turns[content] = [*prompt, *answer["choices"][0]["token_ids"], 7, 8, 9]
        for content in range(300, 310):
            ask([content] * 400, 2)
        retained = [
            value
            for name, value in cluster.metrics().items()
            if name.startswith("pagewire_kv_blocks_retained")
        ]
        assert sorted(retained) == [12, 14]  # the prompt; and with it the answer
        cached = {
            content: ask(turn, 1)["usage"]["prompt_tokens_details"]["cached_tokens"]
            for content, turn in turns.items()
        }
        # Full blocks, without the answer's last token, which has not run.
        assert cached == {100: 0, 200: 239 // 16 * 16}
