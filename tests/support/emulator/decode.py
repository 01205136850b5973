"""Decodes PTX into the list of instructions that emulator.cpp executes.

A register is a slot of 32 words, of 64 bits two of them; a constant is a register that is filled at the start.
What is not understood raises Unsupported, which names the instruction.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 1024  # of machine.h
INSTRUCTION = np.dtype(
    [(name, "i4") for name in ("op", "line", "guard", "negated")]
    + [("args", "i4", 8)]
    + [(name, "i4") for name in ("list", "count", "written", "writes", "read", "reads")]
    + [("value", "i8")],
    align=True,
)
SPECIAL = {
    f"%{name}.{axis}": 3 * i + j
    for i, name in enumerate(("tid", "ctaid", "ntid", "nctaid"))
    for j, axis in enumerate("xyz")
} | {"%laneid": 12, "%warpid": 13}
PRODUCT_TYPES = {"bf16": 0, "f16": 1, "tf32": 2}  # as in products.h
# They order nothing that the emulator leaves unordered: lanes of a warp, and the memory of one block.
IGNORED = {"bar.warp.sync", "membar.cta", "membar.gl", "fence.acq_rel.cta", "fence.sc.cta"}


class Unsupported(Exception):
    """The emulator does not know an instruction, or a form of one; the message names it."""


def size_of(kind: str) -> int:
    """Returns the bytes of a type such as b32 or bf16x2."""
    return 4 if kind in ("pred", "f16x2", "bf16x2") else int(re.sub(r"\D+", "", kind)) // 8


@dataclass(frozen=True)
class Kernel:
    """A decoded kernel.

    params      bytes of each parameter, and where it begins
    constants   slot, value and whether it has 64 bits, of each
    sources     PTX line -> "file:line" of the Python that it comes from
    """

    name: str
    params: list[tuple[int, int]]
    code: np.ndarray
    pool: np.ndarray
    constants: np.ndarray
    slots: int
    sources: dict[int, str]


def split(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text)] if text.strip() else []


class Decoder:
    """Holds what decoding a kernel has found so far. find: name -> number and sizes of an operation."""

    def __init__(self, find: Callable[[str], tuple[int, str]]) -> None:
        self.find = find
        self.slots, self.line = 0, 0
        self.scopes: list[dict[str, tuple[int, int]]] = [{}]  # register -> slot, bytes
        self.constants: dict[tuple[int, bool], int] = {}
        self.symbols: dict[str, int] = {}
        self.params: dict[str, tuple[int, int]] = {}
        self.rows: list[tuple] = []
        self.pool: list[int] = []
        self.labels: dict[str, int] = {}
        self.jumps: list[tuple[int, str]] = []
        self.guard = (-1, 0)

    def refuse(self, what: str) -> Unsupported:
        return Unsupported(f"PTX line {self.line}: the emulator does not know {what}")

    def allot(self, wide: bool) -> int:
        slot, self.slots = self.slots, self.slots + (2 if wide else 1)
        return slot

    def declare(self, kind: str, names: str) -> None:
        """Allots the registers of a declaration such as `%r<7>` or `a, b`."""
        size = size_of(kind)
        for name in split(names):
            counted = re.fullmatch(r"(.+)<(\d+)>", name)
            for register in [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]:
                self.scopes[-1][register] = (self.allot(size == 8), size)

    def register(self, name: str) -> tuple[int, int] | None:
        """Returns slot and bytes of a register; None: it is none."""
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def constant(self, value: int, size: int) -> int:
        key = (value & ((1 << 8 * size) - 1), size == 8)
        if key not in self.constants:
            self.constants[key] = self.allot(size == 8)
        return self.constants[key]

    def operand(self, text: str, size: int) -> int:
        """Returns the slot of a register or of a constant that has `size` bytes; `_` is none."""
        if text == "_":
            return -1
        if known := self.register(text):
            if (known[1] == 8) != (size == 8):
                raise self.refuse(f"{text} of {known[1]} bytes in place of {size}")
            return known[0]
        if text in self.symbols:
            return self.constant(self.symbols[text], size)
        if match := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]{8,16})", text):
            bits = int(match[1], 16)
            if len(match[1]) == 16 and size == 4:
                bits = struct.unpack(
                    "<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", bits))[0])
                )[0]
            return self.constant(bits, size)
        if not re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
            raise self.refuse(f"the operand {text}")
        return self.constant(int(text.rstrip("U"), 0), size)

    def vector(self, text: str, size: int) -> list[int]:
        return [self.operand(name, size) for name in split(text.strip("{} ") if text[0] == "{" else text)]

    def address(self, text: str) -> tuple[str, int]:
        """Returns the register, symbol or parameter of `[a+8]`, and what is added to it."""
        match = re.fullmatch(r"\[\s*([\w%$.]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        if not match:
            raise self.refuse(f"the address {text}")
        return match[1], int(match[2] or "0", 0)

    def emit(
        self, name: str, args: Sequence[int] = (), registers: Sequence[int] = (), value: int = 0,
        writes: Sequence[int] = (), reads: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Appends an instruction."""
        op, _ = self.find(name)
        if op < 0:
            raise self.refuse(name)
        places = []
        for group in (registers, [x for x in writes if x >= 0], [x for x in reads if x >= 0]):
            places += [len(self.pool), len(group)]
            self.pool += group
        filled = (*args, *[-1] * (8 - len(args)))
        self.rows.append((op, self.line, *self.guard, filled, *places, value))

    def statement(self, text: str) -> None:
        """Decodes one instruction with its guard."""
        self.guard = (-1, 0)
        if match := re.match(r"@(!?)([%\w]+)\s+", text):
            known = self.register(match[2])
            assert known is not None
            self.guard, text = (known[0], int(bool(match[1]))), text[match.end() :]
        opcode, _, rest = re.sub(r"\s+", " ", text).partition(" ")
        parts, a = opcode.split("."), split(rest)
        special = getattr(self, f"_{parts[0]}", None)
        if parts[0] == "bra":
            self.jumps.append((len(self.rows), a[0]))
            self.emit("bra")
        elif parts[0] in ("ret", "exit"):
            self.emit("ret")
        elif parts[0] in ("bar", "barrier") and "sync" in parts and parts[1] != "warp":
            self.emit("bar", [self.operand(x, 4) for x in a])
        elif opcode in IGNORED or parts[0] == "griddepcontrol":
            self.emit("nop")
        elif opcode.startswith("fence.proxy.async"):
            self.emit("fence.proxy.async")
        elif special:
            special(parts, a)
        else:
            self.lanes(parts, a)

    def lanes(self, parts: list[str], a: list[str]) -> None:
        """Decodes an operation that computes each lane by itself."""
        name = ".".join(part for part in parts if part != "rn")
        op, sizes = self.find(name)
        if op < 0 or len(sizes) != len(a):
            raise self.refuse(".".join(parts))
        slots = [self.operand(x, int(size)) for x, size in zip(a, sizes, strict=True)]
        self.emit(name, slots, writes=slots[:1], reads=slots[1:])

    def _cvt(self, parts: list[str], a: list[str]) -> None:
        """A register may be wider than the type that is converted: then its lower half is taken first."""
        known = self.register(a[1])
        if known and known[1] == 8 and size_of(parts[-1]) < 8:
            half = self.allot(False)
            self.scopes[-1][f"lower half {half}"] = (half, 4)
            self.emit("cvt.u32.u64", [half, known[0]], writes=[half], reads=[known[0]])
            a = [a[0], f"lower half {half}"]
        self.lanes(parts, a)

    def _mov(self, parts: list[str], a: list[str]) -> None:
        size = size_of(parts[-1])
        if a[1] in SPECIAL:
            slot = self.operand(a[0], size)
            return self.emit("special", [slot], value=SPECIAL[a[1]], writes=[slot])
        for name, whole, parted in (("pack", a[0], a[1]), ("unpack", a[1], a[0])):
            if parted.startswith("{"):
                count = len(split(parted[1:-1]))
                slots, one = self.vector(parted, size // count), [self.operand(whole, size)]
                order = [*one, *slots] if name == "pack" else [*slots, *one]
                writes, reads = (one, slots) if name == "pack" else (slots, one)
                return self.emit(name, [size // count], order, writes=writes, reads=reads)
        return self.lanes(parts, a)

    def _ld(self, parts: list[str], a: list[str]) -> None:
        self._access("ld", parts, a[0], a[1])

    def _st(self, parts: list[str], a: list[str]) -> None:
        self._access("st", parts, a[1], a[0])

    def _access(self, head: str, parts: list[str], registers: str, place: str) -> None:
        known = {"global": "global", "shared": "shared", "shared::cta": "shared", "param": "param"}
        space = next((known[part] for part in parts if part in known), None)
        if space is None or "relaxed" in parts or "acquire" in parts or "release" in parts:
            raise self.refuse(".".join(parts))
        size, signed = size_of(parts[-1]), int(parts[-1][0] == "s")
        base, offset = self.address(place)
        names = split(registers.strip("{} "))
        wide = max(self.register(x)[1] if self.register(x) else size for x in names) == 8  # pyright: ignore
        if head == "st" and wide != (size == 8):
            raise self.refuse(f"{'.'.join(parts)} of wider registers")
        slots = [self.operand(x, 8 if wide else 4) for x in names]
        args = [-1, size, signed, int(wide)]
        if space == "param":
            return self.emit("ld.param", args, slots, self.params[base][1] + offset, writes=slots)
        args[0] = self.operand(base, 8 if space == "global" else 4)
        reads = args[:1] if head == "ld" else [args[0], *slots]
        self.emit(f"{head}.{space}", args, slots, offset, slots if head == "ld" else (), reads)

    def _cp(self, parts: list[str], a: list[str]) -> None:
        if parts[1] != "async" or parts[2] not in ("commit_group", "wait_group", "wait_all", "ca", "cg"):
            raise self.refuse(".".join(parts))
        if parts[2] == "commit_group":
            return self.emit("cp.async.commit_group")
        if parts[2] in ("wait_group", "wait_all"):
            return self.emit("cp.async.wait_group", value=int(a[0], 0) if a else -1)
        (to, to_offset), (of, of_offset) = self.address(a[0]), self.address(a[1])
        slots = [self.operand(to, 4), self.operand(of, 8), self.operand(a[3], 4) if len(a) > 3 else -1]
        return self.emit("cp.async", [*slots, to_offset, of_offset], value=int(a[2], 0), reads=slots)

    def _wgmma(self, parts: list[str], a: list[str]) -> None:
        if parts[1] in ("fence", "commit_group", "wait_group"):
            return self.emit(f"wgmma.{parts[1]}", value=int(a[0], 0) if a else 0)
        shape = re.fullmatch(r"m64n(\d+)k(\d+)", parts[4])
        if not shape or parts[5] != "f32" or parts[6] != parts[7] or parts[6] not in PRODUCT_TYPES:
            raise self.refuse(".".join(parts))
        total = self.vector(a[0], 4)
        left = self.vector(a[1], 4) if a[1].startswith("{") else []
        slots = [-1 if left else self.operand(a[1], 8), self.operand(a[2], 8), self.operand(a[3], 4)]
        turned = [int(x) for x in a[6:]]  # A's flag is there only where A is in shared memory
        flags = 0 if not turned else turned[-1] << 1 | (turned[0] if len(turned) > 1 else 0)
        args = [*slots, PRODUCT_TYPES[parts[6]], int(shape[1]), flags, int(a[4]), int(a[5])]
        return self.emit("wgmma", args, [*total, *left], int(shape[2]), total, [*left, *slots])

    def _mma(self, parts: list[str], a: list[str]) -> None:
        shape = next((m for m in map(re.compile(r"m16n8k(\d+)").fullmatch, parts) if m), None)
        types = parts[-4:]
        if not shape or types[0] != "f32" or types[1] not in PRODUCT_TYPES or types[3] != "f32":
            raise self.refuse(".".join(parts))
        d, *given = (self.vector(x, 4) for x in a)
        sources = [slot for vector in given for slot in vector]
        self.emit("mma", [PRODUCT_TYPES[types[1]]], [*d, *sources], int(shape[1]), d, sources)

    def _ldmatrix(self, parts: list[str], a: list[str]) -> None:
        self._matrices(parts, a[0], a[1])

    def _stmatrix(self, parts: list[str], a: list[str]) -> None:
        self._matrices(parts, a[1], a[0])

    def _matrices(self, parts: list[str], registers: str, place: str) -> None:
        if "m8n8" not in parts or parts[-1] != "b16":
            raise self.refuse(".".join(parts))
        base, offset = self.address(place)
        where, slots = self.operand(base, 4), self.vector(registers, 4)
        loads = parts[0] == "ldmatrix"
        reads = [where] if loads else [where, *slots]
        self.emit(parts[0], [where, int("trans" in parts)], slots, offset, slots if loads else (), reads)

    def _shfl(self, parts: list[str], a: list[str]) -> None:
        to, _, inside = a[0].partition("|")
        slots = [self.operand(x, 4) for x in (to, *a[1:5], inside or "_")]
        mode = ("idx", "up", "down", "bfly").index(parts[2])
        self.emit("shfl", slots, value=mode, writes=[slots[0], slots[5]], reads=slots[1:5])


def decode(text: str, find: Callable[[str], tuple[int, str]]) -> Kernel:
    """Decodes the first kernel of a PTX module; find: see Decoder."""
    d = Decoder(find)
    head, name, declared, body = re.split(r"\.entry\s+(\w+)\s*\(([^)]*)\)", text, maxsplit=1)
    for symbol in re.findall(r"\.extern \.shared .*? (\w+)\[\]", head):
        d.symbols[symbol] = WINDOW
    at = 0
    for kind, param in re.findall(r"\.param\s+\.(\w+)\s+(?:\.ptr\s+\S+\s+\.align\s+\d+\s+)?(\w+)", declared):
        size = size_of(kind)
        at = -(-at // size) * size
        d.params[param] = (size, at)
        at += size
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text))
    sources: dict[int, str] = {}
    place = ""
    first = text[: len(text) - len(body)].count("\n") + 1
    for number, raw in enumerate(body.split("\n"), first):
        line, d.line = raw.partition("//")[0].strip(), number
        if match := re.match(r"\.loc\s+(\d+)\s+(\d+)", line):
            place = f"{files.get(match[1], '?').rpartition('/')[2]}:{match[2]}"
            continue
        sources[number] = place
        if match := re.fullmatch(r"(\$?[\w$]+):", line):
            d.labels[match[1]] = len(d.rows)
            continue
        if re.match(r"\.(file|pragma|section|branchtargets|\w*ntid|min|max)", line):
            continue
        for part in filter(None, (x and x.strip() for x in re.split(r"(^[{}]|[{}]$)|;", line))):
            if part == "{":
                d.scopes.append({})
            elif part == "}":
                d.scopes.pop()
            elif match := re.match(r"\.reg\s+\.(\w+)\s+(.*)", part):
                d.declare(match[1], match[2])
            else:
                d.statement(part)
        if line == "}" and len(d.scopes) == 1:
            break
    d.guard = (-1, 0)
    d.emit("ret")
    code = np.array(d.rows, INSTRUCTION)
    for i, label in d.jumps:
        code[i]["value"] = d.labels[label]
    constants = np.array(
        [(slot, *key) for key, slot in d.constants.items()], [("slot", "i4"), ("value", "u8"), ("wide", "i4")]
    )
    return Kernel(
        name, list(d.params.values()), code, np.array(d.pool, np.int32), constants, d.slots, sources
    )
