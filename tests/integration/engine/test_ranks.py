"""One model over several ranks: the same answers as in one process, and the loss of a rank."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from pagewire import LLM, SamplingParams
from pagewire.shared.base.errors import BlamelessRankError, ConfigError, RankError
from pagewire.shared.engine.build import build_engine
from pagewire.shared.engine.choices import check_ranks, choose_device
from pagewire.shared.engine.ranks.executor import RanksExecutor
from pagewire.shared.engine.ranks.group import END_S, PROGRAM, RankGroup, start_ranks
from pagewire.shared.engine.ranks.messages import Begin, Failed, RankPipe, encode
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.settings.config import LLMSettings
from pagewire.tests.support.aio import wait_until
from pagewire.tests.support.ranked_prompts import ASKED, PROMPTS, TIGHT
from pagewire.tests.support.tiny_models import VOCAB, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)


def make_llm(ranks: int = 1, **settings: Any) -> LLM:
    made = LLM("demo", device="cpu", dtype="float32", tensor_parallel_size=ranks, **settings)
    assert made.engine.ranks.count == ranks
    return made


@pytest.fixture(scope="module")
def one(one_thread: None) -> LLM:
    return make_llm(**TIGHT)


@pytest.fixture(scope="module")
def two(one_thread: None) -> Iterator[LLM]:
    llm = make_llm(2, **TIGHT)
    yield llm
    llm.engine.ranks.close()


def test_a_rank_has_its_part_of_the_kv_cache(one: LLM, two: LLM) -> None:
    assert 2 * two.engine.layout.block_bytes == one.engine.layout.block_bytes
    assert two.engine.layout.ranks == 2


def test_answers_of_all_kinds_are_those_of_one_process(one: LLM, two: LLM) -> None:
    expected = one.generate(PROMPTS, ASKED)
    found = two.generate(PROMPTS, ASKED)
    for ours, theirs in zip(found, expected, strict=True):
        assert [each.token_ids for each in ours.outputs] == [
            each.token_ids for each in theirs.outputs
        ]
    assert two.core.scheduler.table.num_preemptions > 0
    digits = found[4].text
    assert len(digits) == 20 and digits.isdigit()
    scored, other_scored = found[5].outputs[0].logprobs, expected[5].outputs[0].logprobs
    assert scored and other_scored
    for position, other in zip(scored, other_scored, strict=True):
        assert position.keys() == other.keys()
        for token, each in position.items():
            assert each.logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_cached_prompts_and_embeddings(one: LLM, two: LLM) -> None:
    for llm in (one, two):
        llm.generate([PROMPTS[3]], ASKED[0])
    [expected], [found] = (llm.generate([PROMPTS[3]], ASKED[0]) for llm in (one, two))
    assert found.cached_tokens == expected.cached_tokens > 0
    assert found.token_ids == expected.token_ids
    for ours, theirs in zip(two.embed(PROMPTS[1:3]), one.embed(PROMPTS[1:3]), strict=True):
        assert list(ours.embedding) == pytest.approx(list(theirs.embedding), abs=1e-5)


def test_four_ranks_of_another_model(tmp_path: Path) -> None:
    """The demo model's heads cannot be shared by four."""
    write_tiny_model(tmp_path, "llama", "groups-of-4-tied-odd-vocabulary")
    prompts = [[n * 7 % VOCAB for n in range(length)] for length in (3, 20, 45)]
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64}
    settings["max_num_batched_tokens"] = 16
    expected = LLM(tmp_path, **settings).generate(prompts, ASKED[:2] + ASKED[3:4])
    four = LLM(tmp_path, tensor_parallel_size=4, **settings)
    found = four.generate(prompts, ASKED[:2] + ASKED[3:4])
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    four.engine.ranks.close()


@pytest.mark.parametrize("at_work", [True, False], ids=["at-work", "idle"])
def test_a_killed_rank_is_named(at_work: bool) -> None:
    llm = make_llm(2)
    [rank] = llm.engine.ranks.processes
    if at_work:
        threading.Timer(0.5, rank.kill).start()
    else:
        rank.kill()
        rank.wait()
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        llm.generate(PROMPTS, LONG)
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        llm.generate(PROMPTS, LONG)


def test_a_stopped_rank_is_named_and_ended() -> None:
    llm = make_llm(2)
    [rank] = llm.engine.ranks.processes
    threading.Timer(0.5, rank.send_signal, [signal.SIGSTOP]).start()
    began_s = time.monotonic()
    with pytest.raises(RankError, match="rank 1 has not answered for 5 s"):
        llm.generate(PROMPTS, LONG)
    assert time.monotonic() - began_s < 20
    assert rank.poll() == -signal.SIGKILL


