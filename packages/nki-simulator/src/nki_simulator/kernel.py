"""nki: `jit` and `simulate` as in NKI, and `record`, which also returns what the run did."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_simulator import isa, language, subset
from nki_simulator.core.cores import Pair, run_both
from nki_simulator.core.errors import NkiValidationError, StrictError
from nki_simulator.core.machine import Machine, Numerics, Record, running
from nki_simulator.core.memory import UNWRITTEN, MemoryRegion, NkiTensor
from nki_simulator.core.precedents import without_precedent
from nki_simulator.core.targets import Target, resolve

RELEASE = "DELTA_TRN_NKI"
STRICT = "DELTA_TRN_NKI_STRICT"
FUNCTIONS = "DELTA_TRN_NKI_FUNCTIONS"
WITHOUT = "DELTA_TRN_NKI_WITHOUT"


@dataclass(frozen=True)
class Run:
    """What one kernel call did. The peaks are live bytes per partition of SBUF,
    and live banks of PSUM.
    """

    outputs: Any
    target: Target
    instructions: int
    sbuf_peak: int
    psum_peak: int
    trace: tuple[Record, ...]
    unprecedented: tuple[
        str, ...
    ] = ()  # forms of instructions that no public kernel has; with a trace


class Kernel:
    """A kernel that @nki.jit decorates. Calling it runs it; kernel[2] runs it on two cores."""

    def __init__(
        self, function: Callable[..., Any], cores: int = 1, target: str | None = None
    ) -> None:
        self.function = function
        self.cores = cores
        self.target = target
        functools.update_wrapper(self, function)

    def __getitem__(self, cores: Any) -> "Kernel":
        degree = cores[0] if isinstance(cores, tuple) and len(cores) == 1 else cores
        if degree not in (1, 2):
            raise NkiValidationError(f"NKI only supports LNC 1 or 2, but got {degree}")
        return Kernel(self.function, degree, self.target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if running.machine is not None:
            raise StrictError(
                f"kernel {self.__name__} is called inside a kernel; leave helpers undecorated"  # pyright: ignore
            )
        return record(self, *args, trace=False, **kwargs).outputs


def jit(
    function: Callable[..., Any] | None = None, platform_target: str | None = None, **ignored: Any
) -> Any:
    """Decorate a kernel. Other options (`mode`, ...) are ignored, as in NKI.

    Runs without a target take `platform_target`.
    """
    decorate = functools.partial(Kernel, target=platform_target)
    return decorate if function is None else decorate(function)


def simulate(kernel: Kernel | Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a function that runs the kernel on NumPy arrays; the options are those of `record`."""

    @functools.wraps(kernel.function if isinstance(kernel, Kernel) else kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        return record(kernel, *args, trace=False, **options, **kwargs).outputs

    return run


def record(
    kernel: Kernel | Callable[..., Any],
    *args: Any,
    target: str | None = None,
    strict: bool | None = None,
    check_source: bool = True,
    numerics: Numerics | None = None,
    without: Iterable[str] | None = None,
    nki: str | None = None,
    trace: bool = True,
    **kwargs: Any,
) -> Run:
    """Run a kernel on NumPy arrays, and return its outputs, instruction trace and memory peaks.

    Arguments that the kernel writes are updated.

    target         trn1, trn2 or trn3
    nki            the release of NKI whose rules hold, "0.2.0" to "0.7.0"; without one, here or in
                   the environment variable DELTA_TRN_NKI, those of all of them
    strict         False drops the checks that AWS's simulator does not make; without it, here or as
                   0 in DELTA_TRN_NKI_STRICT, which reaches runs that a package starts itself, they
                   are made
    check_source   False drops only the check of the compiler's Python subset
    numerics       makes the engines less exact; without it, here or as exact or measured:SEED in
                   DELTA_TRN_NKI_FUNCTIONS for the Scalar engine's functions, they are exact
    without        names rules of the target (`core.chip`) that do not hold; without it, here or in
                   DELTA_TRN_NKI_WITHOUT, with semicolons between them, all do

    >>> from nki_simulator import nl, record, simulate
    >>> def double(x):
    ...     out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    ...     nl.store(out, nl.multiply(nl.load(x), 2.0))
    ...     return out
    >>> run = record(double, np.ones((2, 3), np.float32), nki="0.7.0")
    >>> run.sbuf_peak, [record.op for record in run.trace]
    (24, ['dma_copy', 'tensor_scalar', 'dma_copy'])
    >>> simulate(double, target="trn2", nki="0.7.0")(np.ones((2, 3), np.float32)).tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    if not isinstance(kernel, Kernel):
        kernel = Kernel(kernel)
    chip = resolve(target or kernel.target)
    nki = nki or os.environ.get(RELEASE) or None
    if strict is None:
        strict = _is_strict()
    if numerics is None:
        numerics = Numerics(functions=os.environ.get(FUNCTIONS) or "exact")
    if without is None:
        without = [name for name in os.environ.get(WITHOUT, "").split(";") if name]
    if kernel.cores == 2 and chip.generation == 2:
        raise NkiValidationError(f"LNC 2 is not supported on {chip.name}, only LNC 1")
    if strict and check_source:
        subset.check(kernel, nki)
    options: Any = {"strict": strict, "trace": trace, "numerics": numerics, "nki": nki}
    options["without"] = tuple(without)
    machines = [Machine(chip, **options) for _ in range(kernel.cores)]
    machine = machines[0]
    bare = {name: MemoryRegion[name] for name in _bare_memories(kernel.function)}
    bound = inspect.signature(kernel.function).bind(*args, **kwargs)
    bound.arguments = {
        name: _argument(machine, name, value) for name, value in bound.arguments.items()
    }
    nan_in = any(_has_nan(array) for array in _arrays((*args, *kwargs.values())))
    kernel.function.__globals__.update(bare)
    try:
        returned = _run(machines, kernel.function, bound)
    finally:
        for name in bare:
            del kernel.function.__globals__[name]
    if strict:
        for core in machines:
            core.check_capacity()
    for array, tensor in machine.copied:
        if tensor.storage.life.first is not None:
            array[...] = tensor.array
    outputs = returned
    if isinstance(returned, (tuple, list)):
        outputs = tuple(_output(machine, i, x, nan_in) for i, x in enumerate(returned))
    elif returned is not None:
        outputs = _output(machine, 0, returned, nan_in)
    sbuf, psum = machine.peaks()
    alone = tuple(without_precedent(machine.forms))
    return Run(outputs, chip, machine.count, sbuf, psum, tuple(machine.trace or ()), alone)


def _bare_memories(function: Callable[..., Any]) -> set[str]:
    """Return which memories a kernel names without importing them, as AWS's quickstart has
    `sbuf.view(...)`: NKI's compiler knows them.
    """
    named = set(function.__code__.co_names) & set(MemoryRegion.__members__)
    return {name for name in named if name not in function.__globals__}


def _is_strict() -> bool:
    """Return what the environment says about checks that AWS's simulator does not make."""
    value = os.environ.get(STRICT) or "1"
    if value not in ("0", "1"):
        raise ValueError(
            f"{STRICT}={value!r} is neither 1, every check, nor 0, those of AWS's simulator alone"
        )
    return value == "1"


def _run(
    machines: list[Machine], function: Callable[..., Any], bound: inspect.BoundArguments
) -> Any:
    """Run the kernel on every core and return what core 0 returns."""

    def run_on(machine: Machine) -> Any:
        outer, running.machine = running.machine, machine
        try:
            with np.errstate(all="ignore"):
                return function(*bound.args, **bound.kwargs)
        finally:
            running.machine = outer

    if len(machines) == 1:
        return run_on(machines[0])
    pair = Pair()
    for core, machine in enumerate(machines):
        machine.core, machine.cores, machine.pair = core, len(machines), pair
    return run_both(pair, [functools.partial(run_on, machine) for machine in machines])[0]


def _argument(machine: Machine, name: str, value: Any) -> Any:
    """Turn arrays into tensors in HBM; refuse what a kernel cannot take."""
    if value is None:
        machine.refuse("a None argument", f"kernel argument {name}")
    if isinstance(value, np.ndarray):
        if value.flags.c_contiguous:
            return machine.argument(value, name)
        tensor = machine.argument(np.ascontiguousarray(value), name)
        machine.copied.append((value, tensor))
        return tensor
    if type(value).__module__.partition(".")[0] in ("torch", "jax"):
        raise TypeError(
            f"argument {name} is a {type(value).__name__}; pass NumPy arrays (ml_dtypes for "
            "bfloat16)"
        )
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value  # constants
    if isinstance(value, tuple):
        return tuple(_argument(machine, f"{name}[{i}]", item) for i, item in enumerate(value))
    if machine.strict and isinstance(value, (list, dict)):
        raise StrictError(
            f"kernel argument {name} is a {type(value).__name__}; pass one argument per tensor, "
            "tuples of numbers, or a list of integers"
        )
    return value


def _arrays(values: Iterable[Any]) -> Iterator[np.ndarray]:
    for value in values:
        if isinstance(value, tuple):
            yield from _arrays(value)
        elif isinstance(value, np.ndarray):
            yield value


def _has_nan(array: np.ndarray) -> bool:
    return array.dtype.kind not in "iub" and bool(np.isnan(array).any())


def _output(machine: Machine, i: int, tensor: Any, nan_in: bool) -> Any:
    """Return an output as an array; refuse one that has holes or comes from unwritten memory."""
    if not isinstance(tensor, NkiTensor):
        raise TypeError(f"kernel output {i} must be a tensor, got {type(tensor).__name__}")
    if not machine.strict:
        return tensor.array
    if tensor.buffer is MemoryRegion.private_hbm:
        machine.refuse("an output in private_hbm", f"kernel output {i} `{tensor.name}`")
    elif tensor.buffer is not MemoryRegion.shared_hbm:
        raise StrictError(
            f"kernel output {i} `{tensor.name}` must be in shared_hbm, got {tensor.buffer.value}"
        )
    codes = tensor.storage.writers(tensor.array)
    missing = np.broadcast_to(np.asarray(codes), tensor.shape) == UNWRITTEN
    if missing.any():
        where = [int(n) for n in np.argwhere(missing)[0]]
        raise StrictError(
            f"kernel output {i} `{tensor.name}` {tensor.shape} is unwritten at {where} "
            f"({int(missing.sum())} of {tensor.size} elements)"
        )
    if machine.partial_reads and not nan_in and _has_nan(tensor.array):
        where = [int(n) for n in np.argwhere(np.isnan(tensor.array))[0]]
        raise StrictError(
            f"kernel output {i} `{tensor.name}` is NaN at {where} and memory was read before it "
            f"was written: {machine.partial_reads[0]}"
        )
    return tensor.array


__all__ = ["Kernel", "Run", "isa", "jit", "language", "record", "simulate"]
