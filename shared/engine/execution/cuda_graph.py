"""Steps captured as CUDA graphs: decode batches, and steps with chunks of prompts.

A graph reads everything that changes from step to step from device memory, so that a replay needs
one small copy. For short decode steps, and for some hundred tokens of decode rows and chunks
together, the host would need longer to launch the kernels one by one than the device needs to run
them.

A step is two graphs. The forward leaves the rows that sample in static memory (`StaticRows`).
Sampling reads them there, at once or when masks have come, in one of two variants
(sampling_stage.py). Its graphs are captured for numbers of rows, whatever step has left them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import torch

from pagewire.kernels.prefill_tiles import LONGEST_UNSPLIT
from pagewire.shared.engine.execution.builds import BUILDS
from pagewire.shared.engine.execution.sampling_stage import Sampled, StaticRows
from pagewire.shared.engine.execution.step_inputs import HostStep, StepInputs, StepShape
from pagewire.shared.engine.scheduling.step import PrefillChunk

# Tokens of captured steps with chunks. There is none between 384 and 512, and above 640 all are
# multiples of 128, because cuBLAS is slow at many sizes in between: with an 8B shape, products of
# 448 rows take 1.4 times as long as those of 512 (docs/notes/engine.md).
STEP_TOKENS = (16, 32, 64, 128, 192, 256, 320, 384, 512, 576, 640, 768, 896, 1024)
# The largest captured steps: of one chunk, and of several chunks or with decode rows. With more
# tokens, the device is slower than a host whose other threads are idle. After a pause, as prefill
# workers have them, launching the kernels for 1k tokens takes up to twice as long.
LARGEST_CHUNK, LARGEST_STEP = 1024, 768
# One chunk of up to this many tokens has two graphs, because to split its context gains only where
# that is long. Larger steps are rarely split.
LARGEST_SPLIT_CHUNK = 512
# Limits on the decode rows of captured steps with several chunks, or with decode rows. A step with
# fewer rows has room for more tokens of chunks; a missing row costs its programs in decode
# attention, and its part of the last layer and of the logits. Decode attention chooses its splits
# by the limit, so there are small limits, too. 320 and 384 keep the last layer's part small.
STEP_ROWS = (0, 4, 8, 16, 32, 64, 128, 256, 320, 384, 512)
MOST_CHUNKS = 8  # of a captured step

ResultT = TypeVar("ResultT")
Progress = Callable[[str], None]

# An event in the work that has been launched on a device; None on a CPU, where work runs at once.
DeviceEvent = torch.cuda.Event | None


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, up to `max_num_seqs`.

    Small ones are dense. Above 256 they are those of `STEP_TOKENS`, then multiples of 128.
    """
    sizes = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, *range(48, 257, 16)]
    sizes += [*(size for size in STEP_TOKENS if size > 256), *range(1152, max_num_seqs, 128)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def step_shapes(max_tokens: int, max_num_seqs: int, max_chunk: int) -> list[StepShape]:
    """Return the shapes of steps with prefill chunks to capture; a step takes the first that fits.

    Args:
        max_tokens: most tokens of a step, decode rows included.
        max_num_seqs: most sequences of a step.
        max_chunk: most tokens of a chunk.
    """
    one_chunk = [
        StepShape(0, size, 1, max_context)
        for max_context, largest in ((LONGEST_UNSPLIT, LARGEST_SPLIT_CHUNK), (None, LARGEST_CHUNK))
        for size in _sizes_for(min(max_tokens, max_chunk))
        if size <= largest
    ]
    if max_num_seqs == 1:
        return one_chunk
    several = [
        StepShape(rows, size, min(MOST_CHUNKS, max_num_seqs))
        for size in _sizes_for(max_tokens)
        if size <= LARGEST_STEP
        for rows in _row_limits(min(STEP_ROWS[-1], max_num_seqs, size))
    ]
    return one_chunk + several


def _sizes_for(max_tokens: int) -> list[int]:
    """Return the sizes of `STEP_TOKENS` that steps of up to `max_tokens` need."""
    return list(STEP_TOKENS[: bisect.bisect_left(STEP_TOKENS, max_tokens) + 1])


def _row_limits(most: int) -> list[int]:
    """Return the limits on decode rows up to `most`, this one included."""
    return [rows for rows in STEP_ROWS if rows < most] + [most]


@lru_cache(maxsize=16)
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures on a device: cuBLAS keeps a workspace for each stream.

    Its priority is above that of a branch (see `attend`) and of steps launched eagerly: they get
    free SMs after it. Block moves have the same priority.
    """
    return torch.cuda.Stream(device, priority=-1)


def launch_graph(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Launch a graph on a stream; `graph.replay` would need that stream to be the current one.

    To set a stream and to restore the one before takes the host as long as the launch.

    Raises:
        RuntimeError: CUDA refuses.
    """
    from cuda.bindings import runtime  # for Linux only

    (error,) = runtime.cudaGraphLaunch(graph.raw_cuda_graph_exec(), stream.cuda_stream)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaGraphLaunch: {error.name}")


class GraphPool:
    """Captures graphs that share memory, since only one of them runs at a time.

    Attributes:
        device: where they run.
        progress: to be called with a name of each step that has been captured.
    """

    def __init__(self, device: torch.device, progress: Progress = lambda _name: None) -> None:
        self.device, self.progress = device, progress
        # A capture that needs memory cannot give back what the allocator has cached. Once is
        # enough: `torch.cuda.graph` does it, and waits for the device, at each capture.
        torch.cuda.empty_cache()
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def capture(
        self, step: Callable[[], ResultT], name: str = "a step"
    ) -> tuple[torch.cuda.CUDAGraph, ResultT]:
        """Return a graph of a step and the tensors that hold its result after each replay.

        The step need not have run before: the capture's mode permits compiling and loading kernels.
        But memory that kernels allocate once for all launches must already exist, because it would
        otherwise belong to the graph.
        """
        graph = torch.cuda.CUDAGraph()
        with BUILDS.timed("captured", name), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                result = step()
            finally:
                graph.capture_end()
        return graph, result


Sample = Callable[[int, bool], Sampled]  # of the first static rows, shaped or not
# Forward of a step with prefill chunks; returns the events that each replay records again.
ForwardChunks = Callable[[StepInputs], list[DeviceEvent]]


@dataclass(slots=True)
class SamplingGraphs:
    """Captured sampling of static rows, by their number.

    Attributes:
        sizes: captured numbers of rows, ascending; rows between two of them are padding rows.
        rows: what a forward has left.
    """

    sizes: list[int]
    rows: StaticRows
    _graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Sampled]] = field(
        default_factory=dict
    )

    @classmethod
    def capture(
        cls, sample: Sample, sizes: list[int], rows: StaticRows, pool: GraphPool
    ) -> SamplingGraphs:
        """Capture both variants for each number of rows, the largest first."""
        graphs = cls(sorted(sizes), rows)
        for size in reversed(graphs.sizes):
            name = f"sampling of {size}"
            for shaped in (False, True):
                step = partial(sample, size, shaped)
                graphs._graphs[size, shaped] = pool.capture(step, name)
            pool.progress(name)
        return graphs

    def sample(self, num_rows: int, shaped: bool) -> Sampled:
        """Sample the first rows that the last forward has left; those after them are padding."""
        if not num_rows:
            return Sampled(self.rows.slots[:0], self.rows.logits[:0])
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        graph, sampled = self._graphs[size, shaped]
        graph.replay()
        return sampled.first(num_rows)


