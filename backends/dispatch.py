"""Decides which backend runs a call, from one table of what each of them computes, and where.

A call that no backend takes is refused, with every reason. The decision looks at where the tensors
are, never at their contents, and one backend replaces another only where the caller allows it.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType

import torch

from delta_trn.backends import machine
from delta_trn.backends.checks import BackendRefusal, dtype_name


@dataclass(frozen=True)
class Call:
    """Describes one call without its tensors, so the decision cannot depend on data.

    sizes       the operation's sizes by name; call["K"] is one of them, 0 where the call does not
                say it
    options     words for what else a backend may not take, such as "packed" or "linear"
    capability  the compute capability of a CUDA device, such as (9, 0); None: another device, or
                unknown
    """

    op: str
    device: str
    dtype: torch.dtype
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    gradients: bool = False
    capability: tuple[int, int] | None = None

    def __getitem__(self, size: str) -> int:
        return self.sizes.get(size, 0)

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        options = "".join(
            f", {word}" for word in (*self.options, *["gradients on"] * self.gradients)
        )
        return f"{self.op} for {sizes} {dtype_name(self.dtype)} on {self.device}{options}"


@dataclass(frozen=True)
class Row:
    """States what one backend computes of one operation.

    adapter     the module with its functions, imported when first needed
    devices     device types on which it runs when named; None: every one that PyTorch has
    automatic   device types on which it is chosen when nobody names a backend; None: every one
    refuses     call -> a sentence for each reason why the kernels do not take it
    """

    adapter: str
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str] | None = None
    automatic: frozenset[str] | None = frozenset()
    refuses: Callable[[Call], Iterable[str]] = lambda call: ()

    def is_automatic_on(self, device: str) -> bool:
        """Returns whether it is chosen for `device` when the caller names no backend."""
        return self.automatic is None or device in self.automatic


@dataclass(frozen=True)
class Backend:
    """Names a backend, with a row for each operation that it computes.

    unavailable     device type -> why it cannot run on such tensors on this machine (a package, a
                    switch)
    emulated        device types on which it runs in an interpreter or simulator: exact, but slow
    """

    name: str
    rows: Mapping[str, Row]
    unavailable: Callable[[str], str | None] = lambda device: None
    emulated: frozenset[str] = frozenset()

    def refusals(self, call: Call) -> list[str]:
        """Returns every reason why this backend cannot run `call` here; empty if it can."""
        row = self.rows.get(call.op)
        if row is None:
            return [f"does not implement {call.op}"]
        reasons = []
        if row.devices is not None and call.device not in row.devices:
            reasons.append(
                f"runs on {', '.join(sorted(row.devices))}; tensors are on {call.device}"
            )
        if call.dtype not in row.dtypes:
            known = ", ".join(sorted(map(dtype_name, row.dtypes)))
            reasons.append(f"computes {known}; tensors are {dtype_name(call.dtype)}")
        missing = self.unavailable(call.device)
        return [*reasons, *row.refuses(call), *([missing] if missing else [])]


BACKENDS: dict[str, Backend] = {}
OPERATIONS: list[str] = []  # those of the table below; an `Operator` of another name adds itself


def register(backend: Backend) -> None:
    """Adds a backend. Raises ValueError if the name is taken or an operation is unknown."""
    if backend.name in BACKENDS:
        raise ValueError(f"backend {backend.name!r} is registered already; choose another name")
    unknown = sorted(set(backend.rows) - set(OPERATIONS))
    if unknown:
        raise ValueError(
            f"backend {backend.name!r} declares {unknown}; operations are {', '.join(OPERATIONS)}"
        )
    BACKENDS[backend.name] = backend


ENTRY_POINTS = "delta_trn.backends"  # the group in which packages name backends of their own
_loaded = False


def load_entry_points() -> None:
    """Imports, once, what installed packages name as backends or operations of theirs.

    A name leads to a module, which registers them when it is imported, or to a function, which is
    called. One that fails is left out with a warning.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True  # before they are imported: they may ask for a backend themselves
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            found = entry.load()
            if callable(found):
                found()
        except Exception as error:
            package = entry.dist.name if entry.dist else "an installed package"
            warnings.warn(
                f"{package} names {entry.value} as the backend {entry.name!r}, which cannot be "
                f"loaded ({type(error).__name__}: {error}); mend or remove the package",
                RuntimeWarning,
                stacklevel=2,
            )


