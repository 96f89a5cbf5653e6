import asyncio
import gc
import socket
import time

import pytest
import uvloop

from pagewire.shared.base.errors import RedisSetupError
from pagewire.shared.cluster.redis_client import cluster_tag, connect_redis
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.redis_server import RedisServer
from pagewire.tests.support.worker_records import client_of


def test_replies_to_abandoned_calls_reach_nobody_else(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with client_of(redis_server.url) as client:
            for number in range(20):
                await client.set(f"key-{number}", number)
            redis_server.freeze()
            calls = [asyncio.create_task(client.get(f"key-{n}")) for n in range(10)]
            await asyncio.sleep(0.05)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            redis_server.thaw()
            answers = await asyncio.gather(*(client.get(f"key-{n}") for n in range(10, 20)))
            assert answers == [str(n).encode() for n in range(10, 20)]

    run_async(scenario())


def test_a_wrong_or_missing_password_is_one_line() -> None:
    with RedisServer(password="right-one") as server:
        for url in (
            server.url.replace("right-one", "wrong-one"),
            server.url.replace(":right-one@", ""),
        ):
            with pytest.raises(RedisSetupError, match="password") as caught:
                run_async(connect_redis(url, 2.0))
            assert "\n" not in str(caught.value)
            assert "wrong-one" not in str(caught.value)

        async def scenario() -> None:
            async with client_of(server.url) as client:
                assert await client.ping()

        run_async(scenario())


def test_a_name_that_is_looked_up_too_slowly_leaves_no_error() -> None:
    reported: list[object] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, found: reported.append(found))
        for timeout in (0.0002, 0.0005, 0.001):
            with pytest.raises(RedisSetupError, match="nowhere"):
                await connect_redis("redis://nowhere.invalid:6379/0", timeout)
        await asyncio.sleep(0.5)
        gc.collect()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
    assert reported == []


@pytest.mark.parametrize(
    "url",
    ["redis://:hidden-pw@127.0.0.1:1/0", "unix://:hidden-pw@/nonexistent/redis.sock"],
    ids=["port", "socket"],
)
def test_a_redis_that_is_not_there_is_one_line(url: str) -> None:
    with pytest.raises(RedisSetupError, match="PAGEWIRE_REDIS_URL") as caught:
        run_async(connect_redis(url, 2.0))
    assert "\n" not in str(caught.value)
    assert "hidden-pw" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:6379", "nonsense", "", "redis://127.0.0.1:port/0", "redis://h:1/db"]
)
def test_urls_that_make_no_sense_are_one_line(url: str) -> None:
    with pytest.raises(RedisSetupError) as caught:
        run_async(connect_redis(url, 2.0))
    assert "\n" not in str(caught.value)


def test_a_redis_that_does_not_answer_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        start = time.monotonic()
        with pytest.raises(RedisSetupError, match="answer"):
            run_async(connect_redis(f"redis://127.0.0.1:{mute.getsockname()[1]}/0", 0.3))
        assert time.monotonic() - start < 10


def test_a_server_that_is_not_redis_is_reported() -> None:
    async def scenario() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(RedisSetupError, match="cannot be reached"):
                await connect_redis(f"redis://127.0.0.1:{port}/0", 1.0)

    run_async(scenario())


def test_cluster_tags_distinguish_secrets_and_do_not_reveal_them() -> None:
    assert cluster_tag("a") == cluster_tag("a") != cluster_tag("b")
    assert len(cluster_tag("a")) == 8
