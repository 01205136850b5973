"""Decides which backend runs a call. What no backend declares is refused, with every reason.

`choose` looks at where the tensors are, never at their contents, and never substitutes one backend for
another unless the caller allows it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from delta_trn.backends.checks import dtype_name, is_checking

# The operations of this repository; an `Operator` of another name adds itself.
OPERATIONS: list[str] = [
    "gated_delta_rule", "gated_delta_rule_step", "delta_residual", "short_convolution", "gated_rms_norm",
    "add_rms_norm", "linear_cross_entropy", "gated_delta_layer",
]  # fmt: skip


class BackendRefusal(RuntimeError):
    """No backend, or not the one asked for, can run a call; the message names every reason."""


@dataclass(frozen=True)
class Call:
    """Describes one call to the registry without its tensors, so the decision cannot depend on data.

    sizes   the operation's sizes by name, such as {"H": 2, "HV": 4, "K": 64, "V": 128}
    form    which of an operation's forms: "silu" or "linear" of short_convolution, "gated" or "plain" of
            gated_rms_norm
    """

    op: str
    device: str
    dtype: torch.dtype
    sizes: Mapping[str, int] = field(default_factory=dict)
    packed: bool = False
    gradients: bool = False
    form: str = ""

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        words = (self.form, "packed" * self.packed, "gradients on" * self.gradients)
        options = "".join(f", {word}" for word in words if word)
        return f"{self.op} for {sizes} {dtype_name(self.dtype)} on {self.device}{options}"


@dataclass(frozen=True)
class Capability:
    """States what one backend can do for one operation.

    adapter     the module with its functions, imported when first needed
    devices     device types on which it runs when named; None: every one that PyTorch has
    automatic   device types on which it is chosen when nobody names a backend; None: every one
    limits      the largest sizes, by the names of `Call.sizes`
    bound_by    what sets the limits, for the reader of a refusal
    forms       the forms it has; None: all
    gates       whether its kernels make g and beta from a layer's projections
    note        says how it runs on this machine, for `describe`; may compile a kernel
    """

    adapter: str
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str] | None = None
    automatic: frozenset[str] | None = frozenset()
    limits: Mapping[str, int] = field(default_factory=dict)
    bound_by: str = ""
    packed: bool = True
    gradients: bool = True
    forms: frozenset[str] | None = None
    gates: bool = False
    note: Callable[[], str] | None = None

    def is_automatic_on(self, device: str) -> bool:
        """Returns whether it is chosen for `device` when the caller names no backend."""
        return self.automatic is None or device in self.automatic

    def refusals(self, call: Call) -> list[str]:
        """Returns every reason why this backend cannot run `call`; empty if it can."""
        reasons = []
        because = f": {self.bound_by}" if self.bound_by else ""
        if self.devices is not None and call.device not in self.devices:
            reasons.append(f"runs on {', '.join(sorted(self.devices))}; tensors are on {call.device}")
        if call.dtype not in self.dtypes:
            known = ", ".join(sorted(map(dtype_name, self.dtypes)))
            reasons.append(f"computes {known}; tensors are {dtype_name(call.dtype)}")
        for name, limit in self.limits.items():
            if call.sizes.get(name, 0) > limit:
                reasons.append(f"{name}={call.sizes[name]} is above {limit}{because}")
        if self.forms is not None and call.form not in self.forms:
            reasons.append(f"computes {', '.join(sorted(self.forms))}; this call is {call.form}")
        if call.packed and not self.packed:
            reasons.append("does not take packed sequences (cu_seqlens)")
        if call.gradients and not self.gradients:
            reasons.append("has no backward; call it under torch.no_grad()")
        return reasons


@dataclass(frozen=True)
class Backend:
    """Names a backend, with a capability for each operation that it implements.

    unavailable     device type -> why it cannot run on such tensors on this machine (a package, a switch)
    emulated        device types on which it runs in an interpreter or simulator: exact, but slow
    """

    name: str
    capabilities: Mapping[str, Capability]
    unavailable: Callable[[str], str | None] = lambda device: None
    emulated: frozenset[str] = frozenset()

    def refusals(self, call: Call) -> list[str]:
        """Returns every reason why this backend cannot run `call` here."""
        capability = self.capabilities.get(call.op)
        if capability is None:
            return [f"does not implement {call.op}"]
        missing = self.unavailable(call.device)
        return capability.refusals(call) + ([missing] if missing else [])


BACKENDS: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Adds a backend. Raises ValueError if the name is taken or an operation is unknown."""
    if backend.name in BACKENDS:
        raise ValueError(f"backend {backend.name!r} is registered already; choose another name")
    unknown = sorted(set(backend.capabilities) - set(OPERATIONS))
    if unknown:
        raise ValueError(
            f"backend {backend.name!r} declares {unknown}; operations are {', '.join(OPERATIONS)}"
        )
    BACKENDS[backend.name] = backend


@dataclass(frozen=True)
class Selection:
    """The default backend, and the ones that may run what it, or the device's own, cannot."""

    name: str | None = None
    allow: tuple[str, ...] = ()


class _Selected(threading.local):
    """A thread's own selection. A ContextVar would say the same, but torch.compile cannot guard on one."""

    value: Selection | None = None


_thread = _Selected()
_main_thread = Selection()


def selection() -> Selection:
    """Returns the selection that holds in this thread."""
    own = _thread.value
    return _main_thread if own is None else own


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _select(value: Selection | None) -> None:
    global _main_thread
    if _in_main_thread():
        _main_thread = value or Selection()
    else:
        _thread.value = value


