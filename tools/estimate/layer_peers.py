"""flash-linear-attention's kernels of what `layers` lists, where that package is installed.

Every configuration that its autotuner would try is one launch, and the fastest estimate counts. Its
norms run 132 programs backward, one per processor. Where it has two kernels for one of ours, both
have the name of ours: its convolution runs forward again, without SiLU, before backward, and its
cross-entropy has a kernel for the gradient. Left out are the sums of weight gradients over
programs, ours and its.

Source: https://github.com/fla-org/flash-linear-attention (MIT), release 0.6.0:
modules/causal_conv1d, norm and fused_cross_entropy, ops/gated_delta_rule/fused_recurrent.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

from triton import Config

from delta_trn.triton_kernels.chunks import PROCESSORS
from delta_trn.triton_kernels.launch import power_of_two
from tools.estimate.layers import (
    CHANNELS,
    HEADS,
    SEQUENCES,
    TARGETS,
    VOCABULARY,
    B,
    D,
    H,
    T,
    V,
    W,
    state,
)
from tools.estimate.peer import load, unwrap, variant_of
from tools.estimate.simulate import Work
from tools.estimate.work import ITEM, Launch

# integers that are multiples of 16 here
MULTIPLES = (
    "T", "s_logits", "s_dlogits",
    *(f"stride_{name}_{axis}" for name in ("x", "dx", "dy") for axis in "nt"),
)  # fmt: skip
TYPES = {
    "*bf16": "x y g w b weight dy dx dg res res_out dres logits dlogits q k v beta o",
    "*fp32": "rstd dw A_log dt_bias h0 ht loss lse z_loss dloss",
    "*i64": "target",
    "fp32": "eps scale",
    "i32": "B T BS N stride_x_n stride_x_t stride_dx_n stride_dx_t stride_dy_n stride_dy_t s_logits"
    " s_dlogits",
}
BLOCK = 64  # tokens of a program of its convolution


def peers(name: str) -> Iterator[tuple[Launch, ...]]:
    """Yields each kernel's configurations; one of them runs. `name` is one of layers.NAMES."""
    if name in SEQUENCES:
        yield _step(SEQUENCES[name])
        return
    yield from _convolution()
    yield from gated_norm(B * T * H, V)
    yield from _norm(
        "norm of the stream", "modules.norm.layernorm", "layer_norm_{}_kernel_row", B * T, D
    )
    yield from _softmax()


def _launches(
    name: str,
    backward: bool,
    kernel: Any,
    values: dict[str, Any],
    work: Callable[[dict[str, int]], Work],
    warps: int = 4,
) -> tuple[Launch, ...]:
    """Returns the launches of a kernel. It has `warps` if it is not tuned;
    work: of its block sizes.
    """
    function, tuned = unwrap(kernel)
    flags = ("HAS_", "USE_", "STORE_", "IS_", "RECOMPUTE_")
    values = {flag: False for flag in function.arg_names if flag.startswith(flags)} | values
    found = []
    for choice in tuned or (Config({}, num_warps=warps, num_stages=3),):
        own = values | choice.kwargs
        variant = variant_of(name, function, TYPES, own, choice, MULTIPLES)
        found.append(Launch(name, backward, variant, work(own)))
    return tuple(found)


