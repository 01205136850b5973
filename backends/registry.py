"""Which backend runs a call. Capabilities are declared; what is not declared is refused, with every reason.

A backend is a name, the module of its adapter (imported on first use) and what it can do. `choose` looks at
where the tensors are, never at their contents, and never substitutes one backend for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from delta_trn.backends.gated_delta_rule.gates import AS_GIVEN, Gates

# Every device has PyTorch's form of a layer's small operations, and few backends have kernels for all: here a
# process's default backend is a first choice, and the tensors' device decides where it has none.
LAYERS: tuple[str, ...] = ("short_convolution", "gated_rms_norm", "add_rms_norm", "linear_cross_entropy")
OPERATIONS: tuple[str, ...] = ("gated_delta_rule", "gated_delta_rule_step", "delta_residual", *LAYERS)

# what a Call's K and V are
SIZES: Mapping[str, tuple[str, ...]] = {
    "delta_residual": ("D", "DV"),
    "short_convolution": ("C", "W"),
    "gated_rms_norm": ("N",),
    "add_rms_norm": ("N",),
    "linear_cross_entropy": ("d", "vocabulary"),
}


class BackendRefusal(RuntimeError):
    """No backend, or not the one asked for, can run a call; the message names every reason."""


@dataclass(frozen=True)
class Options:
    """What an adapter needs to know besides tensors."""

    scale: float
    use_qk_l2norm_in_kernel: bool
    output_final_state: bool
    packed: bool  # cu_seqlens is given
    gates: Gates = AS_GIVEN  # set only for backends that declare Capability.gates


@dataclass(frozen=True)
class Call:
    """One call as the registry sees it: no tensor, so the decision cannot depend on data.

    K, V    the sizes of heads; of other operations what SIZES says
    form    which of an operation's forms: "silu" or "linear" of short_convolution, "gated" or "plain" of
            gated_rms_norm
    """

    op: str
    device: str
    dtype: torch.dtype
    H: int
    HV: int
    K: int
    V: int
    packed: bool = False
    gradients: bool = False
    form: str = ""

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name, size in zip(self.names, (self.K, self.V), strict=False)]
        if self.op not in SIZES:
            sizes = [f"H={self.H}", *([] if self.H == self.HV else [f"HV={self.HV}"]), *sizes]
        extras = "".join(
            f", {word}"
            for word in (self.form, "packed" * self.packed, "gradients on" * self.gradients)
            if word
        )
        return f"{self.op} for {' '.join(sizes)} {_dtype(self.dtype)} on {self.device}{extras}"

    @property
    def names(self) -> tuple[str, ...]:
        """What K and V are called."""
        return SIZES.get(self.op, ("K", "V"))


@dataclass(frozen=True)
class Capability:
    """What one backend can do for one operation.

    devices     device types it runs on when named; None: every device PyTorch has
    automatic   device types on which it is chosen unasked; None: every one
    max_k, max_v, k_multiple    bounds on sizes; None: no bound
    bound_by    what bounds them, for the reader of a refusal
    forms       the forms it has; None: all
    gates       whether its kernels make g and beta of what a layer projects (`backends.gates`)
    """

    dtypes: frozenset[torch.dtype]
    devices: frozenset[str] | None = None
    automatic: frozenset[str] | None = frozenset()
    max_k: int | None = None
    max_v: int | None = None
    k_multiple: int | None = None
    bound_by: str = ""
    packed: bool = True
    gradients: bool = True
    forms: frozenset[str] | None = None
    gates: bool = False

    def chosen_on(self, device: str) -> bool:
        """Whether unasked."""
        return self.automatic is None or device in self.automatic

    def refusals(self, call: Call) -> list[str]:
        """Every reason why this cannot run `call`; empty if it can."""
        reasons = []
        K, V = (*call.names, "V")[:2]
        because = f": {self.bound_by}" if self.bound_by else ""
        if self.devices is not None and call.device not in self.devices:
            reasons.append(f"runs on {', '.join(sorted(self.devices))}; tensors are on {call.device}")
        if call.dtype not in self.dtypes:
            known = ", ".join(sorted(map(_dtype, self.dtypes)))
            reasons.append(f"computes {known}; tensors are {_dtype(call.dtype)}")
        if self.max_k is not None and self.max_k < call.K:
            reasons.append(f"{K}={call.K} is above {self.max_k}{because}")
        if self.k_multiple is not None and call.K % self.k_multiple:
            reasons.append(f"{K}={call.K} is not a multiple of {self.k_multiple}")
        if self.max_v is not None and self.max_v < call.V:
            reasons.append(f"{V}={call.V} is above {self.max_v}{because}")
        if self.forms is not None and call.form not in self.forms:
            reasons.append(f"computes {', '.join(sorted(self.forms))}; this call is {call.form}")
        if call.packed and not self.packed:
            reasons.append("does not take packed sequences (cu_seqlens)")
        if call.gradients and not self.gradients:
            reasons.append("has no backward; call it under torch.no_grad()")
        return reasons


def _always(device: str) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """A name, its adapter's module, and per operation its capability.

    unavailable     device type -> why it cannot run on such tensors on this machine (a package, a switch)
    emulated        device types on which it runs in an interpreter or simulator: right, and slow beyond use
    elsewhere       operation -> module, for operations that are not in the adapter
    """

    name: str
    adapter: str
    capabilities: Mapping[str, Capability]
    unavailable: Callable[[str], str | None] = _always
    emulated: frozenset[str] = frozenset()
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def refusals(self, call: Call) -> list[str]:
        """Every reason why this backend cannot run `call` here."""
        capability = self.capabilities.get(call.op)
        if capability is None:
            return [f"does not implement {call.op}"]
        missing = self.unavailable(call.device)
        return capability.refusals(call) + ([missing] if missing else [])


BACKENDS: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Adds a backend. Raises ValueError if the name is taken or an operation is unknown."""
    if backend.name in BACKENDS:
        raise ValueError(
            f"backend {backend.name!r} is registered already, by {BACKENDS[backend.name].adapter}"
        )
    unknown = sorted(set(backend.capabilities) - set(OPERATIONS))
    if unknown:
        raise ValueError(f"backend {backend.name!r} declares {unknown}; operations are {OPERATIONS}")
    BACKENDS[backend.name] = backend