class default_backend:
    """Sets the default backend, from now on or, as a context manager, for a block.

    name    runs every operation for which the caller names no backend, and refuses what it cannot run; None:
            the device of the tensors decides
    allow   backends that may run what `name`, or the device's own backend, cannot: PyTorch's on an XLA device
            without NKI, or for the operations for which a backend has no kernel

    Holds in this thread. The main thread's default also holds in threads that set none: autograd may run a
    checkpointed layer in a thread of its own. Raises BackendRefusal for an unknown name.

        >>> from delta_trn import default_backend
        >>> with default_backend("recurrent", allow=["chunked"]):
        ...     pass
    """

    def __init__(self, name: str | None = None, *, allow: Iterable[str] = ()) -> None:
        allow = (allow,) if isinstance(allow, str) else tuple(allow)
        for wanted in (*allow, *([] if name is None else [name])):
            _known(wanted)
        self.selection = Selection(name, allow)
        self.previous: list[Selection | None] = [_main_thread if _in_main_thread() else _thread.value]
        _select(self.selection)

    def __enter__(self) -> None:
        self.previous.append(self.selection)
        _select(self.selection)

    def __exit__(self, *exception: object) -> None:
        self.previous.pop()
        _select(self.previous[-1])


def choose(call: Call, name: str | None = None) -> Backend:
    """Returns the backend that runs `call`. Raises BackendRefusal with every reason of every candidate.

    A name in the call is strict. Else the default backend is asked, or without one the device's automatic
    backends in the order of registration; last the backends that the default allows.
    """
    return _choose(call, name, selection())


def _choose(call: Call, name: str | None, default: Selection) -> Backend:
    if name is not None:
        candidates = [_known(name)]
    elif default.name is not None:
        candidates = [_known(wanted) for wanted in (default.name, *default.allow)]
    else:
        candidates = [backend for backend in BACKENDS.values() if _is_automatic(backend, call)]
        candidates += [_known(wanted) for wanted in default.allow]
    for backend in candidates:
        if not backend.refusals(call):
            return backend
    raise BackendRefusal(_explain(call, name, default, candidates))


def _is_automatic(backend: Backend, call: Call) -> bool:
    capability = backend.capabilities.get(call.op)
    return capability is not None and capability.is_automatic_on(call.device)


def _explain(call: Call, name: str | None, default: Selection, candidates: list[Backend]) -> str:
    """Returns the message of a refusal: every reason, and which backends would run the call if asked."""
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


@torch.compiler.assume_constant_result
def chosen_name(
    op: str,
    device: str,
    dtype: torch.dtype,
    sizes: tuple[tuple[str, int], ...],
    packed: bool,
    gradients: bool,
    form: str,
    name: str | None,
    default: str | None,
    allow: tuple[str, ...],
) -> str:
    """Returns the name of the backend that `choose` returns.

    Takes plain values, so that torch.compile may call it while tracing."""
    call = Call(op, device, dtype, dict(sizes), packed, gradients, form)
    return _choose(call, name, Selection(default, allow)).name


@torch.compiler.assume_constant_result
def runs(
    op: str,
    name: str,
    device: str,
    dtype: torch.dtype,
    sizes: tuple[tuple[str, int], ...],
    packed: bool,
    gradients: bool,
) -> bool:
    """Returns whether a backend runs a call that the caller can also take apart, as `gated_delta_layer`.

    In check mode none does: each part checks what it is given.
    """
    call = Call(op, device, dtype, dict(sizes), packed, gradients)
    return not is_checking() and not _known(name).refusals(call)


@torch.compiler.assume_constant_result
def makes_gates(op: str, name: str) -> bool:
    """Returns whether the backend's kernels make g and beta from what a layer projects."""
    return _known(name).capabilities[op].gates


@cache
def adapter(name: str, op: str = OPERATIONS[0]) -> ModuleType:
    """Returns the module that computes an operation; imports it when first needed."""
    return import_module(_known(name).capabilities[op].adapter)


def _known(name: str) -> Backend:
    if name not in BACKENDS:
        raise BackendRefusal(f"no backend is named {name!r}; registered: {', '.join(BACKENDS) or 'none'}")
    return BACKENDS[name]


@dataclass(frozen=True)
class Row:
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


def describe(devices: Iterable[str]) -> list[Row]:
    """Returns a row for each operation and backend: on which of the given device types it runs, and why not.

    A row asks in a dtype that the backend declares and for no particular sizes.
    """
    rows = []
    for op in OPERATIONS:
        for backend in BACKENDS.values():
            capability = backend.capabilities.get(op)
            if capability is None:
                rows.append(Row(op, backend.name, (), (), (f"does not implement {op}",)))
                continue
            form = min(capability.forms or ("",))
            probe = Call(op, "", min(capability.dtypes, key=str), form=form)
            refused = {device: backend.refusals(replace(probe, device=device)) for device in devices}
            here = tuple(device for device, reasons in refused.items() if not reasons)
            automatic = tuple(device for device in here if capability.is_automatic_on(device))
            absent = sorted((capability.automatic or frozenset()) - set(refused))
            reasons = [f"{device}: {reason}" for device in refused for reason in refused[device]]
            reasons += [f"{device}: this machine has no such device" for device in absent]
            reasons += [f"here: {capability.note()}"] if here and capability.note is not None else []
            rows.append(Row(op, backend.name, automatic, here, tuple(reasons)))
    return rows
