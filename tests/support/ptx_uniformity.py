"""Checks a kernel's PTX for branches in which threads could diverge around a barrier.

Triton compiles a scalar as a value that each thread holds, branches on it, and assumes that it is
the same in all threads. It is not if a sum over lanes is not symmetric: the compiler turns
`tl.sum(a * b)` into `fma(a, b, the other lane's product)`, so that each of two lanes rounds only
the other's product. Then lanes of a warp may take different branches, and lanes that wait for the
others at a shuffle or barrier wait forever.

For each bit of a value, the analysis tracks the bits of the thread index on which it may depend. A
butterfly shuffle whose two sides are the same by construction removes one of them. A loaded value
depends on the same bits as its address, unless others may write it meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

_LANES = 0b11111
_ALL = 0x3FF
_WIDTH = 64
_REGISTER = re.compile(r"%[a-z]+\d+")
_INTEGER = re.compile(r"-?\d+|0x[\da-fA-F]+")
_COMMUTATIVE = ("add", "max", "min", "and", "or", "xor")
_SYNCHRONISING = ("bar.", "barrier.", "shfl.", "redux.", "vote.", "match.", "ldmatrix.", "wgmma.")
_NO_TARGET = ("st.", "bra", "bar.", "ret", "red.", "cp.", "fence", "exit", "membar", "barrier.")
_END = "end of the function"
_CLOCKS = ("%globaltimer", "%clock")
_CHANGING = ("ld.volatile", "ld.relaxed", "ld.acquire")  # from memory that others write meanwhile
_OPAQUE = ("atom.", "ld.", "elect", "activemask", "mbarrier", "vote", "match", "ldmatrix")

Bits = tuple[int, ...]  # for each bit of a value, the bits of the thread index it depends on
_UNIFORM: Bits = (0,) * _WIDTH


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a kernel; an operand in braces is split into its registers."""

    name: str
    targets: tuple[str, ...]
    sources: tuple[str, ...]
    predicate: str | None
    line: int

    @property
    def synchronises(self) -> bool:
        """Whether the threads of a warp or of a program synchronise at this instruction."""
        return self.name.startswith(_SYNCHRONISING)

    @property
    def leaves(self) -> bool:
        """Whether control never continues at the next instruction."""
        return self.name.startswith(("bra", "ret", "exit"))


@dataclass(slots=True)
class Block:
    """A basic block, and the blocks that may follow it."""

    instructions: list[Instruction] = field(default_factory=list)
    followers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Divergence:
    """A branch that threads may take differently before they synchronise on one of its paths."""

    line: int
    predicate: str
    thread_bits: int
    meeting: int  # line of the first instruction that synchronises them

    def __str__(self) -> str:
        return (
            f"line {self.line} of the PTX: {self.predicate} depends on bits {self.thread_bits:#x} "
            f"of the thread index, and threads meet at line {self.meeting}"
        )


def find_divergences(ptx: str) -> list[Divergence]:
    """Return the branches at which threads may diverge before they synchronise."""
    return Uniformity(parse(ptx)).divergences()


def _parse_instruction(text: str, line: int) -> Instruction | None:
    found = re.match(r"(?:@(!?[%\w]+)\s+)?([a-z][\w.:]*)\s*(.*?);", text)
    if found is None:
        return None
    predicate, name, rest = found.groups()
    if predicate is not None:
        predicate = predicate.lstrip("!")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+", rest)
    split = [re.findall(r"[^\s{},]+", each) if each[0] == "{" else [each] for each in operands]
    count = 0 if name.startswith(_NO_TARGET) else 1
    if count and "|" in rest.split(",")[0]:
        count = 2
    targets = tuple(each for part in split[:count] for each in part)
    sources = tuple(each for part in split[count:] for each in part)
    return Instruction(name, targets, sources, predicate, line)


def parse(ptx: str) -> list[Block]:
    """Return the basic blocks of the only function; the last one is the empty end block."""
    labels: dict[str, list[int]] = {}
    blocks = [Block()]
    jumps: list[tuple[int, str]] = []
    body = ptx[ptx.index(".entry") :]
    first = ptx[: len(ptx) - len(body)].count("\n") + 1
    falls = True
    for line, raw in enumerate(body.splitlines(), first):
        text = raw.split("//")[0].strip()
        label = re.match(r"(\$L__BB\w+|[a-zA-Z_]\w*):", text)
        instruction = None if label else _parse_instruction(text, line)
        if label or (instruction and not falls):
            blocks.append(Block())
            if falls:
                blocks[-2].followers.append(len(blocks) - 1)
            falls = True
        if label:
            labels.setdefault(label[1], []).append(len(blocks) - 1)
        if instruction is None:
            continue
        blocks[-1].instructions.append(instruction)
        if instruction.leaves:
            target = instruction.sources[0] if instruction.sources else _END
            jumps.append((len(blocks) - 1, target))
            falls = instruction.predicate is not None
            if falls:  # the next instruction begins another block
                blocks.append(Block())
                blocks[-2].followers.append(len(blocks) - 1)
    blocks.append(Block())
    labels[_END] = [len(blocks) - 1]
    for index, label_name in jumps:
        # Labels of inline assembly may be defined several times: take the nearest one.
        blocks[index].followers.append(min(labels[label_name], key=lambda at: abs(at - index)))
    return blocks


