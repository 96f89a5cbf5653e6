"""Where in a step each layer group of its blocks is final."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.shared.engine.build import build_engine
from pagewire.shared.engine.execution.block_mover import BlockMove, BlockMover
from pagewire.shared.engine.execution.cuda_graph import DeviceEvent, GraphPool
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.scheduling.sequence import Sequence, new_sequence
from pagewire.shared.engine.scheduling.step import StepPlan
from pagewire.shared.kv.kv_layout import CachedToken, KvLayout
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.kv.storage import allocate_pool
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.settings.config import EngineSettings, load_settings
from pagewire.tests.support.padded_steps import run_padded

PROMPT = [n % 1000 + 10 for n in range(1000)]  # longer than what is captured as a CUDA graph
LAYERS = 4  # of the demo model; each is a layer group


class Plans:
    """Notes the number of the plan that was launched last."""

    def __init__(self) -> None:
        self.last = 0

    def before_launch(self, plan: StepPlan) -> None:
        pass

    def after_launch(self, plan: StepPlan | None) -> bool:
        if plan is not None:
            self.last = plan.number
        return False

    def poll(self) -> bool:
        return False


class Engine:
    """An engine of the demo model."""

    def __init__(self, **settings: Any) -> None:
        built = build_engine(load_settings(EngineSettings, {"model": "demo", **settings}))
        self.runner, self.plans = built.runner, Plans()
        self.core = built.make_core(self.plans)

    def launch(self, prompt: list[int], *, prefill_only: bool = False) -> Sequence:
        """Launch a step that computes the prompt."""
        spec = RequestSpec(temperature=0, max_tokens=2, ignore_eos=True)
        sequence = new_sequence(f"s{len(prompt)}", prompt, spec, ())
        sequence.prefill_only = prefill_only
        self.core.sequences.add(sequence)
        self.core.step(wait=False)
        return sequence


class Hooked:
    """A layer, and something that happens before it."""

    def __init__(self, engine: Engine, index: int, before: Any) -> None:
        layers: list[Any] = cast("DecoderModel", engine.runner.model).layers
        self._layer, self._before = layers[index], before
        layers[index] = self

    def forward(self, *args: Any) -> Any:
        self._before()
        return self._layer.forward(*args)


@pytest.fixture
def cpu() -> Engine:
    return Engine(device="cpu", num_blocks=128)


@pytest.mark.parametrize("padded", [False, True])
def test_steps_record_the_ends_of_the_layer_groups_that_they_export(
    cpu: Engine, padded: bool
) -> None:
    runner, plans = cpu.runner, cpu.plans
    if padded:
        run_padded(runner, 64)
    cpu.launch(PROMPT[:50])
    assert not runner.has_group_events(plans.last)
    sequence = cpu.launch(PROMPT[:60], prefill_only=True)  # next to a decode row
    assert runner.has_group_events(plans.last)
    while not sequence.is_finished:
        cpu.core.step()
    cpu.launch(PROMPT[:40])
    assert not runner.has_group_events(plans.last)  # nothing is exported


def test_a_step_that_failed_to_launch_records_no_group_events(
    cpu: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("device on fire")

    cpu.launch(PROMPT[:50])
    Hooked(cpu, 2, fail)
    sequence = cpu.launch(PROMPT[:60], prefill_only=True)
    assert sequence.is_finished
    assert not any(cpu.runner.has_group_events(plan) for plan in range(4))


@pytest.fixture
def clean_gpu() -> Iterator[None]:
    """An engine sizes its pool by what other engines of the process have left."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(*, cuda_graphs: bool = True) -> Engine:
    return Engine(
        device="cuda",
        num_blocks=4096,
        max_num_batched_tokens=1024,
        cuda_graphs=cuda_graphs,
    )