@pytest.mark.parametrize("in_step", [False, True], ids=["once", "twice"])
def test_ctrl_c(one: LLM, in_step: bool) -> None:
    """The first takes effect after the step, the second one at once."""
    llm = make_llm(2, **TIGHT)
    [rank] = llm.engine.ranks.processes
    if in_step:
        threading.Timer(0.5, rank.send_signal, [signal.SIGSTOP]).start()
        threading.Timer(2.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    threading.Timer(2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG)
    if in_step:
        with pytest.raises(RankError, match="rank 0 was interrupted in a step: make a new LLM"):
            llm.generate(PROMPTS, LONG)
        return
    [found], [expected] = (each.generate([PROMPTS[1]], ASKED[1]) for each in (llm, one))
    assert found.token_ids == expected.token_ids
    llm.engine.ranks.close()


@pytest.mark.parametrize(
    ("failure", "is_blameless"),
    [
        (Failed("MemoryError: ", is_blameless=True), True),
        (Failed("rank 0 has not answered for 600 s", missing=0), True),
        (Failed("RuntimeError: a kernel failed"), False),
    ],
)
def test_whom_a_ranks_report_blames(failure: Failed, is_blameless: bool) -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "60"])
    group = RankGroup(pipes=[RankPipe(ours, 1)], processes=[process])
    with theirs:
        theirs.sendall(encode(failure))
        with pytest.raises(RankError) as caught:
            group.reports()
    assert isinstance(caught.value, BlamelessRankError) == is_blameless


def test_memory_that_runs_out_on_rank_0_blames_nobody() -> None:
    llm = make_llm(2)
    executor = llm.core.executor
    assert isinstance(executor, RanksExecutor)
    executor.own = Mock(execute=Mock(side_effect=MemoryError))
    with pytest.raises(BlamelessRankError, match="rank 0: MemoryError"):
        llm.generate(PROMPTS, LONG)


def test_a_step_whose_kernels_have_missed_a_rank_ends_all() -> None:
    llm = make_llm(2)
    [rank] = llm.engine.ranks.processes
    executor = llm.core.executor
    assert isinstance(executor, RanksExecutor)
    missed = RankError("rank 1 has not come for 5 s", 1)
    executor.communicator = Mock(check=Mock(side_effect=[None, None, missed]))
    with pytest.raises(RankError, match="rank 1 has not come for 5 s"):
        llm.generate(PROMPTS, LONG)
    assert llm.core.stats.steps == 3
    assert rank.poll() == -signal.SIGKILL


def test_ranks_that_sample_different_tokens_end() -> None:
    llm = make_llm(2)
    asked = SamplingParams(temperature=1, seed=1, max_tokens=400, ignore_eos=True)
    outputs = llm.stream([PROMPTS[1]], asked)
    next(outputs)
    llm.engine.runner.state.parameters["seeds"].fill_(5)  # on rank 0 alone
    with pytest.raises(RankError, match="rank 1 has sampled other tokens than rank 0 within the"):
        list(outputs)


def start(**settings: Any) -> RankGroup:
    return start_ranks(LLMSettings(model="demo", tensor_parallel_size=2, device="cpu", **settings))


def test_a_rank_that_cannot_load_says_why() -> None:
    """Here the ranks are started with what rank 0 would refuse before."""
    group = start(max_model_len=100_000)
    with pytest.raises(ConfigError, match=r"rank 1: --max-model-len 100000 is more than"):
        group.fewest_blocks(10)
    assert [process.poll() for process in group.processes] != [None]


def test_a_rank_that_is_lost_while_rank_0_loads_is_noticed() -> None:
    """In the next stage of loading, or with the next line about it."""
    stages: list[str] = []

    def kill_ranks(stage: str) -> None:
        stages.append(stage)
        for child in psutil.Process().children():
            if PROGRAM in child.cmdline():
                child.kill()
                wait_until(lambda: not is_alive(child.pid), 10, lambda: "it lives")  # noqa: B023

    settings = LLMSettings(model="demo", tensor_parallel_size=2, device="cpu")
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        build_engine(settings, progress=kill_ranks)
    assert stages == ["reading the model's configuration"]


def test_a_rank_that_has_loaded_first_is_not_forgotten() -> None:
    group = start(num_blocks=300)
    wait_until(group.has_news, 60, lambda: "rank 1 has not loaded")
    group.look()
    assert not group.has_news()
    assert group.fewest_blocks(1000) == 300
    group.close()


def test_all_ranks_take_as_many_blocks_as_fit_on_each() -> None:
    group = start(num_blocks=300)
    assert group.fewest_blocks(1000) == 300
    group.begin(Begin(300, 100, 1))
    group.wait_until_ready()
    group.close()
    assert [process.poll() for process in group.processes] == [0]


