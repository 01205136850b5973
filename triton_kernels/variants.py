"""What `compile_only` compiles: every kernel's module declares its variants beside the kernel.

A module has TYPES, which maps a type to the names of the arguments that have it; *x is a pointer to
the call's element type. Its generator `variants(K, V, itemsize, quick)` yields the launches of a
module at the two sizes that distinguish them, which are other sizes than K and V where the module
says so.
"""

from dataclasses import dataclass
from typing import Any

from delta_trn.triton_kernels.chunks import PROCESSORS
from delta_trn.triton_kernels.launch import ANY, Tile, config

# absent where g and beta are given, and where sequences are not packed
GATE_ARGUMENTS: tuple[str, ...] = ("A_log", "dt_bias", "beta_max", "dgates")
ROW_ARGUMENTS: tuple[str, ...] = (
    "QR", "KR", "VR", "XR", "GR", "BR", "DQR", "DKR", "DVR", "DGR", "DBR",
)  # fmt: skip
PACKED_ARGUMENTS: tuple[str, ...] = ("cu_seqlens", "chunk_offsets", "chunk_start", "chunk_length")

# ends the options of variants that only few heads take, and those that divide V by 32
FEW, FEWER = ", few heads", ", fewer heads"


@dataclass(frozen=True)
class Variant:
    """One launch to compile. `values` holds the compile-time arguments, and None for every absent
    tensor.

    It may name arguments that this kernel does not have: the kernels of a module share them.
    `multiples` names the integers that a launch would find to be multiples of 16, which lets it
    load several at once.
    """

    kernel: str
    options: str
    function: Any
    types: dict[str, str]
    tile: Tile
    values: dict[str, Any]
    multiples: tuple[str, ...] = ()

    def signature(self, dtype: str) -> dict[str, str]:
        """Returns the type of every argument; raises KeyError for one
        that is neither typed nor valued.
        """
        types = {name: of_type for of_type, names in self.types.items() for name in names.split()}
        names = self.function.arg_names
        if unknown := [name for name in names if name not in types and name not in self.values]:
            raise KeyError(
                f"{self.kernel}: argument {unknown[0]!r} has no type; add it to TYPES beside the "
                "kernel"
            )
        return {
            name: "constexpr" if name in self.values else types[name].replace("*x", f"*{dtype}")
            for name in names
        }


def rows_of(H: int, HV: int, K: int, V: int) -> dict[str, int]:
    """Returns the heads, and the elements from a token to the next, as a layer has them.

    q, k and v lie side by side, g and beta do, and so do their gradients, except dq and dk of
    grouped heads.
    """
    row = 2 * H * K + HV * V
    strides = dict.fromkeys(("QR", "KR", "VR", "XR", "DVR"), row)
    strides |= dict.fromkeys(("DQR", "DKR"), row if H == HV else HV * K)
    return {"H": H, "HV": HV} | strides | dict.fromkeys(("GR", "BR", "DGR", "DBR"), 2 * HV)


def channel_rows_of(H: int, HV: int, K: int, V: int) -> dict[str, int]:
    """Returns the same for Kimi Delta Attention, with g [B, tokens, HV, K] and beta apart."""
    channels = dict.fromkeys(("GR", "DGR"), HV * K) | dict.fromkeys(("BR", "DBR"), HV)
    return rows_of(H, HV, K, V) | dict.fromkeys(("DQR", "DKR"), HV * K) | channels


def by_heads(kernel: str, K: int, V: int, itemsize: int, rule: str = "") -> dict[str, Tile]:
    """Returns the launches of a scan, each once:
    what the options of its variants end with -> tile. rule: as `launch.config` takes it.
    """
    heads = {"": ANY, FEW: 1, FEWER: PROCESSORS // -(-V // 32)}
    tiles: dict[str, Tile] = {}
    for options, count in heads.items():
        tile = getattr(config(K, V, itemsize=itemsize, heads=count, rule=rule), kernel)
        if tile not in tiles.values():
            tiles[options] = tile
    return tiles


def of_tile(tile: Tile) -> dict[str, Any]:
    """Returns the compile-time arguments of a scan that follow from its launch."""
    return {"BV": tile.columns, "UPRIGHT": tile.upright, "ALONE": tile.warps > 4}


def gates(quick: bool) -> dict[str, dict[str, Any]]:
    """Returns the ways to pass g and beta: as they are,
    and as what the kernel computes them from.
    """
    return ({} if quick else {"gates given": dict.fromkeys(GATE_ARGUMENTS)}) | {"gates made": {}}


def layouts(quick: bool) -> dict[str, dict[str, Any]]:
    """Returns the layouts of sequences: dense; packed,
    with a table of boundaries and with states.
    """
    return ({} if quick else {"dense": dict.fromkeys(PACKED_ARGUMENTS)}) | {"packed": {}}
