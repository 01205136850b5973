"""Checks of arguments, made once, before any work: what was given, what was expected, what to do.

`arguments` and `step_arguments` read shapes, dtypes and devices only. `values` reads data: the bounds of
packed sequences always on CPU, everything else only inside `checking()`, since on an accelerator a look at
data waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, finfo, float32, float64, int64

from delta_trn.backends.gated_delta_rule.gates import AS_GIVEN, Gates

_checking = False


class checking:
    """Check mode for a block: `with checking(): ...` looks at the data of every call inside.

    Found are NaN and infinity in any input, g > 0, beta outside [0, 2], keys longer than 1 where the
    operation does not normalize them, and wrong cu_seqlens on any device. Holds in all threads.
    `checking(False)` changes nothing, so that a run's configuration can be passed in.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def __enter__(self) -> None:
        global _checking
        self.previous = _checking
        _checking = _checking or self.enabled

    def __exit__(self, *exception: object) -> None:
        global _checking
        _checking = self.previous


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raises TypeError or ValueError unless shapes, dtypes and devices fit `gated_delta_rule`."""
    _shapes_agree(("B", "T"), q=q, k=k, v=v, g=g, beta=beta)
    B, T = q.shape[:2]
    if B == 0 or T == 0:
        raise ValueError(
            f"q {shape(q)} has B={B}, T={T}; both must be at least 1: skip the call for empty input"
        )
    _dtypes_and_devices(q, {"k": k, "v": v}, {"g": g, "beta": beta})
    sequences = B
    if cu_seqlens is not None:
        _packed_shapes(q, cu_seqlens)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        _state(
            "initial_state", initial_state, q, (sequences, v.shape[2], q.shape[3], v.shape[3]), "N, HV, K, V"
        )


def step_arguments(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    """Raises TypeError or ValueError unless shapes, dtypes and devices fit `gated_delta_rule_step`."""
    _shapes_agree(("B",), q=q, k=k, v=v, g=g, beta=beta)
    if q.shape[0] == 0:
        raise ValueError(f"q {shape(q)} has B=0; it must be at least 1: skip the call for empty input")
    _dtypes_and_devices(q, {"k": k, "v": v}, {"g": g, "beta": beta})
    _state("state", state, q, (q.shape[0], v.shape[1], q.shape[2], v.shape[2]), "B, HV, K, V")


def gate_arguments(
    q: Tensor,
    HV: int,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> Gates:
    """What the arguments about gates say. Raises TypeError or ValueError where they do not fit."""
    if use_gate_in_kernel and A_log is None:
        raise ValueError("use_gate_in_kernel=True without A_log; pass A_log [HV], and dt_bias [HV] if any")
    parameters = {name: x for name, x in (("A_log", A_log), ("dt_bias", dt_bias)) if x is not None}
    if parameters and not use_gate_in_kernel:
        raise ValueError(
            f"{' and '.join(parameters)} given with use_gate_in_kernel=False; "
            "pass True, with what the layer projects as g, or leave them out"
        )
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval=True doubles the sigmoid that use_beta_sigmoid_in_kernel=True takes here; "
            "pass that too, or 2 sigmoid(z) as beta"
        )
    for name, x in parameters.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; pass a torch.Tensor")
        if tuple(x.shape) != (HV,):
            raise ValueError(f"{name} {shape(x)} is not [HV] = {numbers((HV,))}")
        if not x.is_floating_point():
            raise TypeError(f"{name} is {x.dtype}; pass a floating point tensor")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q is on {q.device}; move all tensors to one device")
    return Gates(A_log, dt_bias, (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid_in_kernel else 0.0)


def residual_arguments(x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None) -> None:
    """Raises TypeError or ValueError unless shapes, dtypes and devices fit `delta_residual`."""
    for name, y in {"x": x, "k": k, "v": v, "beta": beta}.items():
        if not isinstance(y, Tensor):
            raise TypeError(f"{name} is a {type(y).__name__}; pass a torch.Tensor")
    lead = tuple(k.shape[:-1])
    if k.dim() < 1 or x.dim() not in (k.dim(), k.dim() + 1) or x.shape[: k.dim()] != k.shape:
        raise ValueError(
            f"k {shape(k)} does not fit x {shape(x)}; with x [..., D, DV] or [..., D] k is [..., D]"
        )
    wanted = lead if x.dim() == k.dim() else (*lead, x.shape[-1])
    if tuple(v.shape) != wanted:
        raise ValueError(f"v {shape(v)} does not fit x {shape(x)}; expected {numbers(wanted)}")
    if tuple(beta.shape) != lead:
        raise ValueError(f"beta {shape(beta)} does not fit k {shape(k)}; expected {numbers(lead)}")
    if 0 in x.shape:
        raise ValueError(f"x {shape(x)} is empty; skip the call")
    _dtypes_and_devices(x, {"k": k, "v": v}, {"beta": beta}, of="x")
    if k_eps is not None and not 0 < k_eps < float("inf"):
        raise ValueError(f"k_eps={k_eps} must be above 0 and finite, or None where k has norm 1 already")


def residual_values(x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None) -> None:
    """Inside `checking()`: raises ValueError for data that `delta_residual` can make no sense of."""
    if not _checking:
        return
    finite({"x": x, "k": k, "v": v, "beta": beta})
    _refuse_where((beta < 0) | (beta > 2), "beta", beta, "is outside [0, 2]; pass 2 sigmoid(b)")
    if k_eps is None:
        _refuse_long(k, "pass k_eps")


def _shapes_agree(lead: tuple[str, ...], **tensors: Tensor) -> None:
    """Ranks and sizes that agree; `lead` names the dimensions before the heads."""
    last = {"q": ("H", "K"), "k": ("H", "K"), "v": ("HV", "V"), "g": ("HV",), "beta": ("HV",)}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; pass a torch.Tensor")
        letters = lead + last[name]
        if x.dim() != len(letters):
            raise ValueError(f"{name} {shape(x)} has {x.dim()} dimensions, expected [{', '.join(letters)}]")
    q, k, v, n = tensors["q"], tensors["k"], tensors["v"], len(lead)
    if q.shape != k.shape:
        raise ValueError(f"q {shape(q)} and k {shape(k)} differ; both are [{', '.join(lead)}, H, K]")
    for name in ("v", "g", "beta"):
        x = tensors[name]
        if x.shape[:n] != q.shape[:n]:
            raise ValueError(
                f"{name} {shape(x)} and q {shape(q)} differ in {' or '.join(lead)}; "
                "all tensors cover the same tokens"
            )
        if x.shape[n] != v.shape[n]:
            raise ValueError(
                f"{name} {shape(x)} has {x.shape[n]} heads, v {shape(v)} has {v.shape[n]}; both are HV"
            )
    H, HV, K, V = q.shape[n], v.shape[n], q.shape[-1], v.shape[-1]
    if min(H, HV, K, V) == 0:
        raise ValueError(
            f"H={H}, HV={HV}, K={K}, V={V} in q {shape(q)}, v {shape(v)}; all must be at least 1"
        )
    if HV % H:
        raise ValueError(f"HV={HV} is not a multiple of H={H}; value head j reads query head j // (HV / H)")


def _dtypes_and_devices(
    q: Tensor, same: dict[str, Tensor], gates: dict[str, Tensor], *, of: str = "q"
) -> None:
    if not q.is_floating_point():
        raise TypeError(f"{of} is {q.dtype}; pass floating point tensors")
    for name, x in same.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype}, {of} is {q.dtype}; cast {of}, k and v to one dtype")
    for name, x in gates.items():
        if x.dtype != q.dtype and (x.dtype != float32 or q.dtype == float64):
            wanted = _name(q) if q.dtype in (float32, float64) else f"float32 or {_name(q)}"
            raise TypeError(f"{name} is {x.dtype} beside {q.dtype} {of}; it must be {wanted}: cast it")
    for name, x in (same | gates).items():
        if x.device != q.device:
            raise ValueError(
                f"{name} is on {x.device}, {of} is on {q.device}; move all tensors to one device"
            )


def _packed_shapes(q: Tensor, cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens is a {type(cu_seqlens).__name__}; pass an int64 tensor [N + 1]")
    if cu_seqlens.dtype != int64:
        raise TypeError(f"cu_seqlens is {cu_seqlens.dtype}, not torch.int64; convert it once with .long()")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens {shape(cu_seqlens)} is not [N + 1] with N >= 1; pass [0, end of 1st, ..., T]"
        )
    if q.shape[0] != 1:
        raise ValueError(
            f"B={q.shape[0]} with cu_seqlens; packed sequences lie end to end in one row: reshape to B=1"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, q is on {q.device}; move it to q's device")


def _state(name: str, state: Tensor, q: Tensor, wanted: tuple[int, ...], letters: str) -> None:
    if not isinstance(state, Tensor):
        raise TypeError(f"{name} is a {type(state).__name__}; pass a torch.Tensor")
    if tuple(state.shape) != wanted:
        raise ValueError(f"{name} {shape(state)} is not [{letters}] = {numbers(wanted)}")
    dtype = float64 if q.dtype == float64 else float32
    if state.dtype != dtype:
        raise TypeError(
            f"{name} is {state.dtype}; with {q.dtype} q it is {dtype}: states keep full precision"
        )
    if state.device != q.device:
        raise ValueError(f"{name} is on {state.device}, q is on {q.device}; move it to q's device")


def values(
    tensors: dict[str, Tensor | None],
    cu_seqlens: Tensor | None,
    *,
    normalized_inside: bool,
    T: int,
    gates: Gates = AS_GIVEN,
) -> None:
    """Raises ValueError for data that no backend can make sense of; when it looks, the module says."""
    if cu_seqlens is not None and (_checking or cu_seqlens.device.type == "cpu"):
        _bounds(cu_seqlens, T)
    if not _checking:
        return
    finite(tensors | {"A_log": gates.A_log, "dt_bias": gates.dt_bias})
    g, beta, k = tensors["g"], tensors["beta"], tensors["k"]
    assert g is not None and beta is not None and k is not None
    g, beta = gates.applied(g, beta)
    _refuse_where(
        g > 0, "g", g, "is above 0; g is the logarithm of a decay in (0, 1]: pass log(alpha), not alpha"
    )
    _refuse_where((beta < 0) | (beta > 2), "beta", beta, "is outside [0, 2]; pass sigmoid(b) or 2 sigmoid(b)")
    if not normalized_inside:
        _refuse_long(k, "pass use_qk_l2norm_in_kernel=True")


def finite(tensors: Mapping[str, Tensor | None]) -> None:
    """Inside `checking()`: raises ValueError for NaN and infinity in any."""
    if not _checking:
        return
    for name, x in tensors.items():
        if x is not None:
            _refuse_where(~x.isfinite(), name, x, "is not finite; look for where it was made")


def _bounds(cu_seqlens: Tensor, T: int) -> None:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != T:
        raise ValueError(f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it must run from 0 to T={T}")
    for n in range(len(bounds) - 1):
        if bounds[n] > bounds[n + 1]:
            raise ValueError(
                f"cu_seqlens falls from {bounds[n]} at {n} to {bounds[n + 1]} at {n + 1}; "
                "pass the running sum of the lengths"
            )


def _refuse_long(k: Tensor, remedy: str) -> None:
    norm = k.double().norm(dim=-1) if k.dtype == float64 else k.float().norm(dim=-1)
    # rounding every element of a unit vector to k's dtype moves its norm by at most eps / 2
    _refuse_where(
        norm > 1 + finfo(k.dtype).eps,
        "the norm of k",
        norm,
        "is above 1, so that 1 - beta |k|^2 may leave [-1, 1] and the state grow without bound; "
        f"normalize k, or {remedy}",
    )


def _refuse_where(bad: Tensor, name: str, x: Tensor, complaint: str) -> None:
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name} at {where} is {x[where].item():.6g}, which {complaint}")


def shape(x: Tensor) -> str:
    """Its sizes in brackets."""
    return numbers(x.shape)


def numbers(sizes: Sequence[int]) -> str:
    """[2, 3, 4]."""
    return "[" + ", ".join(map(str, sizes)) + "]"


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
