"""Runs a kernel's machine code on a model of one SM: `run` returns seconds, waits and use of the
memory.

The model is simulate.cpp, which `backends.compiler` compiles on first use.
"""

import json
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from delta_trn.backends import compiler
from delta_trn.triton_kernels.sass import Code, Instruction, is_followed, loops
from tools.estimate import machine

SOURCE = Path(__file__).with_name("simulate.cpp")
# programs simulated of a kernel whose programs are all alike and short; more are extrapolated
ENOUGH = 60


@dataclass(frozen=True)
class Work:
    """What a launch asks of the device.

    programs    of the launch
    products    turns of the kernel's loops with matrix products, in the order of the source
    others      turns of its other loops
    load_bytes  that must come from memory, each once
    mask        the share of tiles that is not masked off
    serial      whether a program is a long chain, so that every program is simulated
    idle        whether every program takes the kernel's first early exit
    """

    programs: int
    load_bytes: float
    products: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    mask: float = 1.0
    serial: bool = False
    idle: bool = False


@dataclass(frozen=True)
class Simulation:
    """What the busiest SM does.

    resident    programs at once, and `limit`, what keeps more from running
    memory      how busy the SM's part of the memory's bandwidth was, at most 1
    waits       cause -> share of the cycles in which warps waited
    """

    seconds: float
    resident: int
    limit: str
    memory: float
    waits: dict[str, float]


def run(code: Code, work: Work) -> Simulation:
    """Simulates the busiest SM of a launch. Raises ValueError for a program that no SM can hold."""
    most, limit = machine.residence(code)
    if not most:
        raise ValueError(
            f"one program exceeds an SM's {limit}: {code.registers} registers, {code.shared} B"
        )
    if work.idle:
        at = next(
            i for i, instruction in enumerate(code.instructions) if instruction.name == "EXIT"
        )
        taken = replace(code.instructions[at], predicate="")
        code = replace(code, instructions=(*code.instructions[:at], taken))
    turns = loop_trips(code.instructions, work)
    here = -(-work.programs // machine.PROCESSORS)
    simulated = here if work.serial else min(here, ENOUGH)
    resident = min(most, simulated)
    costs = _costs(code, resident, work.mask)
    repeats = _repeats(code.instructions, turns)
    loaded = sum(
        cost.size * times
        for instruction, cost, times in zip(code.instructions, costs, repeats, strict=True)
        if instruction.name in ("LDG", "LDGSTS")
    )
    from_memory = min(1.0, work.load_bytes / max(1.0, loaded * code.warps * work.programs))
    # fewer programs than SMs share the bandwidth among fewer
    share = max(1.0, here * machine.PROCESSORS / work.programs) / machine.PROCESSORS / machine.CLOCK
    settings = machine.MACHINE | {
        "warps": code.warps,
        "programs": simulated,
        "resident": resident,
        "load_rate": min(
            60.0, share / max(from_memory / machine.MEMORY_BYTES, 1 / machine.L2_BYTES)
        ),
        "store_rate": min(60.0, share * machine.MEMORY_BYTES),
    }
    answer = _simulate(code.instructions, costs, turns, settings)
    waited = sum(answer["waits"]) or 1
    return Simulation(
        answer["cycles"] / machine.CLOCK * here / simulated,
        most,
        limit,
        answer["memory"],
        {
            cause: cycles / waited
            for cause, cycles in zip(machine.CAUSES, answer["waits"], strict=True)
        },
    )


def loop_trips(instructions: tuple[Instruction, ...], work: Work) -> dict[int, int]:
    """Returns the turns of every loop by the position of its last instruction.

    The compiler unrolls loops altogether, those of fewest turns first; the others keep their order.
    Raises ValueError where the machine code has more loops than the source.
    """
    turns: dict[int, int] = {}
    for products, expected in ((True, work.products), (False, work.others)):
        found = [
            last
            for first, last in loops(instructions)
            if any(x.name in ("HGMMA", "HMMA") for x in instructions[first:last]) == products
        ]
        if len(found) > len(expected):
            kind = "with" if products else "without"
            raise ValueError(
                f"the machine code has {len(found)} loops {kind} matrix products, "
                f"expected at most {len(expected)}"
            )
        kept = sorted(sorted(range(len(expected)), key=lambda i: -expected[i])[: len(found)])
        turns |= {last: expected[i] for last, i in zip(found, kept, strict=True)}
    return turns


def _costs(code: Code, resident: int, mask: float) -> list[machine.Cost]:
    """Returns the cost of every instruction. Of spilled registers, an even part lies in L2."""
    missing, due, costs = machine.spilled_past_l1(code, resident), 0.0, []
    for instruction in code.instructions:
        cost = machine.cost(instruction, mask)
        if instruction.name in ("LDL", "STL"):
            due += missing
            if due >= 1:
                due -= 1
                cost = machine.spill(instruction, cost)
        costs.append(cost)
    return costs


def _repeats(instructions: tuple[Instruction, ...], turns: dict[int, int]) -> list[int]:
    """Returns how often each instruction runs."""
    times = [1] * len(instructions)
    for first, last in loops(instructions):
        for i in range(first, last + 1):
            times[i] *= turns[last]
    return times


def _simulate(instructions, costs, turns, settings) -> dict:
    lines = [
        str(len(settings)),
        *(f"{name} {value}" for name, value in settings.items()),
        str(len(costs)),
    ]
    for i, (x, cost) in enumerate(zip(instructions, costs, strict=True)):
        target = -1 if x.target is None or x.target == i else x.target
        if target > i:
            cost = replace(cost, argument=float(is_followed(instructions, i)))
        lines.append(
            f"{cost.kind} {x.stall} {x.write} {x.read} {x.wait} {cost.interval} {cost.latency} "
            f"{cost.reads} {cost.size} {cost.waves} {cost.argument:.0f} {cost.cause} {target} "
            f"{turns.get(i, 1)}"
        )
    done = subprocess.run(
        [simulator()], input="\n".join(lines) + "\n", capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the simulator failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


@cache
def simulator() -> Path:
    """Returns the compiled simulator. Raises NotCompiled where there is no C++ compiler."""
    return compiler.build(SOURCE, flags="-std=c++17 -O2")[0]
