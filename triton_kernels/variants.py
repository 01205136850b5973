"""What `compile_only` compiles: every kernel's module declares its variants beside the kernel.

A module has TYPES, the types of its kernels' arguments, and a generator `variants(K, V, itemsize, quick)`,
where K and V are the two sizes that distinguish launches of the module.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from delta_trn.triton_kernels.launch import Tile

# type -> names of arguments; *x is a pointer to the call's element type
Types = dict[str, str]

# absent where g and beta are given, and where sequences are not packed
GATE_ARGUMENTS = ("A_log", "dt_bias", "beta_max", "dgates")
PACKED_ARGUMENTS = ("cu_seqlens", "chunk_offsets", "chunk_start", "chunk_length")


@dataclass(frozen=True)
class Variant:
    """One launch to compile. The values of compile-time arguments; None for an argument that is absent.

    `values` may name arguments that this kernel does not have: its neighbors share them.
    """

    kernel: str
    options: str
    function: Any
    types: Types
    tile: Tile
    values: dict[str, Any]

    def signature(self, dtype: str) -> dict[str, str]:
        """Returns the type of every argument; raises KeyError for one that is neither typed nor valued."""
        types = {name: kind for kind, names in self.types.items() for name in names.split()}
        names = self.function.arg_names
        if unknown := [name for name in names if name not in types and name not in self.values]:
            raise KeyError(
                f"{self.kernel}: argument {unknown[0]!r} has no type; add it to TYPES beside the kernel"
            )
        return {
            name: "constexpr" if name in self.values else types[name].replace("*x", f"*{dtype}")
            for name in names
        }


def gates(quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the two ways to pass g and beta: as they are, and as what the kernel computes them from."""
    if not quick:
        yield "gates given", dict.fromkeys(GATE_ARGUMENTS)
    yield "gates made", {}


def layouts(quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the two layouts of sequences: dense, and packed with a table of boundaries."""
    yield "dense", dict.fromkeys(PACKED_ARGUMENTS)
    if not quick:
        yield "packed", {}