@dataclass(frozen=True)
class Selection:
    """The default backend, and the ones that may run what it, or the device's own, cannot."""

    name: str | None = None
    allow: tuple[str, ...] = ()


_selected = Selection()


def selection() -> Selection:
    """Returns the selection that holds in this process."""
    return _selected


def _select(value: Selection) -> None:
    global _selected
    _selected = value


class default_backend:
    """Sets the default backend, from now on or, as a context manager, for a block.

    name    runs every operation for which the caller names no backend, and refuses what it cannot
            run; None: the device of the tensors decides
    allow   backends that may run what `name`, or the device's own backend, cannot: PyTorch's on an
            XLA device without NKI, or for the operations for which a backend has no kernel

    Holds in the process, in all its threads: autograd may run a checkpointed layer in a thread of
    its own. Raises BackendRefusal for an unknown name.

        >>> from delta_trn import default_backend
        >>> with default_backend("recurrent", allow=["chunked"]):
        ...     pass
    """

    def __init__(self, name: str | None = None, *, allow: Iterable[str] = ()) -> None:
        allow = (allow,) if isinstance(allow, str) else tuple(allow)
        for wanted in (*allow, *([] if name is None else [name])):
            _find(wanted)
        self.selection = Selection(name, allow)
        self.previous = [_selected]
        _select(self.selection)

    def __enter__(self) -> None:
        self.previous.append(self.selection)
        _select(self.selection)

    def __exit__(self, *exception: object) -> None:
        self.previous.pop()
        _select(self.previous[-1])


def choose(call: Call, name: str | None = None, default: Selection | None = None) -> Backend:
    """Returns the backend that runs `call`. Raises BackendRefusal with every reason of every
    candidate.

    A name in the call is strict. Else the default backend is asked (None: the process's), or
    without one the device's automatic backends in the order of registration; last the backends that
    the default allows.
    """
    default = default or selection()
    candidates = _candidates(call, name, default)
    for backend in candidates:
        if not backend.refusals(call):
            return backend
    raise BackendRefusal(_explain(call, name, default, candidates))


def _candidates(call: Call, name: str | None, default: Selection) -> list[Backend]:
    load_entry_points()
    if name is not None:
        return [_find(name)]
    allowed = [_find(wanted) for wanted in default.allow]
    if default.name is not None:
        return [_find(default.name), *allowed]
    rows = ((backend, backend.rows.get(call.op)) for backend in BACKENDS.values())
    automatic = [
        backend for backend, row in rows if row is not None and row.is_automatic_on(call.device)
    ]
    return [*automatic, *allowed]


def _explain(call: Call, name: str | None, default: Selection, candidates: list[Backend]) -> str:
    """Returns the message of a refusal: every reason,
    and which backends would run the call if asked.
    """
    asked = [backend.name for backend in candidates]
    chosen_by_device = name is None and default.name is None
    lines, able = [], []
    width = max(map(len, BACKENDS), default=0)
    for backend in BACKENDS.values():
        reasons = backend.refusals(call)
        if not reasons:
            able.append(backend.name)
            reasons = [f'runs on {call.device} only when asked for: backend="{backend.name}"']
        if chosen_by_device or backend.name in asked:
            lines += [f"  {backend.name:{width}}  {reason}" for reason in reasons]
    if able and name is None and default.name is not None:
        lines.append(
            f"{default.name} is the default backend, and nothing replaces it unasked; "
            f'allow another with default_backend("{default.name}", allow=["{able[0]}"])'
        )
    return "\n".join([f"no backend can run {call}:", *lines])


