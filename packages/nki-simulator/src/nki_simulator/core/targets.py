"""The three NeuronCore generations: what differs between them, for the checks and for the cost
model.

Sizes are bytes per partition. Clocks are GHz, bandwidths GB/s per core. Of SBUF's 192, 224 and 256
KiB the compiler keeps 16 for itself (nki-library subtracts as much), so a kernel has 176, 208 and
240. Source: Neuron documentation, architecture guides of Trainium/Inferentia2, Trainium2 and
Trainium3.
"""

import os
from dataclasses import dataclass

PARTITIONS = 128
PSUM_BANK = 2048
PSUM_BANKS = 8


@dataclass(frozen=True)
class Target:
    """One generation of the NeuronCore."""

    name: str
    generation: int
    sbuf: int
    moving_fmax: int  # free elements of a float32 matmul's moving operand
    tensor_ghz: float
    vector_ghz: float
    scalar_ghz: float
    gpsimd_ghz: float
    dma_gb_s: float
    dma_latency_us: float = 2.0
    psum: int = PSUM_BANK * PSUM_BANKS
    refused: str = ""  # why no time is estimated


TARGETS = {
    "trn1": Target("trn1", 2, 176 * 1024, 512, 2.8, 1.12, 1.4, 1.4, 272.0),
    "trn2": Target(
        "trn2", 3, 208 * 1024, 512, 2.4, 0.96, 1.2, 1.2, 368.0,
        refused="a product of 2048 x 2048 x 2048 in bfloat16 takes 240 us there, and the model has more",
    ),
    "trn3": Target(
        "trn3", 4, 240 * 1024, 4096, 2.4, 1.2, 1.2, 1.2, 528.0,
        refused="nobody has published what an instruction takes there",
    ),
}  # fmt: skip
ALIASES = {"inf2": "trn1", "gen2": "trn1", "gen3": "trn2", "gen4": "trn3"}


def resolve(name: str | None = None) -> Target:
    """Return the named target, else that of NEURON_PLATFORM_TARGET_OVERRIDE (Neuron's variable),
    else trn1.

    Without a name AWS's simulator assumes trn3; this one assumes trn1, which has the strictest
    limits.
    """
    name = name or os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") or "trn1"
    key = ALIASES.get(name, name)
    if key not in TARGETS:
        raise ValueError(f"target {name!r} is not one of {', '.join((*TARGETS, *ALIASES))}")
    return TARGETS[key]
