"""Responses that are stored: several routers, owners, bounds, and a Redis that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pagewire.services.router.http.api.responses.inputs import MAX_STORED_BYTES
from pagewire.services.router.http.api.responses.store import TTL_S
from pagewire.shared.base.errors import RedisSetupError
from pagewire.shared.cluster.redis_client import cluster_tag
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import (
    ANSWER,
    MODEL,
    SECRET,
    TEXT,
    TOKENIZER,
    LiveRouter,
    live_router,
    with_worker,
)
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.tool_models import make_model

PREFIX = f"pagewire:{cluster_tag(SECRET)}:r"
MISSING = "resp_" + "0" * 32


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def client_of(router: LiveRouter, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=key, max_retries=0, timeout=15)


def prompt_of(worker: FakeDecodeWorker) -> str:
    ids = worker.generated[-1].prompt_token_ids
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def stored_bytes(server: RedisServer) -> int:
    """The bytes of all stored responses; the store's own count must be the same."""
    with server.client() as client:
        found = sum(client.strlen(key) for key in client.scan_iter(f"{PREFIX}:*"))
        sums = dict(client.zrange(f"{PREFIX}b", 0, -1, withscores=True))
        assert sums.get(b"", 0) == found
        assert sum(sums.values()) == 2 * found
        return found


def test_any_router_goes_on_with_a_conversation(redis_server: RedisServer) -> None:
    async def main() -> None:
        url = redis_server.url
        async with (
            FakeDecodeWorker(url, SECRET, answer=ANSWER) as worker,
            live_router(url, router_id="router-0") as one,
            live_router(url, router_id="router-1") as two,
            client_of(one) as first,
            client_of(two) as second,
        ):
            await one.ready()
            await two.ready()
            asked: dict[str, Any] = {"model": MODEL}
            answer = await first.responses.create(
                **asked, input="My name is Ada.", instructions="Be short."
            )
            *_, last = [
                event
                async for event in await second.responses.create(
                    **asked, input="What is it?", previous_response_id=answer.id, stream=True
                )
            ]
            assert last.response.previous_response_id == answer.id
            third = await first.responses.create(
                **asked, input="Again?", previous_response_id=last.response.id
            )
            prompt = prompt_of(worker)
            said = ["My name is Ada.", TEXT, "What is it?", TEXT, "Again?"]
            place = 0
            for each in said:
                place = prompt.index(each, place) + len(each)
            assert "Be short." not in prompt  # they are a request's own
            kept = await second.responses.retrieve(third.id)
            assert kept == third
            await second.responses.delete(answer.id)
            with pytest.raises(openai.NotFoundError):
                await first.responses.retrieve(answer.id)
            # The later response has all of the conversation.
            await second.responses.create(**asked, input="Still?", previous_response_id=third.id)
            assert "My name is Ada." in prompt_of(worker)

    run_async(main())


def test_what_is_not_there_is_not_found(redis_server: RedisServer) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with client_of(router) as client:
            create = client.responses.create
            unkept = await create(model=MODEL, input="Hi", store=False)
            worker.generated.clear()
            for name in (unkept.id, MISSING, "resp_*", "x" * 60):
                with pytest.raises(openai.NotFoundError) as caught:
                    await create(model=MODEL, input="Hi", previous_response_id=name)
                assert caught.value.code == "previous_response_not_found"
                assert caught.value.param == "previous_response_id"
                for call in (
                    client.responses.retrieve,
                    client.responses.delete,
                    client.responses.cancel,
                    client.responses.input_items.list,
                ):
                    with pytest.raises(openai.NotFoundError):
                        await call(name)
            assert not worker.generated
            kept = await create(model=MODEL, input="Hi")
            with pytest.raises(openai.BadRequestError, match="background"):
                await client.responses.cancel(kept.id)
            with pytest.raises(openai.BadRequestError, match="stream"):
                await client.responses.retrieve(kept.id, stream=True)

    with_worker(redis_server.url, main)


CALL = {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "It is noon."}