def choose_name(
    op: str,
    device: str,
    place: int | None,
    dtype: torch.dtype,
    sizes: tuple[tuple[str, int], ...],
    options: tuple[str, ...],
    gradients: bool,
    name: str | None,
    default: str | None,
    allow: tuple[str, ...],
    required: bool,
) -> str | None:
    """Returns the name of the backend that runs a call; None if none does and none is `required`.

    What is merely allowed does not count then. Takes plain values, so that torch.compile may call
    it while tracing and keep its result as a constant.
    """
    capability = machine.compute_capability(device, place)
    call = Call(op, device, dtype, dict(sizes), options, gradients, capability)
    if required:
        return choose(call, name, Selection(default, allow)).name
    candidates = _candidates(call, name, Selection(default))
    return next((backend.name for backend in candidates if not backend.refusals(call)), None)


def is_offered(op: str, device: str, name: str | None, default: str | None) -> bool:
    """Returns whether a backend that may be chosen has an operation for tensors of a device,
    whatever their sizes are.
    """
    call = Call(op, device, torch.float32, {}, (), False, None)
    rows = [backend.rows.get(op) for backend in _candidates(call, name, Selection(default))]
    return any(row and (row.devices is None or device in row.devices) for row in rows)


# What torch.compiler.assume_constant_result does, which first imports torch's compiler: as long
# again as torch itself.
choose_name._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
is_offered._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@cache
def adapter(name: str, op: str = "gated_delta_rule") -> ModuleType:
    """Returns the module that computes an operation; imports it when first needed."""
    return import_module(_find(name).rows[op].adapter)


def describe_choice(
    name: str, dtype: torch.dtype, device: str, op: str = "gated_delta_rule"
) -> str:
    """Returns a backend's name; behind it how it computes such calls here,
    where it has a slower way.
    """
    note = getattr(adapter(name, op), "note", None)
    return name if note is None else f"{name} ({note(dtype, device, op)})"


def _find(name: str) -> Backend:
    if name not in BACKENDS:
        load_entry_points()
    if name not in BACKENDS:
        raise BackendRefusal(
            f"no backend is named {name!r}; registered: {', '.join(BACKENDS) or 'none'}"
        )
    return BACKENDS[name]


@dataclass(frozen=True)
class Availability:
    """One operation of one backend on this machine.

    automatic   device types of this machine on which it is chosen when nobody names a backend
    named       device types of this machine on which it runs when named
    reasons     why not on the others, what it needs, and how it runs here
    """

    op: str
    backend: str
    automatic: tuple[str, ...]
    named: tuple[str, ...]
    reasons: tuple[str, ...]


def describe(devices: Iterable[str]) -> list[Availability]:
    """Returns for each operation and backend on which of the given device types it runs, and why
    not.

    A backend is asked in a dtype that it declares and for no particular sizes. Where it runs, its
    adapter may have a function `note` that says how it does here.
    """
    load_entry_points()
    every = []
    for op in OPERATIONS:
        for backend in BACKENDS.values():
            row = backend.rows.get(op)
            if row is None:
                every.append(Availability(op, backend.name, (), (), (f"does not implement {op}",)))
                continue
            probe = Call(op, "", min(row.dtypes, key=str))
            refused = {
                device: backend.refusals(replace(probe, device=device)) for device in devices
            }
            here = tuple(device for device, reasons in refused.items() if not reasons)
            automatic = tuple(device for device in here if row.is_automatic_on(device))
            absent = sorted((row.automatic or frozenset()) - set(refused))
            reasons = [f"{device}: {reason}" for device in refused for reason in refused[device]]
            reasons += [f"{device}: this machine has no such device" for device in absent]
            note = getattr(adapter(backend.name, op), "note", None) if here else None
            reasons += [] if note is None else [f"here: {note(op=op)}"]
            every.append(Availability(op, backend.name, automatic, here, tuple(reasons)))
    return every


FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
GPU_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
NEURON_FLOATS = frozenset({torch.float32, torch.bfloat16})
CUDA, CPU, NEURON = frozenset({"cuda"}), frozenset({"cpu"}), frozenset({"xla", "neuron"})


def _at(file: str) -> str:
    return f"delta_trn.backends.{file}"


def _limits(name: str) -> Callable[[Call], Iterable[str]]:
    """Returns a function of `limits`, which is imported when first asked."""
    return lambda call: getattr(import_module(_at("limits")), name)(call)