class Packed:
    """Staging for the prompt's blocks, by layer group, made before the step is launched."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        self._runner = runner
        size = packed_bytes(runner.layout, num_blocks, 1)
        self._staging = torch.zeros((LAYERS, size), dtype=torch.uint8, device="cuda")
        self.pack(list(range(num_blocks)), 0, 0)  # compiles, allocates

    def pack(self, blocks: list[int], group: int, after: int) -> None:
        groups = range(group, group + 1)
        move = self._runner.pack(BlockMove(blocks, groups, self._staging[group], 1), after)
        deadline = time.monotonic() + 30
        while not move.poll():
            assert time.monotonic() < deadline

    def assert_holds(self, blocks: list[int], group: int) -> None:
        pool = self._runner.kv_pool
        expected = pool[blocks, group]  # [N, 2, KH, BS, D]
        nbytes = len(blocks) * self._runner.layout.layer_group_bytes
        data = self._staging[group, :nbytes].view(pool.dtype)
        assert expected.any()
        assert torch.equal(data.view_as(expected), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("clean_gpu")
def test_a_layer_group_is_packed_while_later_layers_compute() -> None:
    engine = on_gpu(cuda_graphs=False)  # a replayed step does not call the hooked layer
    runner, plans = engine.runner, engine.plans
    packed = Packed(runner, len(PROMPT) // runner.block_size)
    engine.launch(PROMPT[::-1])  # compiles what is left
    while engine.core.has_work:
        engine.core.step()
    Hooked(engine, 2, lambda: torch.cuda._sleep(2_000_000_000))  # a second
    sequence = engine.launch(PROMPT, prefill_only=True)
    blocks = sequence.tables[0].block_ids[: len(PROMPT) // runner.block_size]
    assert runner.has_group_events(plans.last)
    for group in range(2):
        packed.pack(blocks, group, plans.last)
    assert not torch.cuda.current_stream().query()  # the step goes on
    for group in range(2, LAYERS):
        packed.pack(blocks, group, plans.last)
    torch.cuda.synchronize()
    for group in range(LAYERS):
        packed.assert_holds(blocks, group)


@pytest.mark.gpu
@pytest.mark.usefixtures("clean_gpu")
def test_replayed_steps_record_group_events_too() -> None:
    engine = on_gpu()
    runner, plans = engine.runner, engine.plans
    packed = Packed(runner, 100 // runner.block_size)
    assert runner.prefill_graphs is not None
    for start, length in (0, 100), (300, 105):
        sequence = engine.launch(PROMPT[start : start + length], prefill_only=True)
        blocks = sequence.tables[0].block_ids[: 100 // runner.block_size]
        assert runner.has_group_events(plans.last)
        for group in range(LAYERS):
            packed.pack(blocks, group, plans.last)
        torch.cuda.synchronize()
        for group in range(LAYERS):
            packed.assert_holds(blocks, group)


@pytest.mark.gpu
def test_an_event_in_a_graph_is_recorded_again_by_each_replay() -> None:
    device = torch.device("cuda")
    layout = KvLayout.of([None] * LAYERS, CachedToken(2, 2, 16), 16, "float32")
    pool = allocate_pool(layout, 4, device)
    mover = BlockMover(load_ops("auto", "cuda"), pool, layout)
    value = torch.zeros((), device=device)
    events: list[DeviceEvent] = []

    def step() -> torch.Tensor:
        events.clear()
        torch.cuda._sleep(100_000_000)
        pool.copy_(value)
        events.append(mover.record_event(in_graph=True))
        torch.cuda._sleep(1_000_000_000)  # half a second
        return pool

    graph, _ = GraphPool(device).capture(step)
    staging = torch.zeros(packed_bytes(layout, 4), dtype=torch.uint8, device=device)
    blocks = BlockMove([0, 1, 2, 3], layout.layer_groups, staging, 1)
    mover.pack(blocks, mover.record_event())  # compiles, allocates
    torch.cuda.synchronize()
    for number in (5.0, 6.0):
        value.fill_(number)
        graph.replay()
        move = mover.pack(blocks, events[0])
        deadline = time.monotonic() + 30
        while not move.poll():
            assert time.monotonic() < deadline
        assert not torch.cuda.current_stream().query()  # the step goes on
        torch.cuda.synchronize()
        packed = staging[: pool.nbytes].view(pool.dtype)
        assert torch.equal(packed, torch.full_like(packed, number))
