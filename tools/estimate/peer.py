"""flash-linear-attention's kernels of the same call, where that package is installed.

Its kernels are autotuned. `launches` yields every configuration that the autotuner would try, and
the fastest estimate counts. The modules are loaded without their packages' __init__ files, which
import models and ask for a GPU; `fla.utils` is replaced by a module that describes a Hopper.

Source: https://github.com/fla-org/flash-linear-attention (MIT): the functions
chunk_gated_delta_rule_fwd and _bwd call these kernels in this order in release 0.6.0, and from
0.5.1 on. That is its Triton code: where FlashQLA or TileLang are installed, 0.6.0 hands some calls
to those by itself.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from typing import Any

from triton import Config
from triton.runtime.jit import JITFunction

from delta_trn.triton_kernels.launch import Tile, power_of_two
from delta_trn.triton_kernels.variants import Variant
from tools.estimate.simulate import Work
from tools.estimate.work import ITEM, Launch, Shape

C = 64
TYPES = {
    "*bf16": "q k v w u v_new h dh do dv dv2 A o beta dw du dk dq db",
    "*fp32": "g dg",
    "fp32": "scale",
    "i32": "T",
}
TYPES_OF_CHANNELS = TYPES | {
    "*bf16": "q k v w u v_new h dh do dv dv2 A Aqk Akk o beta qg kg",
    "*fp32": "g gk Akkd dg dg2 dq dq2 dk dk2 db dA dAqk dAkk",
}
PACKAGES = (
    "fla fla.ops fla.ops.gated_delta_rule fla.ops.common fla.modules fla.modules.causal_conv1d "
    "fla.modules.norm fla.modules.fused_cross_entropy"
)
ABSENT = "gk g_gamma h0 ht dht dh0 cu_seqlens chunk_indices chunk_offsets"


class NotInstalled(RuntimeError):
    """flash-linear-attention is not installed; the message says how to install it."""


class _Utils(ModuleType):
    """Stands for `fla.utils` on a Hopper: flags are False
    and functions change nothing, unless set.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.isupper():
            return False
        return lambda *arguments, **_: (
            arguments[0] if arguments and callable(arguments[0]) else lambda f: f
        )


def version() -> str:
    """Returns the installed release; raises NotInstalled."""
    try:
        return distribution("fla-core").version
    except PackageNotFoundError:
        raise NotInstalled(
            "flash-linear-attention is not installed; pip install --no-deps "
            "flash-linear-attention==0.6.0 fla-core==0.6.0 einops"
        ) from None


def load(module: str) -> ModuleType:
    """Returns one of its modules, by its name without "fla."; raises NotInstalled."""
    if "fla.utils" not in sys.modules:
        root = distribution("fla-core").locate_file("")
        for name in PACKAGES.split():
            package = ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")))]
            sys.modules[name] = package
        sys.modules["fla"].__dict__["__version__"] = version()
        utils = _Utils("fla.utils")
        utils.__dict__.update(
            check_shared_mem=lambda *_: True,
            IS_NVIDIA=True,
            IS_NVIDIA_HOPPER=True,
            IS_TF32_SUPPORTED=True,
            TRITON_ABOVE_3_4_0=True,
            TRITON_ABOVE_3_6_0=True,
            TRITON_ABOVE_3_7_1=True,
            IS_GATHER_SUPPORTED=True,
            autotune_cache_kwargs={},
            has_usable_nvcc=lambda *_: False,
            find_spec_cached=lambda *_: None,
        )
        sys.modules["fla.utils"] = utils
    return import_module(f"fla.{module}")


def unwrap(function: Any) -> tuple[JITFunction, tuple]:
    """Returns a kernel and its autotuner's configurations, none if it is not tuned."""
    tuned = ()
    while not isinstance(function, JITFunction):
        tuned = getattr(function, "configs", tuned)
        function = function.fn
    return function, tuple(tuned)


