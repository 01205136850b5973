"""flash-linear-attention's kernels of the same call, where that package is installed.

Its kernels are autotuned. `launches` yields every configuration that the autotuner would try, and the fastest
estimate counts. The modules are loaded without their packages' __init__ files, which import models and ask
for a GPU; `fla.utils` is replaced by a module that describes a Hopper.

Source: https://github.com/fla-org/flash-linear-attention (MIT): the functions chunk_gated_delta_rule_fwd and
_bwd call these kernels in this order in release 0.6.0, and from 0.5.1 on. That is its Triton code: where
FlashQLA or TileLang are installed, 0.6.0 hands some calls to those by itself.
"""

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
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
    """Stands for `fla.utils` on a Hopper: flags are False and functions change nothing, unless set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.isupper():
            return False
        return lambda *arguments, **_: arguments[0] if arguments and callable(arguments[0]) else lambda f: f


def version() -> str:
    """Returns the installed release; raises NotInstalled."""
    try:
        return distribution("fla-core").version
    except PackageNotFoundError:
        raise NotInstalled(
            "flash-linear-attention is not installed; pip install --no-deps flash-linear-attention==0.6.0 "
            "fla-core==0.6.0 einops"
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
            check_shared_mem=lambda *_: True, IS_NVIDIA=True, IS_NVIDIA_HOPPER=True, IS_TF32_SUPPORTED=True,
            TRITON_ABOVE_3_4_0=True, TRITON_ABOVE_3_6_0=True, TRITON_ABOVE_3_7_1=True,
            IS_GATHER_SUPPORTED=True, autotune_cache_kwargs={}, has_usable_nvcc=lambda *_: False,
            find_spec_cached=lambda *_: None,
        )  # fmt: skip
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
    """One of its kernels, a row of peer.csv; K/BK is how many blocks of BK cover K.

    programs    per chunk, or per sequence where the kernel is serial
    load_bytes  what it must load: multiples of what Sizes has
    products    turns of its loops with matrix products, in order; of its other loops: others
    blocks      its block sizes that no configuration sets; BK<=64: the power of two from K on, 64 at most
    """

    rule: str
    name: str
    module: str
    function: str
    programs: str
    load_bytes: str
    products: str
    blocks: str
    others: str
    serial: str


class Sizes:
    """Bytes of the tensors of a call, and its chunks."""

    def __init__(self, shape: Shape):
        self.K, self.V = shape.K, shape.V
        self.tokens = shape.sequences * shape.tokens
        self.per_sequence = -(-shape.tokens // C)
        self.chunks = shape.sequences * self.per_sequence
        rows = self.tokens * shape.HV
        self.keys = self.tokens * shape.H * shape.K * ITEM  # of q or k
        self.w = rows * shape.K * ITEM
        self.values = rows * shape.V * ITEM
        self.A = rows * C * ITEM
        self.gates = rows * 4
        self.decays = rows * shape.K * 4  # one of every channel
        self.states = self.chunks * shape.HV * shape.K * shape.V * ITEM

    def count(self, text: str, blocks: dict[str, int]) -> int:
        """Returns a number of peer.csv, such as "4*K/32"."""
        times, _, quotient = text.rpartition("*")
        known = vars(self) | blocks
        size, block = (known.get(word) or int(word) for word in f"{quotient}/1".split("/")[:2])
        return int(times or 1) * -(-size // block)

    def sum_bytes(self, text: str) -> float:
        """Returns the bytes of "2*keys A"."""
        words = (word.rpartition("*") for word in text.split())
        return sum(float(times or 1) * getattr(self, name) for times, _, name in words)

    def find_blocks(self, text: str) -> dict[str, int]:
        """Returns the block sizes of "BC=16 BK<=64"."""
        words = (word.partition("=") for word in text.split())
        return {
            name[:2]: min(int(size), power_of_two(getattr(self, name[1]))) if name[2:] else int(size)
            for name, _, size in words
        }


with Path(__file__).with_suffix(".csv").open(newline="") as _file:
    _ROWS = [_Kernel(**row) for row in csv.DictReader(_file)]
# those of chunk_kda are of its safe gate, the faster way; its backward repeats the third and the fourth
KERNELS, CHANNELS = ({x.name: x for x in _ROWS if x.rule == rule} for rule in ("", "kimi_"))
FORWARD = ("kkt, solve", "w, u", "states", "outputs")
BACKWARD = ("w, u", "states", "dv, local", "reverse states", "dq, dk, dw, dg", "gradients of w, u")


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
        "USE_G": True, "SAVE_NEW_VALUE": True, "USE_DW": True, "USE_GK": False, "USE_G_GAMMA": False,
        "USE_A": False, "USE_INITIAL_STATE": False, "USE_FINAL_STATE_GRADIENT": False,
        "STORE_FINAL_STATE": False, "STATE_V_FIRST": False, "IS_VARLEN": False,
    }  # fmt: skip
    fixed = {"B": shape.sequences, "H": shape.H, "HV": shape.HV, "K": shape.K, "V": shape.V, "BT": C}
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
    for choice in tuned:
        blocks = sizes.find_blocks(kernel.blocks) | choice.kwargs
        values = {n: v for n, v in (switches | fixed | absent | blocks).items() if n in function.arg_names}
        variant = variant_of(name, function, types, values, choice)
        yield Launch(name, backward, variant, work(kernel, shape, choice.kwargs))


def work(kernel: _Kernel, shape: Shape, blocks: dict[str, int]) -> Work:
    """Returns what a launch of `kernel` asks of the device, with the block sizes of a configuration."""
    sizes = Sizes(shape)
    blocks = sizes.find_blocks(kernel.blocks) | blocks
    units = shape.sequences if kernel.serial else sizes.chunks
    products, others = (
        tuple(sizes.count(word, blocks) for word in text.split()) for text in (kernel.products, kernel.others)
    )
    return Work(
        units * shape.HV * sizes.count(kernel.programs, blocks), sizes.sum_bytes(kernel.load_bytes),
        products, others, shape.K / power_of_two(shape.K), bool(kernel.serial),
    )  # fmt: skip


def _small(shape: Shape) -> Iterator[Launch]:
    """Yields the kernels of which only the bytes count, those of norms, gates and sums: peer_small.csv.

    Kimi Delta Attention has sums of g and dg, twice norms in float32, and zeros of o as well.
    """
    with Path(__file__).with_name("peer_small.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["rule"] == shape.rule]
    if shape.HV > shape.H:
        rows.append({"name": "sums of grouped heads", "backward": "yes", "load_bytes": "4.5*w", "count": "3"})
    for row in rows:
        work = Work(0, Sizes(shape).sum_bytes(row["load_bytes"]))
        yield Launch(row["name"], bool(row["backward"]), None, work, int(row["count"]))
