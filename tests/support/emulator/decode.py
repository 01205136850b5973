"""Decodes PTX into the list of instructions that emulator.cpp executes.

A register is a slot of 32 words, of 64 bits two of them; a constant is a register that is filled
once. What is not understood raises Unsupported, which names the instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 1024  # of machine.h
FIELDS = "op line guard negated args list count writes copies value"
INSTRUCTION = np.dtype(
    [
        (name, "i8" if name == "value" else "i4", 8 if name == "args" else ())
        for name in FIELDS.split()
    ],
    align=True,
)
CONSTANT = np.dtype([("value", "u8"), ("slot", "i4"), ("wide", "i4")])
# These registers are the first slots, see run_block in emulator.cpp.
SPECIAL = [f"%{name}.{axis}" for name in ("tid", "ctaid", "ntid", "nctaid") for axis in "xyz"]
SPECIAL += ["%laneid", "%warpid"]
PRODUCT_TYPES = {"bf16": 0, "f16": 1, "tf32": 2}  # as in products.h
# They order nothing that the emulator leaves unordered: lanes of a warp, and the memory of one
# block.
IGNORED = {"bar.warp.sync", "membar.cta", "membar.gl", "fence.acq_rel.cta", "fence.sc.cta"}


class Unsupported(Exception):
    """The emulator does not know an instruction, or a form of one; the message names it."""


def size_of(kind: str) -> int:
    """Returns the bytes of a type such as b32 or bf16x2."""
    return 4 if kind in ("pred", "f16x2", "bf16x2") else int(re.sub(r"\D+", "", kind)) // 8


@dataclass(frozen=True)
class Kernel:
    """A decoded kernel.

    constants   value, slot, and whether it has 64 bits; the first are the parameters, without a
                value
    """

    name: str
    code: np.ndarray
    pool: np.ndarray
    constants: np.ndarray
    slots: int


def split(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text)] if text.strip() else []


class Decoder:
    """Holds what decoding a kernel has found so far. find:
    name -> number and sizes of an operation.
    """

    def __init__(self, find: Callable[[str], tuple[int, str]]) -> None:
        self.find = find
        self.slots, self.line = len(SPECIAL), 0
        # register -> slot, bytes
        self.scopes = [{name: (slot, 4) for slot, name in enumerate(SPECIAL)}]
        self.constants: dict[tuple[int, bool], int] = {}
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
            for register in (
                [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]
            ):
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
        if match := re.fullmatch(rf"0[fFdD]([0-9A-Fa-f]{{{2 * size}}})", text):
            return self.constant(int(match[1], 16), size)
        if not re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
            raise self.refuse(f"the operand {text}")
        return self.constant(int(text.rstrip("U"), 0), size)

    def vector(self, text: str, size: int) -> list[int]:
        return [
            self.operand(name, size)
            for name in split(text.strip("{} ") if text[0] == "{" else text)
        ]

    def address(self, text: str) -> tuple[str, int]:
        """Returns the register, symbol or parameter of `[a+8]`, and what is added to it."""
        match = re.fullmatch(r"\[\s*([\w%$.]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        if not match:
            raise self.refuse(f"the address {text}")
        return match[1], int(match[2] or "0", 0)

    def emit(
        self, name: str, args: Sequence[int] = (), registers: Sequence[int] = (), writes: int = 0,
        value: int = 0,
    ) -> None:  # fmt: skip
        """Appends an instruction; the first `writes` of the registers are written,
        the others read.
        """
        op, _ = self.find(name)
        if op < 0:
            raise self.refuse(name)
        filled = (*args, *[-1] * (8 - len(args)))
        list_ = len(self.pool), len(registers), writes, int(name.startswith("mov."))
        self.rows.append((op, self.line, *self.guard, filled, *list_, value))
        self.pool += registers

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
            return
        elif opcode.startswith("fence.proxy.async"):
            self.emit("fence.proxy.async")
        elif special:
            special(parts, a)
        else:
            self.lanes(parts, a)

    def lanes(self, parts: list[str], a: list[str]) -> None:
        """Decodes an operation that computes each lane by itself."""
        name = ".".join(part for part in parts if part != "rn")
        if parts[0] in ("min", "max") and len(a) == 4:  # Blackwell's, of three numbers
            name = name.replace(".", "3.", 1)
        op, sizes = self.find(name)
        if op < 0 or len(sizes) != len(a):
            raise self.refuse(".".join(parts))
        slots = [self.operand(x, int(size)) for x, size in zip(a, sizes, strict=True)]
        self.emit(name, slots, slots, 1)

    def _cvt(self, parts: list[str], a: list[str]) -> None:
        """A register may be wider than the type that is converted:
        then its lower half is taken first.
        """
        known = self.register(a[1])
        if known and known[1] == 8 and size_of(parts[-1]) < 8:
            half = self.allot(False)
            self.scopes[-1][f"lower half {half}"] = (half, 4)
            self.emit("cvt.u32.u64", [half, known[0]], [half, known[0]], 1)
            a = [a[0], f"lower half {half}"]
        self.lanes(parts, a)

    def _mov(self, parts: list[str], a: list[str]) -> None:
        """A vector in braces is packed into a register, or is its parts."""
        if a[1].startswith("{"):
            vector = split(a[1][1:-1])
            self.lanes(["pack", str(len(vector)), parts[1]], [a[0], *vector])
        elif a[0].startswith("{"):
            vector = split(a[0][1:-1])
            for i, part in enumerate(vector):
                if part != "_":
                    self.lanes(["part", str(len(vector)), parts[1]], [part, a[1], str(i)])
        else:
            self.lanes(parts, a)

    def _access(self, parts: list[str], a: list[str]) -> None:
        head, (registers, place) = parts[0], a if parts[0] == "ld" else a[::-1]
        base, offset = self.address(place)
        if parts[1] == "param":  # it is a register of 64 bits, its sign extended
            known = self.register(registers)
            if (
                not known
                or offset
                or (known[1] == 8 and parts[2] not in ("b64", "u64", "s64", "s32"))
            ):
                raise self.refuse(".".join(parts))
            mov = {8: ["mov", "b64"], 4: ["cvt", "u32", "u64"], 2: ["cvt", "u16", "u64"]}[known[1]]
            return self.lanes(mov, [registers, base])
        space = {"global", "shared"} & {part.partition("::")[0] for part in parts}
        if not space or {"relaxed", "acquire", "release"} & {*parts} or parts[-1][0] != "b":
            raise self.refuse(".".join(parts))
        size, known = size_of(parts[-1]), self.register(registers)
        args = [self.operand(base, 8 if space == {"global"} else 4), size]
        if head == "ld" and known and size < known[1] == 8:  # the upper half is zero
            half = self.allot(False)
            self.emit(f"ld.{space.pop()}", args, [half], 1, offset)
            return self.emit("cvt.u64.u32", [known[0], half], [known[0], half], 1)
        slots = self.vector(registers, size)
        return self.emit(f"{head}.{space.pop()}", args, slots, len(slots) * (head == "ld"), offset)

    _ld = _st = _access

    def _cp(self, parts: list[str], a: list[str]) -> None:
        if parts[1] != "async" or parts[2] not in (
            "commit_group",
            "wait_group",
            "wait_all",
            "ca",
            "cg",
        ):
            raise self.refuse(".".join(parts))
        if parts[2] == "commit_group":
            return self.emit("cp.async.commit_group")
        if parts[2] in ("wait_group", "wait_all"):
            return self.emit("cp.async.wait_group", value=int(a[0], 0) if a else -1)
        (to, to_offset), (of, of_offset) = self.address(a[0]), self.address(a[1])
        slots = [
            self.operand(to, 4),
            self.operand(of, 8),
            self.operand(a[3], 4) if len(a) > 3 else -1,
        ]
        return self.emit("cp.async", [*slots, to_offset, of_offset], slots, value=int(a[2], 0))

    def _wgmma(self, parts: list[str], a: list[str]) -> None:
        if parts[1] in ("fence", "commit_group", "wait_group"):
            return self.emit(f"wgmma.{parts[1]}", value=int(a[0], 0) if a else 0)
        shape = re.fullmatch(r"m64n(\d+)k(\d+)", parts[4])
        known = parts[5] == "f32" and parts[6] == parts[7] and parts[6] in PRODUCT_TYPES
        if not shape or not known or a[4:6] != ["1", "1"]:
            raise self.refuse(".".join(parts))
        total = self.vector(a[0], 4)
        left = self.vector(a[1], 4) if a[1].startswith("{") else []
        slots = [
            -1 if left else self.operand(a[1], 8),
            self.operand(a[2], 8),
            self.operand(a[3], 4),
        ]
        turned = [int(x) for x in a[6:]]  # A's flag is there only where A is in shared memory
        flags = 0 if not turned else turned[-1] << 1 | (turned[0] if len(turned) > 1 else 0)
        args = [*slots, PRODUCT_TYPES[parts[6]], int(shape[1]), flags]
        return self.emit("wgmma", args, [*total, *left], len(total), int(shape[2]))

    def _mma(self, parts: list[str], a: list[str]) -> None:
        shape = next((m for m in map(re.compile(r"m16n8k(\d+)").fullmatch, parts) if m), None)
        types = parts[-4:]
        if not shape or types[0] != "f32" or types[1] not in PRODUCT_TYPES or types[3] != "f32":
            raise self.refuse(".".join(parts))
        slots = [slot for x in a for slot in self.vector(x, 4)]
        self.emit("mma", [PRODUCT_TYPES[types[1]]], slots, 4, int(shape[1]))

    def _matrices(self, parts: list[str], a: list[str]) -> None:
        if "m8n8" not in parts or parts[-1] != "b16":
            raise self.refuse(".".join(parts))
        loads = parts[0] == "ldmatrix"
        registers, place = a if loads else a[::-1]
        base, offset = self.address(place)
        where, slots = self.operand(base, 4), self.vector(registers, 4)
        self.emit(parts[0], [where, int("trans" in parts)], slots, len(slots) * loads, offset)

    _ldmatrix = _stmatrix = _matrices

    def _shfl(self, parts: list[str], a: list[str]) -> None:
        to, _, inside = a[0].partition("|")
        slots = [self.operand(x, 4) for x in (to, *a[1:5], inside or "_")]
        mode = ("idx", "up", "down", "bfly").index(parts[2])
        self.emit("shfl", slots, [slots[0], slots[5], *slots[1:5]], 2, mode)


def decode(text: str, find: Callable[[str], tuple[int, str]]) -> Kernel:
    """Decodes the first kernel of a PTX module; find: see Decoder."""
    d = Decoder(find)
    head, name, declared, body = re.split(r"\.entry\s+(\w+)\s*\(([^)]*)\)", text, maxsplit=1)
    for symbol in re.findall(r"\.extern \.shared .*? (\w+)\[\]", head):
        d.scopes[0][symbol] = (d.constant(WINDOW, 4), 4)
    params = re.findall(r"\.param\s+\.\w+\s+(?:\.ptr\s+\S+\s+\.align\s+\d+\s+)?(\w+)", declared)
    for param in params:
        d.scopes[0][param] = (d.allot(True), 8)
    first = text[: len(text) - len(body)].count("\n") + 1
    for number, raw in enumerate(body.split("\n"), first):
        line, d.line = raw.partition("//")[0].strip(), number
        if match := re.fullmatch(r"(\$?[\w$]+):", line):
            d.labels[match[1]] = len(d.rows)
            continue
        if re.match(r"\.(loc|file|pragma|section|branchtargets|\w*ntid|min|max)", line):
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
    known = [(0, d.scopes[0][param][0], 1) for param in params]
    known += [(value, slot, wide) for (value, wide), slot in d.constants.items()]
    constants = np.array(known, CONSTANT)
    return Kernel(name, code, np.array(d.pool, np.int32), constants, d.slots)