class Uniformity:
    """The bits of the thread index on which a kernel's registers depend.

    A register that is written at several places, for example on both paths of a branch, is tracked
    per block.
    """

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        self._definitions: dict[str, int] = {}
        for block in blocks:
            for target in (each for one in block.instructions for each in one.targets):
                self._definitions[target] = self._definitions.get(target, 0) + 1
        self._bits: dict[str, Bits] = {}  # of registers written once, and of others at this point
        self._ends_with: list[dict[str, Bits]] = [{} for _ in blocks]  # of the others, at the end
        self._branches: dict[int, int] = {}  # block -> bits of the thread index at its end
        self._mirrors: dict[str, tuple[int, object]] = {}
        self._forms: dict[str, object] = {}
        self._ends = _post_dominators(blocks)
        self._sources: list[list[int]] = [[] for _ in blocks]
        for index, block in enumerate(blocks):
            for follower in block.followers:
                self._sources[follower].append(index)
        while self._pass():
            pass

    def divergences(self) -> list[Divergence]:
        """Return the branches at which threads may diverge before they synchronise."""
        found = []
        for index, bits in self._branches.items():
            lines = [
                each.line
                for inner in (self._region(index) if bits else ())
                for each in self.blocks[inner].instructions
                if each.synchronises
            ]
            if lines:
                branch = self.blocks[index].instructions[-1]
                found.append(Divergence(branch.line, str(branch.predicate), bits, min(lines)))
        return found

    def _region(self, index: int) -> set[int]:
        """Return the blocks between a branch and its post-dominator, where its paths join."""
        end = self._ends[index]
        seen: set[int] = set()
        todo = list(self.blocks[index].followers)
        while todo:
            block = todo.pop()
            if block != end and block not in seen:
                seen.add(block)
                todo.extend(self.blocks[block].followers)
        return seen

    def _pass(self) -> bool:
        before = dict(self._bits), [dict(each) for each in self._ends_with], dict(self._branches)
        blurs = self._blurs()
        for index, block in enumerate(self.blocks):
            state: dict[str, Bits] = {}
            for source in self._sources[index]:
                for register, bits in self._ends_with[source].items():
                    state[register] = tuple(map(or_, state.get(register, _UNIFORM), bits))
            for register, extra in blurs.get(index, {}).items():
                state[register] = tuple(bit | extra for bit in state.get(register, _UNIFORM))
            self._bits |= {name: _UNIFORM for name, n in self._definitions.items() if n > 1} | state
            for instruction in block.instructions:
                self._follow(instruction)
                if instruction.leaves and instruction.predicate is not None:
                    self._branches[index] = self._thread_bits(instruction.predicate)
            written = {each for one in block.instructions for each in one.targets}
            self._ends_with[index] = {
                name: self._bits[name] for name in written | set(state) if not self._is_single(name)
            }
        return before != (self._bits, self._ends_with, self._branches)

    def _blurs(self) -> dict[int, dict[str, int]]:
        """Return where values from different paths of a divergent branch join."""
        blurs: dict[int, dict[str, int]] = {}
        for index, bits in self._branches.items():
            region = self._region(index) if bits else set()
            written = {
                target
                for inner in region
                for each in self.blocks[inner].instructions
                for target in each.targets
                if not self._is_single(target)
            }
            for block in {*region, self._ends[index]} if bits else ():
                if len(self._sources[block]) > 1:
                    here = blurs.setdefault(block, {})
                    for target in written:
                        here[target] = here.get(target, 0) | bits
        return blurs

    def _thread_bits(self, register: str) -> int:
        return _union(self._of(register))

    def _of(self, operand: str) -> Bits:
        if operand.startswith(("%tid.x", "%laneid")):
            return tuple(1 << bit if 1 << bit <= _ALL else 0 for bit in range(_WIDTH))
        if operand.startswith(_CLOCKS):
            return (_ALL,) * _WIDTH
        if operand.startswith("["):
            registers = _REGISTER.findall(operand)
            return (reduce(or_, (self._thread_bits(each) for each in registers), 0),) * _WIDTH
        return self._bits.get(operand, _UNIFORM)

    def _follow(self, each: Instruction) -> None:
        if not each.targets:
            return
        kind = each.name.split(".")[0]
        bits = _moved(each, [self._of(source) for source in each.sources])
        if kind == "shfl":
            self._note_mirror(each)
            if ".idx" in each.name and each.sources[1].isdigit():
                bits = (_union(bits) & ~_LANES,) * _WIDTH
        elif kind == "redux":
            bits = (_union(bits) & ~_LANES,) * _WIDTH
        elif each.name.startswith(_CHANGING) or (each.name.startswith(_OPAQUE) and kind != "ld"):
            bits = (_ALL,) * _WIDTH
        elif self._is_single(each.targets[0]) and not each.name.startswith(_OPAQUE):
            bits = self._combined(each, bits)
        if each.predicate is not None:
            condition = self._thread_bits(each.predicate)
            bits = tuple(bit | condition for bit in bits)
            # A predicated write may keep the old value.
            bits = tuple(map(or_, bits, self._of(each.targets[0])))
        for target in each.targets:
            self._bits[target] = bits

    def _is_single(self, register: str) -> bool:
        return self._definitions.get(register) == 1

    def _form(self, operand: str) -> object:
        return self._forms.get(operand, operand)

    def _note_mirror(self, each: Instruction) -> None:
        """Record that a register has another register's value from the opposite lane."""
        if ".bfly" in each.name and each.sources[1].isdigit() and self._is_single(each.targets[0]):
            self._mirrors[each.targets[0]] = int(each.sources[1]), self._form(each.sources[0])

    def _combined(self, each: Instruction, bits: Bits) -> Bits:
        """Track mirrored values through an instruction, and detect one that joins both sides."""
        kind = each.name.split(".")[0]
        sides = [self._mirrors.get(source) for source in each.sources]
        distances = {side[0] for side in sides if side is not None}
        forms = [self._form(source) for source in each.sources]
        if any(self._definitions.get(source, 1) > 1 for source in each.sources):
            pass  # of a changing value, two results are not the same
        elif len(each.targets) == 1:
            self._forms[each.targets[0]] = (each.name, *forms)
        else:  # a value is unpacked
            for place, target in enumerate(each.targets):
                self._forms[target] = (each.name, place, *forms)
        for target in each.targets:
            self._mirrors.pop(target, None)
        if len(distances) != 1:
            return bits
        distance = distances.pop()
        if all(
            side is not None or self._is_alike(source, distance)
            for side, source in zip(sides, each.sources, strict=True)
        ):
            across = [s[1] if s is not None else f for s, f in zip(sides, forms, strict=True)]
            for place, target in enumerate(each.targets):
                taken = (place,) if len(each.targets) > 1 else ()
                self._mirrors[target] = distance, self._whole((each.name, *taken, *across))
        elif kind in _COMMUTATIVE and len(sides) == 2:
            mirrored = sides[0] or sides[1]
            own = forms[1] if sides[0] else forms[0]
            if mirrored is not None and mirrored[1] == own:
                return tuple(bit & ~distance for bit in bits)
        return bits

    def _whole(self, form: tuple[object, ...]) -> object:
        """Return the original value of one that was unpacked and packed again."""
        parts = form[1:]
        if str(form[0]).startswith("mov.b64") and len(parts) == 2:
            low, high = parts
            if isinstance(low, tuple) and isinstance(high, tuple):
                is_split = low[:2] == (form[0], 0) and high[:2] == (form[0], 1)
                if is_split and low[2:] == high[2:]:
                    return low[2]
        return form

    def _is_alike(self, operand: str, distance: int) -> bool:
        return not self._thread_bits(operand) & distance


