"""Which steps are captured as CUDA graphs, and which of them a step takes."""

from __future__ import annotations

import pytest

from pagewire.shared.engine.execution.cuda_graph import PrefillGraphs, batch_buckets, step_shapes
from pagewire.shared.engine.execution.step_inputs import StepShape
from pagewire.shared.engine.scheduling.step import PrefillChunk


def chunks(*lengths: int) -> list[PrefillChunk]:
    return [
        PrefillChunk(slot, 0, [7] * length, samples=True) for slot, length in enumerate(lengths)
    ]


def graphs(max_tokens: int = 2048, max_num_seqs: int = 512) -> PrefillGraphs:
    return PrefillGraphs(step_shapes(max_tokens, max_num_seqs, 8192), max_num_seqs)


@pytest.mark.parametrize(
    ("decodes", "lengths", "shape"),
    [
        (0, [1], StepShape(0, 16, 1, 2048)),
        (0, [512], StepShape(0, 512, 1, 2048)),
        (0, [1000], StepShape(0, 1024, 1)),
        (0, [100, 28], StepShape(0, 128, 8)),
        (0, [500, 268], StepShape(0, 768, 8)),
        (1, [1], StepShape(4, 16, 8)),
        (5, [100, 23], StepShape(8, 128, 8)),
        (5, [100, 24], StepShape(8, 192, 8)),
        (63, [449], StepShape(64, 512, 8)),
        (64, [448], StepShape(128, 512, 8)),
        (65, [448], StepShape(128, 576, 8)),
        (250, [262], StepShape(256, 512, 8)),
        (255, [57], StepShape(256, 320, 8)),
        (256, [56], StepShape(320, 320, 8)),
        (257, [255], StepShape(320, 512, 8)),
        (384, [128], StepShape(512, 512, 8)),
        (384, [129], StepShape(512, 576, 8)),
    ],
)
def test_a_step_takes_the_smallest_shape_that_holds_it(
    decodes: int, lengths: list[int], shape: StepShape
) -> None:
    assert graphs().shape_of(decodes, chunks(*lengths)) == shape


def test_a_step_on_a_longer_context_takes_a_shape_for_any() -> None:
    for end, max_context in ((2048, 2048), (2049, None), (100_000, None)):
        chunk = PrefillChunk(0, end - 100, [7] * 100, samples=True)
        assert graphs().shape_of(0, [chunk]) == StepShape(0, 128, 1, max_context)


@pytest.mark.parametrize(
    ("decodes", "lengths"), [(0, [1025]), (0, [500, 269]), (1, [768]), (8, [1] * 9), (513, [8])]
)
def test_larger_steps_are_launched(decodes: int, lengths: list[int]) -> None:
    assert graphs().shape_of(decodes, chunks(*lengths)) is None


def test_chunks_that_sample_nothing_take_no_row() -> None:
    begun = PrefillChunk(0, 0, [7] * 100, samples=False)
    assert graphs().shape_of(64, [begun]) == StepShape(64, 192, 8)
    assert graphs().shape_of(64, [begun, *chunks(20)]) == StepShape(128, 192, 8)


def test_steps_whose_hidden_states_are_wanted_are_launched() -> None:
    scored = PrefillChunk(0, 0, [7, 7], samples=True, scored=[7])
    pooled = PrefillChunk(0, 0, [7, 7], samples=False, pooling="mean")
    for chunk in (scored, pooled):
        assert graphs().shape_of(0, [chunk]) is None
        assert graphs().shape_of(3, [chunk]) is None


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 100, 256, 600])
@pytest.mark.parametrize("max_tokens", [16, 100, 512, 8192])
def test_batches_have_shapes_of_their_size(max_tokens: int, max_num_seqs: int) -> None:
    shapes = step_shapes(max_tokens, max_num_seqs, max_tokens)
    assert len(shapes) == len(set(shapes))
    assert all(shape.num_decodes <= shape.num_tokens for shape in shapes)
    assert max(shape.num_decodes for shape in shapes) <= max_num_seqs
    assert max(shape.num_chunks for shape in shapes) <= max_num_seqs
    found = graphs(max_tokens, max_num_seqs)
    for decodes in range(max_num_seqs):  # each chunk's sequence has a device slot, too
        for num_chunks in range(1, 1 + min(8, max_num_seqs - decodes)):
            shape = found.shape_of(decodes, chunks(*[2] * num_chunks))
            tokens = decodes + 2 * num_chunks
            if tokens <= max_tokens and decodes + num_chunks <= 512:
                assert shape is not None
                assert decodes <= shape.num_decodes and tokens <= shape.num_tokens
                assert decodes + num_chunks <= shape.num_samples


@pytest.mark.parametrize(("max_tokens", "largest"), [(16, 16), (100, 128), (512, 512), (513, 576)])
def test_the_largest_shape_holds_a_full_step(max_tokens: int, largest: int) -> None:
    shapes = step_shapes(max_tokens, 256, 8192)
    assert max(shape.num_tokens for shape in shapes) == largest


def test_short_contexts_limit_the_chunk_but_not_the_step() -> None:
    shapes = step_shapes(2048, 256, 100)
    assert max(shape.num_tokens for shape in shapes if shape.num_chunks == 1) == 128
    found = PrefillGraphs(shapes, 256)
    assert found.shape_of(200, chunks(100, 99)) == StepShape(256, 512, 8)


def test_one_sequence_alone_has_no_shapes_for_several() -> None:
    assert {shape.num_samples for shape in step_shapes(2048, 1, 2048)} == {1}


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 8, 40, 100, 192, 300, 512, 600, 2000])
@pytest.mark.parametrize("max_tokens", [16, 100, 512, 2048, 8192])
def test_rows_that_sample_have_a_captured_number(max_tokens: int, max_num_seqs: int) -> None:
    """Otherwise sampling would take more rows than the forward has left."""
    shapes = step_shapes(max_tokens, max_num_seqs, max_tokens)
    assert {shape.num_samples for shape in shapes} <= set(batch_buckets(max_num_seqs))


def test_sampling_multiplies_no_captured_steps() -> None:
    forwards = len(batch_buckets(512)) + len(step_shapes(2048, 512, 8192))
    sampling = 2 * len(batch_buckets(512))
    assert (forwards, sampling) == (151, 54)
