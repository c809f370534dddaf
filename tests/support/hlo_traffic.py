"""How many bytes a program compiled for TPU moves to and from the device's memory, read from its text.

XLA's own count also has what moves between the chip's memories, and counts weights that are fetched ahead of their use
twice or more. Here only arrays in the large memory count (those elsewhere are marked `S(n)`); a kernel counts as it
says itself, less what was brought to it on the chip before. What a program fetches for its next run counts, what the
last run has fetched for it does not. What is read in part (gather, slice) or written in part (scatter, update) counts
in part. Of branches the cheapest counts, that is greedy sampling; loops whose number of rounds the text does not tell
count nothing (they copy pages, which is rare).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_BITS = {
    "s4": 4, "u4": 4, "f4e2m1fn": 4, "pred": 8, "s8": 8, "u8": 8, "f8e4m3fn": 8, "f8e5m2": 8, "f8e8m0fnu": 8,
    "bf16": 16, "f16": 16, "s16": 16, "u16": 16, "f32": 32, "s32": 32, "u32": 32,
}  # fmt: skip
_ARRAY = re.compile(rf"\b({'|'.join(_BITS)})\[([\d,]*)\](\{{[^}}]*\}})?")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$")
_OPERATION = re.compile(r"^(.*?) ([a-z][\w-]*)\(")
_FREE = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "iota", "partition-id", "after-all",
    "copy-done", "slice-done", "all-gather-done", "all-reduce-done", "opt-barrier", "async-update", "async-done",
    "call-done",
}  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_PARTS = ("gather", "dynamic-slice")
_UPDATES = {"scatter": 2, "dynamic-update-slice": 1}
"""Operations that write a part of their first operand, with the place of the operand that holds the part."""


@dataclass(frozen=True)
class _Array:
    bytes: int
    local: bool
    """In a memory of the chip itself."""
    floats: bool

    @property
    def moved(self) -> int:
        return 0 if self.local else self.bytes


@dataclass(frozen=True)
class _Instruction:
    name: str
    operation: str
    result: tuple[_Array, ...]
    operands: tuple[str, ...]
    line: str

    @property
    def size(self) -> int:
        return sum(array.bytes for array in self.result)


class Traffic:
    """Counts over the text of one compiled program."""

    def __init__(self, text: str) -> None:
        self._computations: dict[str, list[_Instruction]] = {}
        self._entry = ""
        current: list[_Instruction] = []
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith(" "):
                name = line.split("(")[0].split()[-1].lstrip("%")
                current = self._computations[name] = []
                self._entry = name if line.startswith("ENTRY") else self._entry
            elif (found := _INSTRUCTION.match(line)) and (operation := _OPERATION.match(found[2])):
                current.append(_instruction(found[1], operation[1], operation[2], found[2], line))

    def total(self) -> int:
        """Bytes of the whole program."""
        return self._of(self._entry)

    def count(self, kinds: Sequence[str]) -> dict[str, int]:
        """How often instructions of these kinds run in it, by kind; one that ends elsewhere counts where it starts.

        Of loops, one round counts.
        """
        return dict(self._count(self._entry, frozenset(kinds)))

    def received(self, kind: str) -> int:
        """Bytes of floats that exchanges of a kind outside of loops and branches give each device, its own part
        included."""
        results: list[_Array] = []
        for it in self._computations[self._entry]:
            count = len(it.operands)
            if it.operation == kind:
                results += it.result
            elif it.operation == f"{kind}-start":  # (operands, results)
                results += it.result[count : 2 * count]
        return sum(array.bytes for array in results if array.floats)

    def arriving(self) -> list[int]:
        """For each exchange, in order: bytes on their way to the chip's own memory, mostly weights of what follows."""
        found, under_way = [], dict[str, int]()
        for it in self._computations[self._entry]:
            if it.operation in ("copy-start", "slice-start"):
                part = min(it.result, key=lambda array: (array.bytes <= 8, array.bytes))
                under_way[it.name] = part.bytes * part.local
            elif it.operation in ("copy-done", "slice-done"):
                under_way.pop(it.operands[0], None)
            elif it.operation.removesuffix("-start") in COLLECTIVES:
                found.append(sum(under_way.values()))
        return found

    def of_arguments(self, name: str) -> int:
        """Bytes moved for the entry's arguments whose `op_name` matches a pattern, copies made of them included.

        Of a kernel that reads some as they lie, all of them count.
        """
        instructions = self._computations[self._entry]
        results = {each.name: each for each in instructions}
        pattern, theirs, total = re.compile(rf'op_name="{name}"'), set[str](), 0
        for it in instructions:
            operands = [results[operand] for operand in it.operands if operand in results]
            mine = [each for each in operands if each.name in theirs]
            if it.operation == "parameter":
                if pattern.search(it.line):
                    theirs.add(it.name)
            elif mine and all(each in mine or each.operation == "constant" for each in operands):
                theirs.add(it.name)
                total += self._one(it, results)
            elif mine and it.operation == "custom-call":
                total += sum(array.moved for each in mine for array in each.result)
            elif mine and it.operation not in _FREE:
                inside = [it, *(each for of in _called(it.line, "calls") for each in self._computations.get(of, ()))]
                read = [array for each in mine for array in each.result]
                total += self._moved(dataclasses.replace(it, result=()), read, inside)
        return total

    def _of(self, computation: str) -> int:
        instructions = self._computations.get(computation, [])
        results = {each.name: each for each in instructions}
        return sum(self._one(each, results) for each in instructions)

    def _count(self, computation: str, kinds: frozenset[str]) -> Counter[str]:
        found: Counter[str] = Counter()
        for it in self._computations.get(computation, []):
            found[it.operation.removesuffix("-start")] += it.operation.removesuffix("-start") in kinds
            if it.operation == "conditional":
                found += self._count(self._cheapest(it), kinds)
            elif it.operation in ("while", "call", "call-start", "async-start"):
                for what in ("body", "to_apply", "calls"):
                    for name in _called(it.line, what):
                        found += self._count(name, kinds)
        return +found

    def _cheapest(self, conditional: _Instruction) -> str:
        """The branch of a greedy step: it moves the least, and its devices do not exchange rows of logits."""

        def cost(branch: str) -> tuple[bool, int]:
            return bool(self._count(branch, frozenset(["all-to-all"]))), self._of(branch)

        return min(_called(conditional.line, "branch_computations"), key=cost, default="")

    def _one(self, it: _Instruction, results: dict[str, _Instruction]) -> int:
        if it.operation in _FREE:
            return 0
        if it.operation in ("copy-start", "slice-start"):
            # (target, source, ...) or ((source), target, ...): as much is read as is written.
            same = (each for each in results.values() if (each.operation, each.operands) == (it.operation, it.operands))
            if "cross_program_prefetch_index" in it.line and any(each is not it for each in same):
                return 0  # the program fetches it again for its next run
            part = min((array.bytes for array in it.result if array.bytes > 8), default=0)
            return part * sum(not array.local for array in it.result[:2])
        if it.operation == "conditional":
            return self._of(self._cheapest(it))
        if it.operation == "while":
            rounds = re.search(r'known_trip_count[^}]*?"?n"?\s*:\s*"?(\d+)', it.line)
            return int(rounds[1]) * sum(map(self._of, _called(it.line, "body"))) if rounds else 0
        if it.operation in ("call", "call-start", "async-start"):
            return sum(self._of(name) for name in (*_called(it.line, "to_apply"), *_called(it.line, "calls")))
        if it.operation == "custom-call":
            said = re.search(r'"bytes_accessed":"(\d+)"', it.line)
            ends = [it, *(results[name] for name in it.operands if name in results)]
            here = sum(array.bytes for each in ends for array in each.result if array.local)
            return max(int(said[1]) - here, 0) if said else 0
        operands = [results[name].result for name in it.operands if name in results]
        arrays = [array for result in operands for array in result]
        inside = [it, *(each for name in _called(it.line, "calls") for each in self._computations.get(name, ()))]
        return self._moved(it, arrays, inside)

    def _moved(self, it: _Instruction, arrays: list[_Array], inside: list[_Instruction]) -> int:
        """Operands and result, each in part where only a part of it is touched."""
        read = max((each.size for each in inside if each.operation in _PARTS), default=None)
        written = self._written(inside)
        total = 0
        rest = list(arrays)
        for array in it.result:
            same = next((other for other in rest if other.bytes == array.bytes), None)
            if written is not None and same is not None:
                # Updated in place: what is not written is not touched.
                rest.remove(same)
                total += 0 if array.local else min(written, array.bytes)
            else:
                total += array.moved
        for array in rest:
            total += array.moved if read is None else min(array.moved, max(read, 1 << 20))
        return total

    def _written(self, inside: list[_Instruction]) -> int | None:
        """Bytes of the largest part that is written, if it is known."""
        results = {each.name: each for each in inside}
        found = []
        for each in inside:
            if each.operation in _UPDATES and (place := _UPDATES[each.operation]) < len(each.operands):
                part = results.get(each.operands[place])
                found.append(part.size if part is not None else 0)
        return max(found, default=None)