@dataclass(slots=True)
class DecodeGraphs:
    """Captured decode steps, by batch size.

    A batch between two captured sizes is padded with the padding device slot.

    Attributes:
        sizes: captured batch sizes, ascending.
        slots: [largest] int64, device slots, read by every graph.
    """

    sizes: list[int]
    slots: torch.Tensor
    padding_slot: int
    _graphs: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)
    _current: list[int] = field(default_factory=list)

    @classmethod
    def capture(
        cls,
        forward: Callable[[torch.Tensor], object],
        sizes: list[int],
        padding_slot: int,
        pool: GraphPool,
    ) -> DecodeGraphs:
        """Capture a step at each size, largest first so that memory is shared."""
        slots = torch.full((max(sizes),), padding_slot, dtype=torch.int64, device=pool.device)
        graphs = cls(sorted(sizes), slots, padding_slot)
        for size in reversed(graphs.sizes):
            name = f"decode of {size}"
            graphs._graphs[size], _ = pool.capture(partial(forward, slots[:size]), name)
            pool.progress(name)
        graphs._current = [padding_slot] * max(sizes)
        return graphs

    def forward(self, slots: list[int]) -> None:
        """Run the forward of a decode step of these device slots."""
        size = self.sizes[bisect.bisect_left(self.sizes, len(slots))]
        padded = slots + [self.padding_slot] * (size - len(slots))
        if padded != self._current[:size]:
            _copy(torch.tensor(padded, dtype=torch.int64), self.slots[:size])
            self._current[:size] = padded
        self._graphs[size].replay()