def test_the_input_of_a_response_is_listed_page_by_page(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with client_of(router) as client:
            first = await client.responses.create(model=MODEL, input="Hello.", instructions="Be.")
            asked: Any = [
                {"role": "user", "content": [{"type": "input_text", "text": "Which time?"}]},
                {"type": "reasoning", "id": "rs_mine", "summary": [], "content": "A clock!"},
                {**CALL, "id": 7},
                RESULT,
            ]
            last = await client.responses.create(
                model=MODEL, input=asked, previous_response_id=first.id
            )
            list_items = client.responses.input_items.list
            page = await list_items(last.id, order="asc")
            assert not page.has_more
            hello, answer, question, thought, call, result = page.data
            assert (hello.type, hello.role, hello.status) == ("message", "user", "completed")
            assert hello.content[0].to_dict() == {"type": "input_text", "text": "Hello."}
            assert (answer.id, answer.role) == (first.output[0].id, "assistant")
            assert answer.content[0].to_dict() == first.output[0].content[0].to_dict()
            assert question.content[0].text == "Which time?"
            assert (thought.id, thought.content[0].text) == ("rs_mine", "A clock!")
            assert call.to_dict() == {**CALL, "id": call.id, "status": "completed"}
            assert (result.output, result.call_id) == ("It is noon.", "call_1")
            ids = [item.id for item in page.data]
            assert len(set(ids)) == 6
            # The same items have the same ids in the response before, which has fewer of them.
            before = await list_items(first.id)
            assert [item.id for item in before.data] == ids[:1]
            assert [item.id async for item in list_items(last.id, limit=1)] == ids[::-1]
            found = await list_items(last.id, order="asc", after=ids[1], limit=2)
            assert [item.id for item in found.data] == ids[2:4]
            raw = await router.http.get(
                f"/v1/responses/{last.id}/input_items?limit=2&order=asc&after={ids[3]}"
            )
            assert raw.json() | {"data": None} == {
                "object": "list",
                "data": None,
                "first_id": ids[4],
                "last_id": ids[5],
                "has_more": False,
            }
            ended = await list_items(last.id, order="asc", after=ids[-1])
            assert (ended.data, ended.has_more) == ([], False)

    with_worker(redis_server.url, main, model=str(make_model(tmp_path, "hermes")))


def test_items_of_one_id_are_listed_once_each(redis_server: RedisServer) -> None:
    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with client_of(router) as client:
            asked: Any = [{"role": "user", "content": "Hi", "id": "same"} for _ in range(5)]
            kept = await client.responses.create(model=MODEL, input=asked)
            list_items = client.responses.input_items.list
            found = [item.id async for item in list_items(kept.id, limit=2, order="asc")]
            assert (len(found), len(set(found)), found[0]) == (5, 5, "same")

    with_worker(redis_server.url, main)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=ten", "limit"),
        ("order=up", "order"),
        ("after=msg_0", "after"),
        ("after=", "after"),
    ],
)
def test_wrong_pages_are_refused(redis_server: RedisServer, query: str, field: str) -> None:
    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with client_of(router) as client:
            kept = await client.responses.create(model=MODEL, input="Hi")
        answer = await router.http.get(f"/v1/responses/{kept.id}/input_items?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert answer.json()["error"]["message"].startswith(f"{field} must be ")

    with_worker(redis_server.url, main)


def test_another_keys_response_is_not_found(redis_server: RedisServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: key-of-alice\nbob: key-of-bob-2\n")

    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with (
            client_of(router, "key-of-alice") as alice,
            client_of(router, "key-of-bob-2") as bob,
        ):
            kept = await alice.responses.create(model=MODEL, input="A secret.")
            for call in (
                bob.responses.retrieve(kept.id),
                bob.responses.delete(kept.id),
                bob.responses.cancel(kept.id),
                bob.responses.input_items.list(kept.id),
                bob.responses.create(model=MODEL, input="Hi", previous_response_id=kept.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            assert (await alice.responses.retrieve(kept.id)).id == kept.id
            assert len(worker.generated) == 1

    with_worker(redis_server.url, main, api_key_file=keys)


def test_all_responses_together_are_bounded(redis_server: RedisServer) -> None:
    bound = 12_000

    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with client_of(router) as client:
            kept = []
            for number in range(12):
                answer = await client.responses.create(model=MODEL, input=f"{number} " * 200)
                assert answer.model_extra["store"] is True
                kept.append(answer.id)
                assert stored_bytes(redis_server) <= bound
            await client.responses.retrieve(kept[-1])
            await client.responses.retrieve(kept[-2])
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(kept[0])
            with redis_server.client() as redis:
                redis.delete(f"{PREFIX}b")  # as Redis may where its memory is full
            answer = await client.responses.create(model=MODEL, input="Hi")
            kept.append(answer.id)
            before = stored_bytes(redis_server)
            await client.responses.delete(kept[-1])
            assert 0 < stored_bytes(redis_server) < before
            await client.responses.delete(kept[-2])

    with_worker(redis_server.url, main, responses_bytes=bound)


BOUND = 12_000


@pytest.mark.parametrize("lost", [None, "b", "s:alice"])
def test_a_key_that_floods_the_store_displaces_its_own_responses(
    redis_server: RedisServer, tmp_path: Path, lost: str | None
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: key-of-alice\nbob: key-of-bob-2\n")

    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with (
            client_of(router, "key-of-alice") as alice,
            client_of(router, "key-of-bob-2") as bob,
        ):
            of_bob = await bob.responses.create(model=MODEL, input="Hi")
            of_alice = []
            for number in range(12):
                if number == 9 and lost is not None:
                    with redis_server.client() as redis:
                        redis.delete(f"{PREFIX}{lost}")
                text = f"{number} " * 200
                of_alice.append((await alice.responses.create(model=MODEL, input=text)).id)
            with redis_server.client() as redis:
                sums = dict(redis.zrange(f"{PREFIX}b", 0, -1, withscores=True))
            assert sums[b"alice"] + sums.get(b"bob", 0) == sums[b""] <= BOUND
            assert (await bob.responses.retrieve(of_bob.id)).id == of_bob.id
            assert (await alice.responses.retrieve(of_alice[-1])).id == of_alice[-1]
            if lost != "s:alice":  # else it is there until its hour is over
                with pytest.raises(openai.NotFoundError):
                    await alice.responses.retrieve(of_alice[0])
            await bob.responses.delete(of_bob.id)
            await alice.responses.delete(of_alice[-1])

    with_worker(redis_server.url, main, api_key_file=keys, responses_bytes=BOUND)


def test_a_keys_own_bound_displaces_only_its_own(redis_server: RedisServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: key-of-alice\nbob: key-of-bob-2\n")

    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        kept: dict[str, list[str]] = {"key-of-bob-2": [], "key-of-alice": []}
        for key, ids in kept.items():
            async with client_of(router, key) as client:
                for number in range(6):
                    answer = await client.responses.create(model=MODEL, input=f"{number} " * 200)
                    assert answer.model_extra["store"] is True
                    ids.append(answer.id)
                await client.responses.retrieve(ids[-1])
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(ids[0])
                large = await client.responses.create(model=MODEL, input="word " * 900)
                assert large.model_extra["store"] is False
        stored_bytes(redis_server)
        with redis_server.client() as redis:
            for name in ("alice", "bob"):
                assert 2000 < redis.zscore(f"{PREFIX}b", name) <= 4000

    with_worker(redis_server.url, main, api_key_file=keys, responses_bytes_per_key=4000)


def test_responses_end_after_an_hour(redis_server: RedisServer) -> None:
    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with client_of(router) as client:
            old = await client.responses.create(model=MODEL, input="Hi")
            with redis_server.client() as redis:
                key = f"{PREFIX}:{old.id}"
                (of_holder,) = redis.scan_iter(f"{PREFIX}s:*")
                for each in (key, of_holder, f"{PREFIX}b"):
                    assert 0 < redis.pttl(each) <= TTL_S * 1000
                ((member, ends),) = redis.zrange(of_holder, 0, -1, withscores=True)
                # As it is an hour later.
                redis.pexpire(key, 0)
                redis.zadd(of_holder, {member: ends - TTL_S * 1000})
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model=MODEL, input="Hi", previous_response_id=old.id)
            await client.responses.create(model=MODEL, input="Hi")
            assert stored_bytes(redis_server) > 0  # and its count is right

    with_worker(redis_server.url, main)


def test_a_large_conversation_is_answered_but_not_stored(redis_server: RedisServer) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async with client_of(router) as client:
            short: Any = {"model": MODEL, "extra_body": {"truncate_prompt_tokens": 64}}
            text = "a " * (MAX_STORED_BYTES // 2)
            answer = await client.responses.create(**short, input=text)
            assert answer.output_text == TEXT
            assert answer.model_extra["store"] is False
            # The request alone would fit, but not the answer with it.
            text = "a" * (MAX_STORED_BYTES - 100)
            answer = await client.responses.create(**short, input=text)
            assert answer.model_extra["store"] is False
            worker.generated.clear()
            with pytest.raises(openai.BadRequestError, match="store must be false") as caught:
                await client.responses.create(**short, input=text + text, store=True)
            assert caught.value.param == "store"
            assert not worker.generated
            assert stored_bytes(redis_server) == 0

    with_worker(redis_server.url, main)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_do_not_need_the_store(redis_server: RedisServer, stream: bool) -> None:
    async def main(router: LiveRouter, worker: FakeDecodeWorker, own: RedisServer) -> None:
        async with client_of(router) as client:

            async def create(**fields: Any) -> Any:
                answer: Any = await client.responses.create(
                    model=MODEL, input="Hi", stream=stream, **fields
                )
                if not stream:
                    return answer
                *_, last = [event async for event in answer]
                return last.response

            kept = await create()
            assert kept.model_extra["store"] is True
            with redis_server.client() as redis:  # the cluster's has none of it
                assert not redis.keys(f"{PREFIX}:*")
            own.freeze()
            unkept = await create()
            assert unkept.output_text == TEXT
            assert unkept.model_extra["store"] is False
            with pytest.raises(openai.InternalServerError) as caught:
                await create(previous_response_id=kept.id)
            assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
            own.thaw()
            assert (await create(previous_response_id=kept.id)).output_text == TEXT

    with RedisServer() as own:

        async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
            await main(router, worker, own)

        with_worker(redis_server.url, scenario, responses_redis_url=own.url)


def test_nothing_is_stored_where_there_is_no_room(redis_server: RedisServer) -> None:
    async def main(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with client_of(router) as client:
            answer = await client.responses.create(model=MODEL, input="Hi")
            assert (answer.output_text, answer.model_extra["store"]) == (TEXT, False)

    with_worker(redis_server.url, main, responses_bytes=0)


def test_a_wrong_url_ends_the_start(redis_server: RedisServer) -> None:
    async def main() -> None:
        async with live_router(redis_server.url, responses_redis_url="unix:///nowhere"):
            pass

    with pytest.raises(RedisSetupError, match="PAGEWIRE_RESPONSES_REDIS_URL"):
        asyncio.run(main())
