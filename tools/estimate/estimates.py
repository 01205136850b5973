"""Times of kernels, estimated: simulated, then multiplied by what the calibration found.

Nothing here was measured on our kernels. UNCERTAINTY is what the comparison with published times of
flash-linear-attention's kernels leaves open (see `calibration`): the forward kernels of another
project, on the same model, came within 4% after calibration; kernels of another kind may be further
off.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import triton

from delta_trn.triton_kernels.compile_only import HOPPER, SHARED_BYTES, resources, source
from delta_trn.triton_kernels.sass import Code, disassemble, parse
from delta_trn.triton_kernels.variants import Variant
from tools.estimate import machine
from tools.estimate.simulate import Simulation, Work, run
from tools.estimate.work import Launch

# measured over simulated: kernels that are parallel over chunks, or held up by memory; and serial
# chains
PARALLEL, SERIAL = 1.10, 0.87
# of forward and of backward: a time may be off by this part, either way
UNCERTAINTY = {False: 0.2, True: 0.3}


@dataclass(frozen=True)
class Estimate:
    """What a launch takes; of its code, only what a program occupies.

    code and simulation are None for a kernel of which only the bytes count.
    """

    name: str
    options: str
    backward: bool
    microseconds: float
    code: Code | None = None
    simulation: Simulation | None = None


def compile_code(variant: Variant, dtype: str = "bf16") -> Code:
    """Compiles a variant for Hopper and reads its machine code."""
    compiled = triton.compile(source(dtype, variant), HOPPER, variant.tile.options())
    cubin = compiled.asm["cubin"]
    return Code(
        parse(disassemble(cubin)), *resources(cubin), compiled.metadata.shared, variant.tile.warps
    )


def factor(simulation: Simulation, *, serial: bool) -> float:
    """Returns measured over simulated: a chain's depends on how much
    of its time the memory is busy.
    """
    busy = min(1.0, simulation.memory) if serial else 1.0
    return SERIAL + (PARALLEL - SERIAL) * busy


def time_move(size: float, count: int = 1) -> float:
    """Returns the microseconds of `count` kernels that move `size` bytes
    in all and do little else.
    """
    return 1e6 * (PARALLEL * size / machine.MEMORY_BYTES + count * machine.LAUNCH_SECONDS)


class Estimator:
    """Estimates launches; kernels that occur twice are compiled once."""

    def __init__(self) -> None:
        self._codes: dict[str, Code] = {}
        self._estimates: dict[str, Estimate] = {}

    def estimate(self, launch: Launch) -> Estimate:
        """Returns what a launch takes. Raises ValueError where a program exceeds an SM."""
        if launch.variant is None:
            return Estimate(
                launch.name, "", launch.backward, time_move(launch.work.load_bytes, launch.count)
            )
        variant = launch.variant
        key = (
            f"{variant.function} {variant.tile} "
            f"{sorted((n, str(v)) for n, v in variant.values.items())}"
        )
        # types alone tell a state in bfloat16 from one in float32
        key += f" {variant.multiples} {variant.signature('bf16')}"
        if key not in self._codes:
            self._codes[key] = compile_code(variant)
        code = self._codes[key]
        if code.shared > SHARED_BYTES:
            raise ValueError(f"{launch.name}: shared memory {code.shared} exceeds {SHARED_BYTES}")
        key += str(launch.work)
        if key not in self._estimates:
            self._estimates[key] = of_code(launch, code)
        return replace(self._estimates[key], name=launch.name, backward=launch.backward)

    def fastest(self, launches: Iterable[Launch]) -> Estimate:
        """Returns the fastest of several launches of a kernel; those that exceed an SM drop out."""
        found, excess = [], []
        for launch in launches:
            try:
                found.append(self.estimate(launch))
            except ValueError as failure:
                excess.append(str(failure))
        if not found:
            raise ValueError("; ".join(excess))
        return min(found, key=lambda estimate: estimate.microseconds)


def of_code(launch: Launch, code: Code) -> Estimate:
    """Returns what a launch of compiled code takes."""
    work: Work = launch.work
    simulation = run(code, work)
    seconds = simulation.seconds * factor(simulation, serial=work.serial) + machine.LAUNCH_SECONDS
    options = "" if launch.variant is None else launch.variant.options
    return Estimate(
        launch.name,
        options,
        launch.backward,
        1e6 * seconds,
        replace(code, instructions=()),
        simulation,
    )