@dataclass(slots=True)
class PrefillGraphs:
    """Captured steps with prefill chunks, alone or with decode rows, by shape.

    Attributes:
        shapes: the captured shapes; the first one that a step fits into is used.
    """

    shapes: list[StepShape]
    padding_slot: int
    _inputs: dict[StepShape, StepInputs] = field(default_factory=dict)
    _graphs: dict[StepShape, torch.cuda.CUDAGraph] = field(default_factory=dict)
    _events: dict[StepShape, list[DeviceEvent]] = field(default_factory=dict)

    @classmethod
    def capture(
        cls,
        forward: ForwardChunks,
        shapes: list[StepShape],
        block_size: int,
        padding_slot: int,
        num_groups: int,
        pool: GraphPool,
    ) -> PrefillGraphs:
        """Capture a forward at each shape."""
        graphs = cls(shapes, padding_slot)
        empty = HostStep([], [], block_size, np.zeros((0, num_groups, 0), np.int64))
        for shape in reversed(shapes):
            inputs = StepInputs.build_padded(empty, shape, padding_slot).to(pool.device)
            graphs._inputs[shape] = inputs
            rows = f", up to {shape.num_decodes} decode rows" if shape.num_decodes else ""
            context = "" if shape.max_context is None else f", context up to {shape.max_context}"
            name = f"{shape.num_tokens} tokens{rows}, chunks up to {shape.num_chunks}{context}"
            step = partial(forward, inputs)
            graphs._graphs[shape], graphs._events[shape] = pool.capture(step, name)
            pool.progress(name)
        return graphs

    def shape_of(self, num_decodes: int, chunks: list[PrefillChunk]) -> StepShape | None:
        """Return the captured shape for a step, or None if the step is launched eagerly."""
        if any(chunk.reads_hidden_states for chunk in chunks):
            return None  # a graph leaves only logits
        tokens = num_decodes + sum(chunk.length for chunk in chunks)
        samples = num_decodes + sum(chunk.samples for chunk in chunks)
        context = max((chunk.end for chunk in chunks), default=0)
        for shape in self.shapes:
            if (
                num_decodes <= shape.num_decodes
                and samples <= shape.num_samples
                and tokens <= shape.num_tokens
                and len(chunks) <= shape.num_chunks
                and (shape.max_context is None or context <= shape.max_context)
            ):
                return shape
        return None

    def events_of(self, shape: StepShape) -> list[DeviceEvent]:
        """Return the events that a replay records."""
        return self._events[shape]

    def forward(self, step: HostStep, shape: StepShape) -> None:
        """Run the forward of a step that this shape has room for."""
        inputs = StepInputs.build_padded(step, shape, self.padding_slot)
        _copy(inputs.buffer, self._inputs[shape].buffer)
        self._graphs[shape].replay()


def _copy(host: torch.Tensor, target: torch.Tensor) -> None:
    """Launch a copy from the host."""
    source = host.pin_memory() if target.is_cuda else host
    target.copy_(source, non_blocking=True)
