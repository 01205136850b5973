"""Reads Hopper's machine code: instructions with their control codes, branches, loops and fences.

nvdisasm, which comes in Triton's wheel, prints two 64-bit words per instruction. The upper 23 bits
of the second word are the control code that ptxas wrote, from bit 41 up:

    4 bits   stall     cycles before the warp's next instruction may issue
    1        yield     a hint to the scheduler, not read here
    3        write     scoreboard that is released when the result is there; 7: none
    3        read      scoreboard that is released when the operands have been read; 7: none
    6        wait      a bit for each scoreboard that must be free before this instruction issues

Source: Z. Jia et al., Dissecting the NVIDIA Volta GPU architecture via microbenchmarking
(arXiv:1804.06826), section 2; the places of the bits are unchanged on Hopper.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_CODE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?P<text>.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
_CONTROL = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"(\.L_\w+):")
_TEXT = re.compile(r"(?:(?P<predicate>@!?U?P\w+)\s+)?(?P<opcode>\S+)\s*(?P<operands>.*)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


@dataclass(frozen=True)
class Instruction:
    """One instruction. target: the position that a branch goes to, or None."""

    opcode: str
    operands: str
    predicate: str
    stall: int
    write: int
    read: int
    wait: int
    target: int | None = None

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Code:
    """The machine code of a kernel, and what a program of it occupies.

    registers and stack are per thread, stack and shared in bytes.
    """

    instructions: tuple[Instruction, ...]
    registers: int
    stack: int
    shared: int
    warps: int


def disassemble(cubin: bytes) -> str:
    """Returns the machine code of a compiled kernel as nvdisasm prints it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "nvdisasm", "-hex", "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse(text: str) -> tuple[Instruction, ...]:
    """Returns the instructions of one kernel from what `disassemble` returned."""
    labels: dict[str, int] = {}
    words: list[tuple[str, int]] = []
    lines = iter(text.splitlines())
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(words)
        elif code := _CODE.match(line):
            control = _CONTROL.search(next(lines))
            if control is None:
                raise ValueError(
                    f"no control code follows {line.strip()!r}; is this nvdisasm -hex?"
                )
            words.append((code["text"], int(control[1], 16) >> 41))
    if not words:
        raise ValueError("no instructions found; is this what nvdisasm -hex prints?")
    return tuple(_instruction(text, control, labels) for text, control in words)


def _instruction(text: str, control: int, labels: dict[str, int]) -> Instruction:
    parts = _TEXT.match(text)
    assert parts is not None
    target = None
    if parts["opcode"].startswith("BRA") and (label := _TARGET.search(parts["operands"])):
        target = labels.get(label[1])
    return Instruction(
        parts["opcode"], parts["operands"].rstrip(" ;"), parts["predicate"] or "", control & 15,
        control >> 5 & 7, control >> 8 & 7, control >> 11 & 63, target,
    )  # fmt: skip


def loops(instructions: tuple[Instruction, ...]) -> list[tuple[int, int]]:
    """Returns the first and the last position of every loop, outer loops before inner ones.

    A loop ends with a branch backward. The endless branch to itself that follows a kernel is none.
    """
    found = [
        (instruction.target, i)
        for i, instruction in enumerate(instructions)
        if instruction.target is not None and instruction.target < i
    ]
    return sorted(found, key=lambda loop: (loop[0], -loop[1]))


def count_unfenced(instructions: tuple[Instruction, ...], *, stores: bool = False) -> int:
    """Counts matrix products (HGMMA) that may read shared memory before it is visible to them.

    They read it by another path than stores write it, so a fence must lie between, on every way
    through the kernel. In a kernel that copies to shared memory asynchronously (LDGSTS), what
    counts as a write is the wait for copies: its other stores move a tensor to another layout, and
    no product reads them, unless `stores` says so. In any other kernel every store to shared memory
    counts.

    Source: NVIDIA, PTX ISA 8.8, sections "Async proxy" and "wgmma.fence".
    """
    writes = (
        {"DEPBAR"} if any(instruction.name == "LDGSTS" for instruction in instructions) else set()
    )
    if stores or not writes:
        writes |= {"STS", "STSM"}
    unseen: list[bool | None] = [None] * len(instructions)  # None: not reached yet
    open_ways = [(0, False)]
    while open_ways:
        i, written = open_ways.pop()
        while i < len(instructions) and unseen[i] is not True and (unseen[i] is None or written):
            instruction = instructions[i]
            unseen[i] = written
            if instruction.opcode.startswith("FENCE.VIEW.ASYNC"):
                written = False
            elif instruction.name in writes:
                written = True
            if instruction.target is not None:
                open_ways.append((instruction.target, written))
            if not instruction.predicate and (
                instruction.name == "EXIT" or instruction.target is not None
            ):
                break
            i += 1
    return sum(
        x.name == "HGMMA" and bool(written) for x, written in zip(instructions, unseen, strict=True)
    )


def is_followed(instructions: tuple[Instruction, ...], i: int) -> bool:
    """Returns whether the branch forward at position i is taken by a program with work to do.

    Without a predicate it is. With one, it skips an early return, or leaves the kernel early: the
    longer way to an exit is the one with work. Or it skips a jump over a loop, which runs. Any
    other condition guards a part of the kernel, which is run.
    """
    branch = instructions[i]
    assert branch.target is not None
    if not branch.predicate:
        return True
    jump = instructions[branch.target - 1]
    if jump.target is not None and not jump.predicate and jump.target > branch.target > i + 1:
        return any(
            branch.target <= first and last < jump.target for first, last in loops(instructions)
        )

    def way(start: int) -> int:
        return next(
            (j for j in range(start, len(instructions)) if _is_exit(instructions[j])),
            len(instructions),
        )

    here, there = way(i + 1), way(branch.target)
    return here < branch.target and here - i < there - branch.target


def _is_exit(instruction: Instruction) -> bool:
    return instruction.name == "EXIT" and not instruction.predicate