def _union(bits: Bits) -> int:
    return reduce(or_, bits)


def _moved(each: Instruction, sources: list[Bits]) -> Bits:
    """Return the bits of a result: exactly for shifts and masks by constants, else all joined."""
    kind = each.name.split(".")[0]
    numbers = [int(s, 0) if _INTEGER.fullmatch(s) else None for s in each.sources]
    if kind in ("mov", "cvt") and len(sources) == 1 and len(each.targets) == 1:
        return sources[0]
    if len(numbers) > 1 and numbers[1] is not None:
        by = numbers[1]
        if kind == "and":
            return tuple(bit if by >> place & 1 else 0 for place, bit in enumerate(sources[0]))
        if kind == "shl":
            return ((0,) * by + sources[0])[:_WIDTH]
        if kind == "shr":
            return sources[0][by:] + (0,) * by
        if kind == "bfe" and len(numbers) > 2 and numbers[2] is not None:
            return (sources[0][by : by + numbers[2]] + (0,) * _WIDTH)[:_WIDTH]
    if kind in ("and", "or", "xor") and len(sources) == 2:
        return tuple(map(or_, *sources))
    return (reduce(or_, map(_union, sources), 0),) * _WIDTH


def _post_dominators(blocks: list[Block]) -> Mapping[int, int]:
    """Return, for each block, the first block that all paths from it reach."""
    last = len(blocks) - 1
    every = (1 << len(blocks)) - 1
    sets = [every] * last + [1 << last]
    changed = True
    while changed:
        changed = False
        for index in range(last - 1, -1, -1):
            common = every
            for follower in blocks[index].followers:
                common &= sets[follower]
            new = common | 1 << index
            changed |= new != sets[index]
            sets[index] = new
    nearest = {}
    for index in range(last):
        others = [each for each in range(len(blocks)) if each != index and sets[index] >> each & 1]
        # The nearest one is post-dominated by all others.
        nearest[index] = max(others, key=lambda each: sets[each].bit_count(), default=last)
    return nearest
