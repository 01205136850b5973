"""Counts the forms in a recorded run that Trn1 refuses or gets wrong."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from nki_simulator.core.chip import Sums
from nki_simulator.core.machine import Engine, Record
from nki_simulator.core.memory import PSUM

PRODUCTS = ("tensor_tensor", "scalar_tensor_tensor")


@dataclass(frozen=True)
class Findings:
    """How often each form occurs."""

    gpsimd_products: int  # tensor_tensor and scalar_tensor_tensor on GpSimd
    sums_at_risk: int  # all but the last sum of several products in a PSUM tensor with several
    open_reads: int  # instructions that read a PSUM tensor between two products of one sum
    wide_accesses: int  # instructions with an operand of more than three free dimensions

    def __bool__(self) -> bool:
        return any(astuple(self))

    def __str__(self) -> str:
        return ", ".join(
            f"{f.name.replace('_', ' ')} {getattr(self, f.name)}" for f in fields(self)
        )


def scan(trace: Sequence[Record]) -> Findings:
    """Counts the forms in a trace, as `record(..., without=CHIP)` returns it.

    >>> str(scan([]))
    'gpsimd products 0, sums at risk 0, open reads 0, wide accesses 0'
    """
    products = wide = 0
    sums: dict[int, Sums] = defaultdict(Sums)
    reads: list[tuple[int, int]] = []  # of PSUM: the tensor, and the instruction
    for i, record in enumerate(trace):
        products += record.engine is Engine.gpsimd and record.op in PRODUCTS
        wide += record.flags.get("dimensions", 0) > 3
        reads += {(o.region.storage, i) for o in record.reads if o.buffer is PSUM}
        if record.engine is Engine.tensor:
            out = record.writes[0].region
            adds = bool(record.flags.get("accumulate"))
            sums[out.storage].add((out.partitions, out.span), i, adds)
        else:
            for o in record.writes:
                if o.buffer is PSUM:
                    sums[o.region.storage].begin_again((o.region.partitions, o.region.span))
    risk = sum(max(0, own.long - 1) for own in sums.values())
    opened = {
        i
        for storage, i in reads
        if any(first < i < last for _, first, last, _ in sums[storage].made)
    }
    return Findings(products, risk, len(opened), wide)
