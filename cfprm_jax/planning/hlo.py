"""A compiled program, read from the text that XLA prints of it: collectives, kernels, aliased buffers.

XLA's own cost analysis counts the body of a loop once; here a body counts as often as it runs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
# "%name = TYPE opcode(operands), attributes"; a tuple's type has spaces and comments in it.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
# Of a reduction or a sort this is what it does with two numbers, as often as there are numbers: not followed.
_APPLIED = re.compile(r"to_apply=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count\\?"?:\s*\{\\?"?n\\?"?:\\?"?(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OPERATION = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    rest: str  # operands and attributes


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective in a step, on each device.

    Attributes:
      count: how often it runs.
      bytes: size of the arrays: what a gather or an exchange gives, what a reduction takes.
    """

    count: int
    bytes: int


@functools.lru_cache(maxsize=512)
def array_bytes(text: str) -> int:
    """Bytes of all arrays named in a type, "(bf16[4,8]{1,0}, f32[])"."""
    total = 0.0
    for kind, dims in _ARRAY.findall(text):
        digits = re.search(r"\d+", kind)
        size = _BYTES.get(kind, int(digits.group()) / 8 if digits else 0)
        total += size * math.prod(int(d) for d in dims.split(",") if d)
    return round(total)


class CompiledText:
    """A compiled program, read from XLA's text of it.

    Attributes:
      computations: name -> its instructions.
      runs: name -> how often a computation runs in one execution; a loop whose count is not known counts once.
    """

    def __init__(self, text: str):
        self._text = text
        self.computations: dict[str, list[Instruction]] = {}
        entry, current = "", None
        for line in text.splitlines():
            if current is None:
                if match := _COMPUTATION.match(line):
                    current = self.computations.setdefault(match[2], [])
                    entry = match[2] if match[1] else entry
            elif line.startswith("}"):
                current = None
            elif match := _INSTRUCTION.match(line):
                current.append(Instruction(*match.groups()))
        self.runs: dict[str, int] = collections.defaultdict(int)
        if entry:
            self._visit(entry, 1)

    def _visit(self, name: str, times: int) -> None:
        self.runs[name] += times
        for instruction in self.computations.get(name, ()):
            inner = times * self._trips(instruction) if instruction.opcode == "while" else times
            named = _CALLED.findall(instruction.rest)
            for several in _CALLED_LISTS.findall(instruction.rest):
                named += re.findall(r"[\w.\-]+", several)
            if instruction.opcode == "call":
                named += _APPLIED.findall(instruction.rest)
            for called in named:
                self._visit(called, inner)

    def _trips(self, loop: Instruction) -> int:
        """How often a loop's body runs: known to XLA's GPU compiler, or, for a TPU, the bound that it counts up to."""
        if match := _TRIPS.search(loop.rest):
            return int(match[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
        instructions = {i.name: i for i in self.computations.get(condition[1] if condition else "", ())}
        for instruction in instructions.values():
            if instruction.opcode == "compare" and "direction=LT" in instruction.rest:
                bound = instructions.get(_operands(instruction)[-1])
                number = re.match(r"(\d+)\)", bound.rest) if bound and bound.opcode == "constant" else None
                return int(number[1]) if number else 1
        return 1

    def collectives(self) -> dict[str, Collective]:
        """Kind -> how often and how much, largest first."""
        counts: dict[str, int] = collections.defaultdict(int)
        sizes: dict[str, int] = collections.defaultdict(int)
        for name, times in self.runs.items():
            instructions = self.computations.get(name, [])
            types = {i.name: i.type for i in instructions}
            for instruction in instructions:
                kind = instruction.opcode.removesuffix("-start")
                if kind in COLLECTIVES:
                    counts[kind] += times
                    sizes[kind] += times * _moved(kind, instruction, types)
        return {kind: Collective(counts[kind], sizes[kind]) for kind in sorted(sizes, key=lambda k: -sizes[k])}

    def kernels(self) -> dict[str, int]:
        """Custom kernels and library calls -> how often they run; a Pallas kernel by the name of its operation."""
        out: dict[str, int] = collections.defaultdict(int)
        for name, times in self.runs.items():
            for instruction in self.computations.get(name, ()):
                target = _TARGET.search(instruction.rest)
                if instruction.opcode in ("custom-call", "custom-call-start") and target:
                    out[_kernel_name(target[1], instruction.rest)] += times
        return dict(out)

    def attention_kernels(self) -> dict[str, int]:
        """Those of the kernels that are attention; empty where it is plain XLA."""
        words = ("fmha", "attention", "splash", "flash")
        return {name: times for name, times in self.kernels().items() if any(w in name.lower() for w in words)}

    def aliased(self) -> int:
        """Number of arguments whose memory a result takes over."""
        header = self._text[: self._text.find("\n")]  # HloModule N, input_output_alias={ {0}: (0, {}, may-alias), ...
        return len(re.findall(r"(?:may|must)-alias", header))


def _operands(instruction: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", instruction.rest.split(")", 1)[0])


def _kernel_name(target: str, attributes: str) -> str:
    """The target, or for a Pallas kernel its own name: its operation is ".../NAME/pallas_call"."""
    operation = _OPERATION.search(attributes) if target == "tpu_custom_call" else None
    return operation[1].removesuffix("/pallas_call").rsplit("/", 1)[-1] if operation else target


def _moved(kind: str, instruction: Instruction, types: dict[str, str]) -> int:
    taken = sum(array_bytes(types.get(operand, "")) for operand in _operands(instruction))
    given = array_bytes(instruction.type)
    if instruction.opcode.endswith("-start") and kind != "all-reduce" and given > taken > 0:
        given -= taken  # the type of a start is (operands, results)
    return max(taken, given) if kind in ("all-reduce", "reduce-scatter") else given
