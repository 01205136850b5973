"""What the estimate knows of an H200 and an H100: rates, latencies, and what each instruction
costs.

Sources, by line of MACHINE, machine.csv and `cost`:

    clock, processors, bytes per second    NVIDIA's H200 data sheet: 1.98 GHz boost and 4.8 TB/s;
                                           1.755 GHz is what it holds under load, 4.3 TB/s what a
                                           copy reaches
    latencies, pipes, shared memory        arXiv:2402.13499 and arXiv:2501.12084, which measured
                                           Hopper; arXiv:1804.06826 for what is as it was on Volta
    wgmma                                  N / 2 cycles for m64nNk16 in 16 bits: 990 TFLOP/s at
                                           1.755 GHz
    barrier, queues, start of a program    plausible values

`calibration` holds the whole against measurements. None of the numbers here was fitted to them.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from delta_trn.triton_kernels.sass import Code, Instruction

CLOCK = 1.755e9
PROCESSORS = 132
# bytes per second that a copy reaches, from memory (an H100's has 3.35 TB/s) and from L2; the
# device's MiB
DEVICES = {"h200": (4.3e12, 6.5e12, 143771), "h100": (3.0e12, 5.5e12, 81559)}
MEMORY_BYTES, L2_BYTES, MEBIBYTES = DEVICES["h200"]
LAUNCH_SECONDS = 2.5e-6  # of a kernel after another, as in a CUDA graph

# cycles, bytes per cycle, bytes
MACHINE = {
    "memory_latency": 650.0,
    "l2_latency": 280.0,
    "program_start": 400.0,
    "stagger": 37.0,  # between programs that start together
    "barrier": 18.0,
    "wgmma_drain": 30.0,
    "wgmma_queue": 64.0,  # how far issue may run ahead of the tensor cores
    "shared_queue": 48.0,  # and of the shared-memory pipe
    "l1_port": 64.0,
    "burst": 49152.0,  # what may be underway beyond the steady rate
    "commit": 2.0,
    "branch": 10.0,
}
REGISTERS = 65536  # of an SM
SHARED_BYTES = 233472
WARPS = 64
PROGRAMS = 32
RESERVED = 1024  # shared memory that every program occupies besides its own
L1_BYTES = 256 * 1024
# the parts of L1 that can be set aside as shared memory
CARVEOUTS = tuple(1024 * kilobytes for kilobytes in (0, 8, 16, 32, 64, 100, 132, 164, 196, 228))

# why a warp waited, in the order of simulate.cpp
CAUSES = (
    "arithmetic", "shared memory", "global loads", "asynchronous copies", "special functions",
    "matrix products", "barriers", "constants", "operand reads", "fences", "busy units",
)  # fmt: skip
_PIPES = {
    name: float(i) for i, name in enumerate(("alu", "fma", "heavy", "fp64", "special", "uniform"))
}


def choose(device: str) -> None:
    """Lets all estimates of this process be of one of DEVICES."""
    global MEMORY_BYTES, L2_BYTES, MEBIBYTES
    MEMORY_BYTES, L2_BYTES, MEBIBYTES = DEVICES[device]


@dataclass(frozen=True)
class Cost:
    """What an instruction occupies.

    kind        the case of simulate.cpp
    interval    cycles for which its unit takes no other
    latency     cycles to its result
    reads       cycles until its operands have been read
    size        bytes to or from memory
    waves       cycles of the shared-memory pipe
    argument    by kind: the pipe, 1 for L2 instead of memory, groups that may stay open, 1 for
                always
    cause       why one waits for it, an index of CAUSES
    """

    kind: str
    interval: float = 1
    latency: float = 2
    reads: float = 0
    size: float = 0
    waves: float = 0
    argument: float = 0
    cause: int = 0


def residence(code: Code) -> tuple[int, str]:
    """Returns how many programs of `code` an SM holds, 0 where one does not fit,
    and what limits them.
    """
    registers = -(-code.registers // 8) * 8 * 32 * code.warps
    limits = {
        "registers": REGISTERS // registers,
        "shared memory": SHARED_BYTES // (code.shared + RESERVED),
        "warps": WARPS // code.warps,
        "programs": PROGRAMS,
    }
    limit = min(limits, key=limits.__getitem__)
    return limits[limit], limit


def spilled_past_l1(code: Code, programs: int) -> float:
    """Returns the share of the stack that the L1 left over by shared memory cannot hold."""
    stack = code.stack * 32 * code.warps * programs
    needed = (code.shared + RESERVED) * programs
    carveout = next((size for size in CARVEOUTS if size >= needed), L1_BYTES)
    left = max(0, L1_BYTES - carveout - 8 * 1024)
    return max(0.0, 1 - left / stack) if stack else 0.0


def _width(opcode: str) -> int:
    """Returns the bytes that a load or store moves per thread."""
    for modifier, width in (
        (".128", 16),
        (".64", 8),
        (".U16", 2),
        (".S16", 2),
        (".U8", 1),
        (".S8", 1),
    ):
        if modifier in opcode:
            return width
    return 4


def _pipe(name: str, interval: float, latency: float, reads: float = 0, cause: int = 0) -> Cost:
    return Cost("pipe", interval, latency, reads, argument=_PIPES[name], cause=cause)


def _global(name: str, opcode: str, mask: float) -> Cost:
    """Costs of global loads and stores. mask: the share of a tile that is not masked off.

    Loads of two bytes are a token's g or beta, a stride apart; those of eight are row factors that
    many lanes share.
    """
    width = _width(opcode)
    size = 32 * width * (mask if width == 16 else 1)
    waves = max(1.0, size / 128)
    if name == "LDG":
        size, waves = {16: (size, 4.0), 8: (32.0, 1.0), 4: (128.0, 1.0)}.get(width, (512.0, 8.0))
        return Cost("load", 2, 0, 12, size, waves, cause=2)
    if name == "STG":
        return Cost("store", 2, 0, 14, size, waves)
    return Cost("copy", 2, 0, 12, size, waves)


def _wgmma(instruction: Instruction) -> Cost:
    shape = re.search(r"64x(\d+)x\d+", instruction.opcode)
    if shape is None:
        raise ValueError(f"no shape in the opcode {instruction.opcode!r}")
    columns = int(shape[1])
    from_shared = instruction.operands.split(",")[1].strip().startswith("gdesc")
    size = columns * 32 + (64 * 32 if from_shared else 0)
    # four warps issue it, each for its quarter of the tensor cores and of the reads
    last = float("gsb0" in instruction.operands)
    return Cost("wgmma", columns / 2, reads=8, waves=size / 128 / 4, argument=last, cause=5)


def _read(row: dict[str, str]) -> Cost:
    interval, latency, reads, waves = (
        float(row[n]) for n in ("interval", "latency", "reads", "waves")
    )
    pipe, cause = _PIPES.get(row["pipe"], 0.0), CAUSES.index(row["cause"]) if row["cause"] else 0
    return Cost(row["kind"], interval, latency, reads, waves=waves, argument=pipe, cause=cause)


with Path(__file__).with_suffix(".csv").open() as _file:
    _COSTS = {name: _read(row) for row in csv.DictReader(_file) for name in row["opcodes"].split()}


def cost(instruction: Instruction, mask: float = 1.0) -> Cost:
    """Returns what `instruction` costs, spilled registers in L1;
    anything unknown is integer arithmetic.
    """
    name, opcode = instruction.name, instruction.opcode
    if name in _COSTS:
        return _COSTS[name]
    if name in ("LDG", "STG", "LDGSTS"):
        return _global(name, opcode, mask)
    waves = max(1.0, _width(opcode) / 4)
    match name:
        case "IMAD":
            wide = re.search("WIDE|HI", opcode) and not re.search(r"\.(MOV|SHL|IADD)", opcode)
            return _pipe("heavy", 4 if wide else 2, 5)
        case "LDS" if instruction.predicate == "@!PT":
            return Cost("plain")
        case "LDS":
            return Cost("shared", 2, 23, 8, waves=waves, cause=1)
        case "STS":
            return Cost("shared", 2, 20, 8, waves=waves, cause=1)
        case "LDSM" | "STSM":
            return Cost("shared", 2, 25, 8, waves={"4": 4, "2": 2}.get(opcode[-1], 1), cause=1)
        case "LDL" | "STL":
            return Cost(
                "shared", 2, 28, 8, size=max(32 * _width(opcode), 128), waves=waves, cause=1
            )
        case "DEPBAR":
            place = re.search(r"SB(\d), 0x([0-9a-f]+)", instruction.operands)
            if place is None:
                raise ValueError(f"cannot read DEPBAR {instruction.operands}")
            return Cost("await_copies", argument=int(place[1]) * 256 + int(place[2], 16))
        case "HGMMA":
            return _wgmma(instruction)
        case "WARPGROUP":
            groups = re.search(r"0x([0-9a-f]+)", instruction.operands)
            if "DEPBAR" in opcode and groups:
                return Cost("await_wgmma", argument=int(groups[1], 16))
            return Cost("plain")
        case "EXIT":
            return Cost("plain" if instruction.predicate else "exit")
        case "BRA":
            return Cost("branch")
    return _pipe("alu", 2, 5, 4)


def spill(instruction: Instruction, cost: Cost) -> Cost:
    """Returns the cost of a spilled register that lies in L2 instead of L1."""
    kind, reads = ("load", 12) if instruction.name == "LDL" else ("store", 14)
    return Cost(kind, 2, 0, reads, cost.size, cost.waves, argument=1, cause=2)