def _triton(adapter: str, limits: Callable[[Call], Iterable[str]] = lambda call: ()) -> Row:
    def refuses(call: Call) -> Iterable[str]:
        if call.device == "cuda":
            yield from _refuse_gpu(call.capability)
        yield from limits(call)

    return Row(_at(adapter), GPU_FLOATS, CUDA | CPU, CUDA, refuses)


def _nki(devices: frozenset[str], automatic: frozenset[str]) -> dict[str, Row]:
    """Returns the rows of the NKI kernels, which run on a device and in the simulator alike."""

    def row(folder: str, limits: str) -> Row:
        return Row(_at(f"{folder}.nki_adapter"), NEURON_FLOATS, devices, automatic, _limits(limits))

    return {
        **dict.fromkeys(_RULES, row("gated_delta_rule", "rule_nki")),
        "kimi_delta_attention": row("gated_delta_rule", "channels_nki"),
        "kimi_delta_attention_step": row("gated_delta_rule", "rule_nki"),
        "delta_residual": row("delta_residual", "residual_nki"),
        "short_convolution": row("layers", "nki_convolution"),
        "gated_rms_norm": row("layers", "nki_norm"),
        "linear_cross_entropy": row("layers", "nki_readout"),
        "gated_delta_layer": row("gated_delta_layer", "layer_nki"),
    }


_TRITON_RULE = _triton("gated_delta_rule.triton_adapter", _limits("rule_triton"))
_TRITON_CHANNELS = _triton("kimi_delta_attention.triton_adapter", _limits("rule_triton"))
_TRITON_NORM = _triton("layers.triton_adapter", _limits("triton_norm"))
_RULES = ("gated_delta_rule", "gated_delta_rule_step")
_KIMI = ("kimi_delta_attention", "kimi_delta_attention_step")
_LAYERS = ("short_convolution", "gated_rms_norm", "add_rms_norm", "linear_cross_entropy")

# The first automatic backend that takes a call is chosen, so those with kernels come first.
TABLE: Mapping[str, Mapping[str, Row]] = {
    "triton": {
        **dict.fromkeys(_RULES, _TRITON_RULE),
        **dict.fromkeys(_KIMI, _TRITON_CHANNELS),
        "delta_residual": _triton("delta_residual.triton_adapter"),
        "short_convolution": _triton("layers.triton_adapter", _limits("triton_convolution")),
        "gated_rms_norm": _TRITON_NORM,
        "add_rms_norm": _TRITON_NORM,
        "linear_cross_entropy": _triton("layers.triton_adapter"),
    },
    "nki": _nki(NEURON, automatic=NEURON),
    "chunked": {
        **dict.fromkeys(_RULES, Row(_at("gated_delta_rule.chunked"), FLOATS, automatic=CPU)),
        # what Triton's kernels of it do not take on a GPU, PyTorch's form does, and says so
        **dict.fromkeys(_KIMI, Row(_at("gated_delta_rule.chunked"), FLOATS, automatic=CPU | CUDA)),
        "delta_residual": Row(_at("delta_residual.pytorch"), FLOATS, automatic=CPU),
        # PyTorch's form is every device's
        **dict.fromkeys(_LAYERS, Row(_at("layers.pytorch"), FLOATS, automatic=None)),
    },
    "nki-simulator": _nki(CPU, automatic=frozenset()),
    # T steps one after the other: exact, and slow on purpose, so only by name
    "recurrent": {
        **dict.fromkeys((*_RULES, *_KIMI), Row(_at("gated_delta_rule.recurrent"), FLOATS)),
        "delta_residual": Row(_at("delta_residual.pytorch"), FLOATS),
    },
}


# Device types beside CUDA that a driver of Triton in this process runs kernels on: an emulator adds
# "cpu".
TRITON_DEVICES: set[str] = set()


def triton_missing(device: str) -> str | None:
    """Returns why Triton's kernels cannot run on `device` here; None if they can."""
    if find_spec("triton") is None:
        return "needs the triton package: pip install triton"
    if (
        device == "cpu"
        and device not in TRITON_DEVICES
        and os.environ.get("TRITON_INTERPRET") != "1"
    ):
        return (
            "runs on CPU tensors only in Triton's interpreter: set TRITON_INTERPRET=1 before "
            "Python starts"
        )
    return None