def variant_of(
    name: str,
    function: JITFunction,
    types: dict[str, str],
    values: dict[str, Any],
    choice: Config,
    multiples: tuple[str, ...] = (),
) -> Variant:
    """Returns what a launch by one of an autotuner's configurations compiles."""
    tile = Tile(0, choice.num_warps, choice.num_stages)
    blocks = "".join(f"{n}={v} " for n, v in choice.kwargs.items())
    options = f"{blocks}warps={tile.warps} stages={tile.stages}"
    return Variant(name, options, function, types, tile, values, multiples)


@dataclass(frozen=True)
class _Kernel:
    """One of its kernels. The functions get the call's sizes and the configuration's block sizes.

    programs    per chunk, or per sequence where the kernel is serial
    blocks      its block sizes that no configuration sets
    products    turns of its loops with matrix products, in order
    load_bytes  what it must load
    """

    module: str
    function: str
    programs: Callable[["Sizes", dict[str, int]], int]
    load_bytes: Callable[["Sizes"], float]
    products: Callable[["Sizes", dict[str, int]], tuple[int, ...]]
    blocks: Callable[["Sizes"], dict[str, int]] = lambda sizes: {}
    others: tuple[int, ...] = ()
    serial: bool = False


def _cut(size: int, block: int) -> int:
    return -(-size // block)


class Sizes:
    """Bytes of the tensors of a call, and its chunks."""

    def __init__(self, shape: Shape):
        self.K, self.V = shape.K, shape.V
        self.tokens = shape.sequences * shape.tokens
        self.per_sequence = _cut(shape.tokens, C)
        self.chunks = shape.sequences * self.per_sequence
        rows = self.tokens * shape.HV
        self.keys = self.tokens * shape.H * shape.K * ITEM  # of q or k
        self.w = rows * shape.K * ITEM
        self.values = rows * shape.V * ITEM
        self.A = rows * C * ITEM
        self.gates = rows * 4
        self.decays = rows * shape.K * 4  # one of every channel
        self.states = self.chunks * shape.HV * shape.K * shape.V * ITEM


def _by(most: int) -> Callable[[Sizes], dict[str, int]]:
    return lambda s: {"BK": min(power_of_two(s.K), most), "BV": min(power_of_two(s.V), most)}


_DELTA_H, _O, _WY = "ops.common.chunk_delta_h", "ops.common.chunk_o", "ops.gated_delta_rule.wy_fast"
KERNELS = {
    "kkt, solve": _Kernel(
        "ops.gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
        lambda s, b: 1, lambda s: s.keys + 1.5 * s.gates, lambda s, b: (_cut(s.K, b["BK"]),),
        # the rows 2 to 15 of each diagonal block of 16
        lambda s: {"BC": 16}, (14, 14, 14, 14),
    ),
    "w, u": _Kernel(
        _WY, "recompute_w_u_fwd_kernel",
        lambda s, b: 1, lambda s: s.A + s.values + s.keys + 1.5 * s.gates,
        lambda s, b: (_cut(s.V, 64), _cut(s.K, 64)), lambda s: {"BK": 64, "BV": 64},
    ),
    "states": _Kernel(
        _DELTA_H, "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        lambda s, b: _cut(s.V, b["BV"]), lambda s: s.w + s.values + s.keys + s.gates,
        lambda s, b: (s.per_sequence,), serial=True,
    ),
    "outputs": _Kernel(
        _O, "chunk_fwd_kernel_o",
        lambda s, b: _cut(s.V, b["BV"]), lambda s: 2 * s.keys + s.values + s.states + s.gates,
        lambda s, b: (_cut(s.K, b["BK"]),),
    ),
    "dv, local": _Kernel(
        _O, "chunk_bwd_kernel_dv_local",
        lambda s, b: 1, lambda s: 2 * s.keys + s.values,
        lambda s, b: (_cut(s.K, b["BK"]), _cut(s.V, b["BV"])), _by(128),
    ),
    "reverse states": _Kernel(
        _DELTA_H, "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
        lambda s, b: _cut(s.V, b["BV"]), lambda s: 2 * s.keys + s.w + 2 * s.values + s.gates,
        lambda s, b: (s.per_sequence,), serial=True,
    ),
    "dq, dk, dw, dg": _Kernel(
        _O, "chunk_bwd_kernel_dqkwg",
        lambda s, b: _cut(s.K, b["BK"]), lambda s: 3 * s.values + 2 * s.states + 2 * s.keys,
        lambda s, b: (_cut(s.V, b["BV"]),), _by(128),
    ),
    "gradients of w, u": _Kernel(
        _WY, "prepare_wy_repr_bwd_kernel",
        lambda s, b: 1, lambda s: s.keys + 2 * s.values + s.w + s.A,
        lambda s, b: (_cut(s.K, b["BK"]), _cut(s.V, b["BV"]), _cut(s.K, b["BK"])), _by(64),
    ),
}  # fmt: skip
FORWARD = ("kkt, solve", "w, u", "states", "outputs")
BACKWARD = ("w, u", "states", "dv, local", "reverse states", "dq, dk, dw, dg", "gradients of w, u")
_INTRA, _BWD, _BLOCKS = "ops.kda.chunk_intra", "ops.kda.chunk_bwd", {"BC": 16, "NC": 4}
# those of chunk_kda with its safe gate, the faster way; backward repeats the third and the fourth
CHANNELS = {
    "diagonal blocks": _Kernel(
        _INTRA,
        "chunk_kda_fwd_kernel_intra_sub_chunk",
        lambda s, b: 4,
        lambda s: 2 * s.keys + s.decays,
        lambda s, b: (),
        lambda s: {"BC": 16, "BK": power_of_two(s.K)},
        (14,),
    ),
    "kkt, solve": _Kernel(
        _INTRA,
        "chunk_kda_fwd_kernel_inter_solve_fused",
        lambda s, b: 1,
        lambda s: 2 * s.keys + s.decays + s.A / 2,
        lambda s, b: (_cut(s.K, b["BK"]),),
        lambda s: _BLOCKS,
    ),
    "w, u": replace(
        KERNELS["w, u"],
        module="ops.kda.wy_fast",
        function="recompute_w_u_fwd_kda_kernel",
        load_bytes=lambda s: s.A + s.values + s.keys + s.decays,
    ),
    "states": replace(KERNELS["states"], load_bytes=lambda s: 2 * s.w + s.values),
    "outputs": replace(
        KERNELS["outputs"],
        module="ops.gla.chunk",
        function="chunk_gla_fwd_kernel_o",
        load_bytes=lambda s: s.keys + s.decays + s.values + s.states + s.A,
    ),
    "dv, dA": replace(
        KERNELS["dv, local"],
        module=_BWD,
        function="chunk_kda_bwd_kernel_dAv",
        load_bytes=lambda s: s.A + 2 * s.values,
        products=lambda s, b: (_cut(s.V, b["BV"]),),
    ),
    "reverse states": replace(
        KERNELS["reverse states"], load_bytes=lambda s: 3 * s.w + 2 * s.values
    ),
    "dq, dk, dg, dA": _Kernel(
        _BWD,
        "chunk_kda_bwd_kernel_wy_dqkg_fused",
        lambda s, b: 1,
        lambda s: 2 * s.keys + s.decays + 4 * s.values + 2 * s.states + s.A,
        lambda s, b: (_cut(s.K, b["BK"]), _cut(s.V, b["BV"])),
    ),
    "gradients of blocks": _Kernel(  # of 16 tokens: 1.5 others lie before one on average, and behind it
        _INTRA,
        "chunk_kda_bwd_kernel_intra",
        lambda s, b: 4 * _cut(s.K, 32),
        lambda s: 2 * s.keys + 4 * s.decays + 4 * s.A,
        lambda s, b: (2, 1),
        lambda s: _BLOCKS | {"BK": 32},
    ),
}


def launches(shape: Shape) -> Iterator[tuple[Launch, ...]]:
    """Yields, in their order, each kernel's configurations; one of them runs."""
    order, both = (FORWARD, BACKWARD), tuple(CHANNELS)
    if shape.rule:
        order = both[:5], both[2:4] + both[5:]
    for backward, names in zip((False, True), order, strict=True):
        for name in names:
            yield tuple(configurations(name, shape, backward=backward))
    for launch in _small(shape):
        yield (launch,)


def configurations(name: str, shape: Shape, *, backward: bool = False) -> Iterator[Launch]:
    """Yields a kernel's launches, one for each configuration of its autotuner."""
    kernel, sizes = (CHANNELS if shape.rule else KERNELS)[name], Sizes(shape)
    function, tuned = unwrap(getattr(load(kernel.module), kernel.function))
    switches = {
        "USE_G": True,
        "SAVE_NEW_VALUE": True,
        "USE_DW": True,
        "USE_GK": False,
        "USE_G_GAMMA": False,
        "USE_A": False,
        "USE_INITIAL_STATE": False,
        "USE_FINAL_STATE_GRADIENT": False,
        "STORE_FINAL_STATE": False,
        "STATE_V_FIRST": False,
        "IS_VARLEN": False,
    }
    fixed = {
        "B": shape.sequences,
        "H": shape.H,
        "HV": shape.HV,
        "K": shape.K,
        "V": shape.V,
        "BT": C,
    }
    absent = dict.fromkeys(ABSENT.split() + (["A"] if name == "dv, local" else []))
    types = TYPES
    if shape.rule:
        switches |= {"USE_G": False, "USE_GK": True, "STORE_QG": backward, "STORE_KG": True}
        switches |= {"USE_SAFE_GATE": True, "SAFE_GATE": True, "GATE_SHIFT": 2 * 1.4426950408889634}
        switches |= {"USE_GATHER": True, "USE_GRAPH": False}
        absent["g"] = absent.pop("gk")
        if "gk" not in function.arg_names:
            del absent["g"]
        types = TYPES_OF_CHANNELS
        if name == "diagonal blocks":  # which wait for the inverse in float32
            types = types | {
                "*bf16": types["*bf16"].replace("Akk ", ""),
                "*fp32": types["*fp32"] + " Akk",
            }
    for choice in tuned:
        blocks = kernel.blocks(sizes) | choice.kwargs
        values = {
            n: v for n, v in (switches | fixed | absent | blocks).items() if n in function.arg_names
        }
        variant = variant_of(name, function, types, values, choice)
        yield Launch(name, backward, variant, work(kernel, shape, choice.kwargs))


def work(kernel: _Kernel, shape: Shape, blocks: dict[str, int]) -> Work:
    """Returns what a launch of `kernel` asks of the device,
    with the block sizes of a configuration.
    """
    sizes = Sizes(shape)
    blocks = kernel.blocks(sizes) | blocks
    units = shape.sequences if kernel.serial else sizes.chunks
    return Work(
        units * shape.HV * kernel.programs(sizes, blocks),
        kernel.load_bytes(sizes),
        kernel.products(sizes, blocks),
        kernel.others,
        shape.K / power_of_two(shape.K),
        kernel.serial,
    )


def _small(shape: Shape) -> Iterator[Launch]:
    """Yields the kernels of which only the bytes count: those of norms, gates and sums."""
    s = Sizes(shape)
    moved = [
        ("norms of q and k", False, 4 * s.keys, 2),
        ("gates, cumulated", False, 2 * s.gates, 1),
        ("beta", False, s.gates, 1),
        ("zeros of A", False, s.A, 1),
        ("sum of dk", True, 3 * s.w, 1),
        ("sums of dg", True, 7 * s.gates, 3),
        ("gradients of the norms", True, 6 * s.keys, 2),
        ("gradients of the gates", True, 3 * s.gates, 3),
        ("gradient of beta", True, 1.5 * s.gates, 1),
    ]
    if shape.rule:  # sums of g and dg, twice norms in float32, and zeros of o as well
        forward, backward = (
            4 * s.keys + 2 * s.decays + s.gates + s.A + s.values,
            8 * s.keys + 7.1 * s.decays,
        )
        moved = [
            ("small kernels", False, forward, 6),
            ("small kernels", True, backward + 7.5 * s.gates, 10),
        ]
    if shape.HV > shape.H:
        moved.append(("sums of grouped heads", True, 4.5 * s.w, 3))
    for name, backward, size, count in moved:
        yield Launch(name, backward, None, Work(0, size), count)
