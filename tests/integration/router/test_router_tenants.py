"""What a router says of the API key of a request: whose cached blocks it shares, its objective."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter, with_worker

ALICE, BOB, BOBS_OTHER = "key-of-alice", "key-of-bob-1", "key-of-bob-2"
TWO_NAMES = f"alice: {ALICE}\nbob: {BOB}\nbob: {BOBS_OTHER}\n"
HELLO = [{"role": "user", "content": "Hello"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "n": 2},
    "/v1/completions": {"prompt": ["Hello", "Good day"], "n": 2},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
}


async def tenants(router: LiveRouter, worker: FakeDecodeWorker, key: str) -> set[str | None]:
    """Return whose blocks the requests of a key share, on each route, as streams and whole."""
    worker.generated.clear()
    for path, body in REQUESTS.items():
        for stream in (False, True):
            asked = {"model": MODEL, "stream": stream, "cache_salt": "salt", **body}
            response = await router.http.post(path, json=asked, headers={"x-api-key": key})
            assert response.status_code == 200, response.text
    assert {message.spec.cache_salt for message in worker.generated} == {"salt"}
    assert len(worker.generated) == 16
    return {message.spec.tenant for message in worker.generated}


async def until_valid(router: LiveRouter, key: str) -> None:
    """Wait until the router has read the file of keys again."""
    for _ in range(200):
        models = await router.http.get("/v1/models", headers={"x-api-key": key})
        if models.status_code == 200:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the key is not valid")


@pytest.mark.parametrize("shares", [False, True])
def test_keys_of_several_names_share_no_prefix_unless_the_operator_says_so(
    redis_url: str, tmp_path: Path, shares: bool
) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        found = [await tenants(router, worker, key) for key in (ALICE, BOB, BOBS_OTHER)]
        assert found == ([{None}] * 3 if shares else [{"alice"}, {"bob"}, {"bob"}])

    file = tmp_path / "keys"
    file.write_text(TWO_NAMES)
    with_worker(redis_url, scenario, api_key_file=file, share_prefix_cache=shares)


def test_who_gets_the_only_key_shares_nothing_with_who_had_it(
    redis_url: str, tmp_path: Path
) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        assert await tenants(router, worker, ALICE) == {"alice"}
        file.write_text(f"bob: {BOB}\nbob: {BOBS_OTHER}\n")
        await until_valid(router, BOB)
        assert await tenants(router, worker, BOB) == {"bob"}
        file.write_text(TWO_NAMES)
        await until_valid(router, ALICE)
        for key in (BOB, BOBS_OTHER):
            assert await tenants(router, worker, key) == {"bob"}

    file = tmp_path / "keys"
    file.write_text(f"alice: {ALICE}\n")
    with_worker(redis_url, scenario, api_key_file=file)


def test_the_key_that_is_not_in_the_file_is_a_name_too(redis_url: str, tmp_path: Path) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        assert await tenants(router, worker, ALICE) == {"default"}
        assert await tenants(router, worker, BOB) == {"bob"}

    file = tmp_path / "keys"
    file.write_text(f"bob: {BOB}\n")
    with_worker(redis_url, scenario, api_key_file=file, api_key=ALICE)


def test_without_keys_nothing_changes(redis_url: str) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        assert await tenants(router, worker, ALICE) == {None}

    with_worker(redis_url, scenario)


def test_requests_of_a_key_have_its_objective_unless_they_have_one(
    redis_url: str, tmp_path: Path
) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        for key, own in ((ALICE, None), (ALICE, 0.5), (BOB, None)):
            headers = {"x-api-key": key}
            asked = {"model": MODEL, "prompt": "Hello", "slo_gap_s": own}
            response = await router.http.post("/v1/completions", json=asked, headers=headers)
            assert response.status_code == 200, response.text
        assert [message.spec.slo_gap_s for message in worker.generated] == [0.05, 0.5, None]

    file = tmp_path / "keys"
    file.write_text(TWO_NAMES)
    with_worker(redis_url, scenario, api_key_file=file, slo_gap_s_of_keys={"alice": 0.05})