def test_signals_do_not_end_a_rank_that_starts() -> None:
    group = start(num_blocks=300)
    [rank] = group.processes
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        rank.send_signal(number)
    assert group.fewest_blocks(1000) == 300
    group.close()


def test_a_rank_that_still_loads_is_ended_at_once() -> None:
    group = start()
    began_s = time.monotonic()
    group.close()
    assert time.monotonic() - began_s < END_S
    assert [process.poll() for process in group.processes] == [-signal.SIGKILL]


def test_too_few_descriptors_for_ranks() -> None:
    """In a process of its own, since the limit is the process's."""
    command = [sys.executable, "-P", "-W", "error", "-c", FEW_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the processes of the ranks cannot be started: [Errno 24]" in done.stdout


FEW_DESCRIPTORS = """
import gc, os, resource
from pagewire.shared.base.errors import ConfigError
from pagewire.shared.engine.ranks.group import start_ranks
from pagewire.shared.settings.config import LLMSettings
settings = LLMSettings(model="demo", tensor_parallel_size=4, device="cpu")
before = len(os.listdir("/proc/self/fd"))
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
for room in range(0, 20, 4):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + room, most))
    try:
        start_ranks(settings)
    except ConfigError as exc:
        print(exc)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before, room
"""


def test_more_ranks_than_the_heads_allow() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(ConfigError, match="4 ranks cannot share 6 attention heads and 2 KV heads"):
        make_llm(4)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets torch say which GPUs there are, and which read each other's memory."""

    def install(*names: str, are_peers: bool = True) -> None:
        for name, value in (
            ("is_available", lambda: True),
            ("current_device", lambda: 0),
            ("device_count", lambda: len(names)),
            ("get_device_name", lambda index: names[index]),
            ("can_device_access_peer", lambda one, other: are_peers),
        ):
            monkeypatch.setattr(torch.cuda, name, value)

    return install


@pytest.mark.parametrize(
    ("names", "are_peers", "problem"),
    [
        (["H200"], True, "needs 2 GPUs, and 1 can be used"),
        (["H200", "L4", "H200"], True, "needs GPUs of one type, .* are H200 and L4"),
        (["L4", "L4"], False, "GPU 0 cannot read GPU 1's"),
    ],
)
def test_what_is_missing_on_gpus(
    names: list[str], are_peers: bool, problem: str, gpus: Callable[..., None]
) -> None:
    gpus(*names, are_peers=are_peers)
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size 2 .*{problem}"):
        check_ranks(LLMSettings(tensor_parallel_size=2, device="cuda"))


def test_each_rank_has_a_gpu_unless_they_share_one(gpus: Callable[..., None]) -> None:
    gpus("H200", "H200")
    settings = LLMSettings(tensor_parallel_size=2, device="cuda")
    check_ranks(settings)
    assert [choose_device(settings, rank).index for rank in range(2)] == [0, 1]
    gpus("L4")
    shared = LLMSettings(tensor_parallel_size=2, device="cuda", ranks_share_gpu=True)
    check_ranks(shared)
    assert [choose_device(shared, rank).index for rank in range(2)] == [0, 0]


def test_transformers_code_runs_on_one_rank() -> None:
    with pytest.raises(ConfigError, match="transformers' code runs on one rank"):
        make_llm(2, model_impl="transformers")


WITH_REVISION = """
from pagewire import LLM, SamplingParams
llm = LLM("someone/demo", revision="v1.0", device="cpu", tensor_parallel_size=2)
print(len(llm.generate(["Lambda"], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids))
"""


def test_ranks_of_a_models_revision(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--someone--demo"
    shutil.copytree(demo_model_path(), cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "v1.0").write_text(COMMIT)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-P", "-c", WITH_REVISION]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout == "4\n", done.stderr


WAITING = """
import sys
from pagewire import LLM
llm = LLM("demo", device="cpu", tensor_parallel_size=2)
print(*(process.pid for process in llm.engine.ranks.processes), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [False, True], ids=["ends", "is-killed"])
def test_ranks_end_with_the_program(is_killed: bool) -> None:
    command = [sys.executable, "-P", "-c", WAITING]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdin is not None and program.stdout is not None
    with program:
        ranks = [int(pid) for pid in program.stdout.readline().split()]
        assert ranks and all(psutil.pid_exists(pid) for pid in ranks)
        if is_killed:
            program.kill()
        program.stdin.close()
        program.wait(30)
    wait_until(lambda: not any(is_alive(pid) for pid in ranks), 10, lambda: f"{ranks} live")


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_terminals_signals_do_not_reach_ranks() -> None:
    llm = make_llm(2)
    [rank] = llm.engine.ranks.processes
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(rank.pid, number)
    assert len(llm.generate([PROMPTS[0]], ASKED[0])[0].token_ids) == 24
    llm.engine.ranks.close()
    assert rank.poll() == 0