def _convolution() -> Iterator[tuple[Launch, ...]]:
    module, size = load("modules.causal_conv1d.ops"), B * T * CHANNELS * ITEM
    absent = ("bias", "residual", "cu_seqlens", "initial_state", "chunk_indices", "dht", "db")
    values = dict.fromkeys(absent) | {
        "D": CHANNELS,
        "W": W,
        "BT": BLOCK,
        "BW": power_of_two(W),
        "NB": -(-B * T // 1024),
        "stride_x_d": 1,
        "stride_dx_d": 1,
        "stride_dy_d": 1,
        "ACTIVATION": "silu",
        "HAS_WEIGHT": True,
    }

    def work(load_bytes: float) -> Callable[[dict[str, int]], Work]:
        return lambda own: Work(-(-CHANNELS // own["BD"]) * (T // BLOCK) * B, load_bytes)

    forward, again = module.causal_conv1d_fwd_kernel, values | {"ACTIVATION": None}
    yield _launches("convolution", False, forward, values, work(size))
    yield _launches("convolution, backward", True, forward, again, work(size))
    yield _launches(
        "convolution, backward", True, module.causal_conv1d_bwd_kernel, values, work(3 * size)
    )  # fmt: skip


def gated_norm(M: int, N: int, activation: str = "swish") -> Iterator[tuple[Launch, ...]]:
    """Yields forward and backward of the norm of M gated rows of N."""
    module, kernel = "modules.norm.fused_norm_gate", "layer_norm_gated_{}_kernel"
    yield from _norm("gated norm", module, kernel, M, N, activation)


def _norm(
    name: str, module: str, kernel: str, M: int, N: int, activation: str = "swish"
) -> Iterator[tuple[Launch, ...]]:
    """Yields forward and backward of M rows of N: gated rows, or rows of a residual sum."""
    found, size, gated = load(module), M * N * ITEM, "gated" in kernel
    rows = -(-M // PROCESSORS)
    values = dict.fromkeys(
        ("b", "mean", "residual", "residual_out", "db", "dresidual", "dresidual_in", "dres_in")
    )
    values |= {
        "D": N,
        "BD": power_of_two(N),
        "NB": -(-M // 65536),
        "ACTIVATION": activation,
        "G": 1,
    }
    values |= {"GS": PROCESSORS, "IS_RMS_NORM": True, "HAS_WEIGHT": True}
    if not gated:
        values |= {
            "HAS_RESIDUAL": True,
            "STORE_RESIDUAL_OUT": True,
            "HAS_DRESIDUAL": True,
            "BS": rows,
        }
    yield _launches(
        name, False, getattr(found, kernel.format("fwd")), values,
        lambda own: Work(-(-M // own.get("BT", 1)), 2 * size),
    )  # fmt: skip
    yield _launches(
        f"{name}, backward", True, getattr(found, kernel.format("bwd")), values | {"y": None},
        lambda own: Work(PROCESSORS, 3 * size, others=(-(-rows // own.get("BT", 1)),)),
    )  # fmt: skip


def _softmax() -> Iterator[tuple[Launch, ...]]:
    module, size = load("modules.fused_cross_entropy.ops"), TARGETS * VOCABULARY * ITEM
    values = {
        "label_smoothing": 0.0,
        "logit_scale": 1.0,
        "lse_square_scale": 0.0,
        "logit_softcapping": None,
    }
    values |= {
        "ignore_index": -100,
        "V": VOCABULARY,
        "V_TOTAL": VOCABULARY,
        "V_START": 0,
        "SPLIT": False,
    }
    name, whole, part = "cross-entropy and its gradient", min(power_of_two(VOCABULARY), 65536), 4096
    forward, backward = (values | {"s_dloss": 1, "BV": columns} for columns in (whole, part))
    works = Work(TARGETS, size), Work(TARGETS * VOCABULARY // part, size)
    yield _launches(
        name, True, module.cross_entropy_fwd_kernel, forward, lambda own: works[0], warps=16
    )
    yield _launches(
        name, True, module.cross_entropy_bwd_kernel, backward, lambda own: works[1], warps=8
    )


def _step(sequences: int) -> tuple[Launch, ...]:
    module = load("ops.gated_delta_rule.fused_recurrent")
    values = (
        dict.fromkeys(("gk", "gv", "cu_seqlens"))
        | HEADS
        | {
            "BK": power_of_two(HEADS["K"]),
            "BV": 8,
            "USE_G": True,
            "USE_QK_L2NORM_IN_KERNEL": True,
            "IS_BETA_HEADWISE": True,
            "USE_INITIAL_STATE": True,
            "STORE_FINAL_STATE": True,
            "STATE_V_FIRST": False,
            "USE_GATE_IN_KERNEL": True,
            "HAS_DT_BIAS": True,
            "APPLY_BETA_SIGMOID": True,
            "ALLOW_NEG_EIGVAL": False,
        }
    )
    programs = sequences * HEADS["HV"] * HEADS["V"] // 8
    kernel = module.fused_recurrent_gated_delta_rule_fwd_kernel
    work = Work(programs, state(sequences)[0], others=(1,))
    return _launches("token", False, kernel, values, lambda own: work, warps=1)
