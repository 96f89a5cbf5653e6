"""A prompt's last blocks, sent part by part over a real transport."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from pagewire.services.decode.scatterer import Completion, PieceFate, PieceScatterer
from pagewire.services.prefill.packer import PiecePacker, StagedPiece
from pagewire.shared.config import EngineSettings, load_settings
from pagewire.shared.engine.build import BuiltEngine, build_engine, new_sequence
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.protocol import PieceHeader
from pagewire.shared.request import RequestStatus
from pagewire.shared.sampling import ResolvedSampling
from pagewire.shared.transfer.staging import StagingPool
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.engine_pair import header_of
from pagewire.tests.support.transports import PATIENCE_S, Network, Node, network

CHUNK = 160  # tokens: ten blocks
PROMPT = [n * n % 1900 + 100 for n in range(2 * CHUNK + 130)]
GREEDY = ResolvedSampling(temperature=0, max_tokens=16, ignore_eos=True)
NUM_BLOCKS = -(-len(PROMPT) // 16)


def engine() -> BuiltEngine:
    fields = {
        "model": "demo",
        "device": "cpu",
        "num_blocks": 64,
        "max_num_batched_tokens": CHUNK,
        "enable_prefix_caching": False,
    }
    return build_engine(load_settings(EngineSettings, fields))


def run(built: BuiltEngine, sequence: Sequence) -> list[int]:
    while not sequence.is_finished:
        built.core.step()
    return sequence.token_ids[len(PROMPT) :]


@dataclass(frozen=True)
class Transfer:
    """The pieces' headers, in the order of their packing, and the tokens behind the prompt."""

    headers: list[PieceHeader]
    tokens: list[int]


class Sender:
    """A prefill engine, of which all last blocks leave part by part."""

    def __init__(self, built: BuiltEngine, node: Node, staging: StagingPool) -> None:
        self.built, self._node = built, node
        self.packed: list[StagedPiece] = []
        self.headers: list[PieceHeader] = []
        parts = built.runner.mover.parts
        self.packer = PiecePacker(
            built.runner, staging, 16, parts, self.packed.append, divided_bytes=0
        )
        built.core.hooks.append(self.packer)

    def start(self) -> Sequence:
        job = new_sequence("job", PROMPT, GREEDY, ())
        job.prefill_only = True
        self.built.core.add(job)
        self.packer.start("job", 0, 1 << 30)
        return job

    async def send_packed(self) -> None:
        while self.packed:
            piece = self.packed.pop(0)
            header = header_of(piece)
            self.headers.append(header)
            payload = piece.slot.buffer[: piece.nbytes]
            await self._node.transport.send("b", header, payload, PATIENCE_S)
            piece.slot.release()

    @property
    def num_units(self) -> int:
        return sum(len(header.positions) * header.num_parts for header in self.headers)


class Receiver:
    """A decode engine with a sequence that waits for its blocks."""

    def __init__(self, built: BuiltEngine, node: Node) -> None:
        self.built, self._node = built, node
        self.fates: list[PieceFate] = []
        self._scatterer = PieceScatterer(
            built.core, built.runner, lambda request_id, header, fate: self.fates.append(fate)
        )
        built.core.hooks.append(self._scatterer)

    def reserve(self) -> Sequence:
        sequence = new_sequence("request", PROMPT, GREEDY, ())
        sequence.remote_prefill = True
        self.built.core.add(sequence)
        self.built.core.step()
        assert sequence.status is RequestStatus.RESERVED
        return sequence

    async def take_pieces(self) -> None:
        while True:
            piece = await self._node.transport.recv()
            self._scatterer.scatter("request", piece.header, piece.slot)
            self.built.core.step()

    def complete(self, first_token: int) -> None:
        parts = self.built.runner.mover.parts
        completion = Completion("job", range(NUM_BLOCKS), parts.whole, first_token, lambda: None)
        self._scatterer.complete("request", completion)


async def transfer(net: Network, source: BuiltEngine, target: BuiltEngine) -> Transfer:
    """Compute the prompt on one engine and go on with it on the other."""
    parts = source.runner.mover.parts
    slot_bytes = parts.packed_bytes(3)
    a, b = await net.pair(num_slots=2, slot_bytes=slot_bytes)
    sender = Sender(source, a, StagingPool(2, slot_bytes, source.device))
    receiver = Receiver(target, b)
    sequence, job = receiver.reserve(), sender.start()
    async with asyncio.TaskGroup() as group:
        taking = group.create_task(receiver.take_pieces())
        while sender.num_units < NUM_BLOCKS * parts.count:
            source.core.step()
            await sender.send_packed()
        await eventually(lambda: len(receiver.fates) == len(sender.headers))
        taking.cancel()
    assert set(receiver.fates) == {PieceFate.SCATTERED}
    receiver.complete(job.token_ids[-1])
    return Transfer(sender.headers, run(target, sequence))


@pytest.mark.parametrize("kind", ["zmq", "ucx"])
def test_the_last_chunk_crosses_part_by_part_and_the_tokens_are_right(kind: str) -> None:
    source, target = engine(), engine()

    async def scenario() -> Transfer:
        async with network(kind) as net:
            return await transfer(net, source, target)

    done = run_async(scenario())
    sent = [(h.positions[0], len(h.positions), h.first_part, h.num_parts) for h in done.headers]
    earlier = 2 * CHUNK // 16
    whole = [count for _, count, _, num_parts in sent if num_parts == 4]
    assert sum(whole) == earlier
    assert sent[len(whole) :] == [
        (earlier, 6, 0, 2),  # a slot holds no more
        (earlier + 6, 3, 0, 2),
        (earlier, 9, 2, 1),
        (earlier, 9, 3, 1),
    ]
    plain = new_sequence("plain", PROMPT, GREEDY, ())
    source.core.add(plain)
    assert done.tokens == run(source, plain)