@dataclass(frozen=True)
class Selection:
    """The process's default backend, and the ones that may be chosen where they are not automatic."""

    name: str | None = None
    allow: tuple[str, ...] = ()


SELECTION = Selection()


class _Restore:
    """What `use` returns: as a context manager it puts the previous selection back."""

    def __init__(self, previous: Selection) -> None:
        self.previous = previous

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        global SELECTION
        SELECTION = self.previous


def use(name: str | None = None, *, allow: Iterable[str] = ()) -> _Restore:
    """Sets the process's default backend; None chooses by the tensors' device.

    `allow` names backends that may also be chosen on devices where they otherwise run only by name, after
    the automatic ones: `use(allow=["chunked"])` lets an XLA machine without NKI train in PyTorch. For LAYERS
    the default is a first choice. Holds from the call on, or for a block: `with use("recurrent"): ...`.
    Raises BackendRefusal for an unknown name.
    """
    global SELECTION
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    for wanted in (*allow, *([] if name is None else [name])):
        _known(wanted)
    previous, SELECTION = SELECTION, Selection(name, allow)
    return _Restore(previous)


def choose(call: Call, name: str | None = None, selection: Selection | None = None) -> Backend:
    """The backend named, else the process's default, else the device's automatic one. No substitutes.

    For LAYERS the process's default comes first among the automatic ones. Raises BackendRefusal that names
    every reason of every candidate.
    """
    selection = SELECTION if selection is None else selection
    preferred = None
    if call.op in LAYERS and name is None:
        preferred = selection.name
    elif name is None:
        name = selection.name
    candidates = list(BACKENDS.values()) if name is None else [_known(name)]
    candidates.sort(key=lambda backend: backend.name != preferred)
    refused: dict[str, list[str]] = {}
    by_name = []
    for backend in candidates:
        reasons = backend.refusals(call)
        if reasons:
            refused[backend.name] = reasons
        elif (
            name is not None
            or backend.name == preferred
            or backend.capabilities[call.op].chosen_on(call.device)
        ):
            return backend
        else:
            by_name.append(backend)
    for backend in by_name:
        if backend.name in selection.allow:
            return backend
        refused[backend.name] = [f'runs on {call.device} only when asked for: backend="{backend.name}"']
    raise BackendRefusal(_explain(call, refused))


@torch.compiler.assume_constant_result
def chosen_name(
    op: str,
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    packed: bool,
    gradients: bool,
    name: str | None,
    allow: tuple[str, ...],
    default: str | None = None,
    form: str = "",
) -> str:
    """`choose` on plain values, so that torch.compile may evaluate it while tracing."""
    call = Call(op, device, dtype, *sizes, packed, gradients, form)
    return choose(call, name, Selection(default, allow)).name


@torch.compiler.assume_constant_result
def makes_gates(op: str, name: str) -> bool:
    """Whether the backend's kernels take what a layer projects in place of g and beta."""
    return _known(name).capabilities[op].gates


@cache
def adapter(name: str, op: str = OPERATIONS[0]) -> ModuleType:
    """The module that computes an operation, imported when first needed."""
    backend = _known(name)
    return import_module(backend.elsewhere.get(op, backend.adapter))


def _known(name: str) -> Backend:
    if name not in BACKENDS:
        raise BackendRefusal(f"no backend is named {name!r}; registered: {', '.join(BACKENDS) or 'none'}")
    return BACKENDS[name]


def _explain(call: Call, refused: Mapping[str, list[str]]) -> str:
    width = max(map(len, refused), default=0)
    lines = [f"  {name:{width}}  {reason}" for name, reasons in refused.items() for reason in reasons]
    return "\n".join([f"no backend can run {call}:", *lines])


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Row:
    """One operation of one backend on this machine.

    automatic   device types of this machine on which it is chosen unasked
    named       device types of this machine on which it runs when named
    reasons     why not on the others, and what it needs
    """

    op: str
    backend: str
    automatic: tuple[str, ...]
    named: tuple[str, ...]
    reasons: tuple[str, ...]


def describe(devices: Iterable[str]) -> list[Row]:
    """Which backend runs which operation on tensors of the given device types, and why not.

    Sizes and dtypes are a call's own affair: a row asks for K = 64, V = 4, in a dtype the backend declares.
    """
    rows = []
    for op in OPERATIONS:
        for backend in BACKENDS.values():
            capability = backend.capabilities.get(op)
            if capability is None:
                rows.append(Row(op, backend.name, (), (), (f"does not implement {op}",)))
                continue
            form = min(capability.forms or ("",))
            probe = Call(op, "", min(capability.dtypes, key=str), 1, 1, 64, 4, form=form)
            refused = {device: backend.refusals(replace(probe, device=device)) for device in devices}
            here = tuple(device for device, reasons in refused.items() if not reasons)
            automatic = tuple(device for device in here if capability.chosen_on(device))
            absent = sorted((capability.automatic or frozenset()) - set(refused))
            reasons = [f"{device}: {reason}" for device, found in refused.items() for reason in found]
            reasons += [f"{device}: this machine has no such device" for device in absent]
            rows.append(Row(op, backend.name, automatic, here, tuple(reasons)))
    return rows