def _refuse_gpu(capability: tuple[int, int] | None) -> Iterable[str]:
    """Yields why Triton's kernels do not run on a GPU, or are wrong there with this Triton.

    capability  of the GPU; None: that of the current one
    """
    capability = capability or machine.compute_capability("cuda")
    if capability is None or find_spec("triton") is None:
        return
    version, numbers = _version("triton")
    major, name = capability[0], ".".join(map(str, capability))
    if major not in (8, 10, 12) and capability != (9, 0):
        yield f"has launches for compute capability 8.x, 9.0, 10.x and 12.x; this GPU has {name}"
    elif major == 10 and numbers < (3, 9):
        yield (
            f"needs Triton 3.9 on compute capability {name}, where {version} gives programs more "
            "tensor memory than there is: pip install --no-deps triton==3.9.0"
        )
    elif major >= 9 and numbers < (3, 7, 1):
        yield (
            f"Triton {version} leaves out fences that Hopper needs between copies and products, "
            "and results can be wrong; torch 2.13 brings 3.7.1, which has them; beside an older "
            "torch: pip install --no-deps triton==3.7.1"
        )


@cache
def _version(package: str) -> tuple[str, tuple[int, ...]]:
    """Returns an installed package's version, and the first three numbers in it;
    reads the disk once.
    """
    version = metadata.version(package)
    return version, tuple(map(int, re.findall(r"\d+", version)[:3]))


def nki_missing(device: str) -> str | None:
    """Returns why NKI's kernels cannot run on `device` here; None if they can."""
    if device == "neuron":
        if find_spec("nki") is None and find_spec("nki_simulator") is None:
            return "needs nki, from AWS Neuron's package index: docs/trainium.md says how"
        return import_module("delta_trn.backends.nki_runtime_adapter").missing()
    absent = [name for name in ("torch_xla", "nki") if find_spec(name) is None]
    if absent:
        return (
            f"needs {' and '.join(absent)}, from AWS Neuron's package index: docs/trainium.md says "
            "how"
        )
    return _placeholder()


NO_SIMULATOR = (
    "needs the package nki-simulator; in a checkout of delta-trn: pip install "
    "./packages/nki-simulator"
)


def simulator_missing(device: str) -> str | None:
    """Returns why the simulator cannot run here; None if it can.

    Where AWS's nki is installed, kernels are written in its language, and only its simulator runs
    them.
    """
    if find_spec("nki") is None:
        if find_spec("nki_simulator") is None:
            return NO_SIMULATOR
        return None
    if placeholder := _placeholder():
        return placeholder
    version, numbers = _version("nki")
    if numbers < (0, 3):
        return (
            f"nki {version} has no simulator: install 0.3 or newer, or none, for our package "
            "nki-simulator"
        )
    return None


def _placeholder() -> str | None:
    """Returns what to do if the installed nki is the public index's of that name; None if it is
    AWS's.

    That package has no modules, and importing it raises. So its files are looked at, and it is not
    imported.
    """
    spec = find_spec("nki")
    if spec is None or "nki.isa" in sys.modules:  # before the disk, which takes 50 us a call
        return None
    if PathFinder.find_spec("nki.isa", spec.submodule_search_locations) is not None:
        return None
    return (
        "the package nki that is installed is a placeholder from the public index, without "
        "nki.isa: pip uninstall nki, then install AWS's own from "
        "https://pip.repos.neuron.amazonaws.com"
    )


MISSING = {"triton": triton_missing, "nki": nki_missing, "nki-simulator": simulator_missing}
EMULATED = {"triton": CPU, "nki-simulator": CPU}

OPERATIONS += dict.fromkeys(op for rows in TABLE.values() for op in rows)
for _name, _rows in TABLE.items():
    register(
        Backend(
            _name, _rows, MISSING.get(_name, lambda device: None), EMULATED.get(_name, frozenset())
        )
    )