def _instruction(name: str, kind: str, operation: str, rest: str, line: str) -> _Instruction:
    start = len(kind) + 1 + len(operation)
    depth = 0
    end = start
    for end in range(start, len(rest)):
        depth += (rest[end] == "(") - (rest[end] == ")")
        if depth == 0:
            break
    operands = tuple(re.findall(r"%([\w.-]+)", rest[start : end + 1]))
    return _Instruction(name, operation, tuple(_arrays(kind)), operands, line)


def _arrays(kind: str) -> list[_Array]:
    found = []
    for dtype, sizes, layout in _ARRAY.findall(kind):
        count = math.prod(int(size) for size in sizes.split(",") if size)
        found.append(_Array(count * _BITS[dtype] // 8, re.search(r"S\([1-9]", layout) is not None, "f" in dtype))
    return found


def _called(line: str, what: str) -> list[str]:
    """Names of the computations that an instruction runs."""
    if found := re.search(rf"\b{what}=\{{([^}}]*)\}}", line):
        return [name.strip().lstrip("%") for name in found[1].split(",")]
    return re.findall(rf"\b{what}=%?([\w.-]+)", line)


def sums_of_devices(text: str) -> list[str]:
    """The instructions of a compiled program by which the runtime adds up floats of devices, in an order of its own.

    Without those that look up tokens: to one device's vectors they add zeros, which have the same bits in any order.
    """
    found = re.findall(r"^.* = \(?b?f\d+\[.* (?:all-reduce|reduce-scatter)(?:-start)?\(.*$", text, re.MULTILINE)
    return [line for line in found if not re.search(r'jit\(_take\)/gather|"jit\(run\)/gather"', line)]


def count_collectives(text: str) -> dict[str, int]:
    """How often a compiled program (as text) has devices exchange something in a greedy step, by kind."""
    return Traffic(text).count(COLLECTIVES)
