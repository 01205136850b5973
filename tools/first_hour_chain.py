"""What Neuron's compiler takes of several small kernels in one graph, form by form.

A form that fails says alone what a graph of a whole layer could not: which one of its forms it was.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from delta_trn.backends.nki_runtime_adapter import run
from delta_trn.nki_kernels.language import nisa, nki, nl
from delta_trn.nki_kernels.tiles import load, sbuf

SHAPE = (128, 3, 64)  # of the tile of three dimensions; the others have its first and last size


def _double(x_sb):
    """Doubles a tile and returns it in HBM."""
    out = nl.ndarray(x_sb.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.tensor_scalar(dst=x_sb, data=x_sb, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=x_sb)
    return out


@nki.jit
def doubled(x):
    """Returns 2 x for x [128, N] float32."""
    return _double(load(x, nl.float32))


@nki.jit
def doubled_through_scratch(x):
    """Returns 2 x as `doubled` does, and keeps x in HBM of its own between two copies."""
    scratch = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=scratch, src=load(x, nl.float32))
    return _double(load(scratch, nl.float32))


@nki.jit
def gathered(x, y):
    """Returns both inputs [128, 64] float32 and their sum, [3, 128, 64],
    by a tile that integers index.
    """
    P, n, F = SHAPE
    out = nl.ndarray((n, P, F), dtype=nl.float32, buffer=nl.shared_hbm)
    all_sb = sbuf((P, n, F))
    nisa.dma_copy(dst=all_sb[:, 0, :], src=x)
    nisa.dma_copy(dst=all_sb[:, 1, :], src=y)
    nisa.tensor_tensor(dst=all_sb[:, 2, :], data1=all_sb[:, 0, :], data2=all_sb[:, 1, :], op=nl.add)
    for i in range(n):
        nisa.dma_copy(dst=out[i, :, :], src=all_sb[:, i, :])
    return out


@nki.jit
def named(x):
    """Returns 2 x as `doubled` does, by a dict that is filled step by step, with an assert."""
    assert x.shape[0] <= 128, "rows are partitions"
    tiles = {}
    tiles["x"] = load(x, nl.float32)
    return _double(tiles["x"])


@nki.jit
def summed(x, y):
    """Returns 2 (x + y) for x, y [128, N] float32."""
    x_sb = load(x, nl.float32)
    nisa.tensor_tensor(dst=x_sb, data1=x_sb, data2=load(y, nl.float32), op=nl.add)
    return _double(x_sb)


def _gather(x: torch.Tensor) -> torch.Tensor:
    out = run(gathered, x, x + 1)
    return torch.cat([out[0], out[1] - 1, (out[2] - 1) / 2])


# each form: what computes it, by what its result is a multiple of x, and what follows where it
# fails
FORMS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int, str]] = {
    "one kernel": (
        lambda x: run(doubled, x),
        2,
        "no kernel runs: compare the versions that `make neuron` printed with docs/trainium.md",
    ),
    "two kernels in one graph": (
        lambda x: run(doubled, run(doubled, x)),
        4,
        "aws-neuron-sdk 1311 is in this release, and a layer has 4 kernels: take SDK 2.31 (nki "
        "0.5.0)",
    ),
    "32 kernels in one graph": (
        lambda x: _repeat(doubled, x, 32),
        2**32,
        "fewer kernels fit in one graph than training needs: lower model.layers until stage "
        "`layer` runs",
    ),
    "two kernels with HBM of their own": (
        lambda x: run(doubled_through_scratch, run(doubled_through_scratch, x)),
        4,
        "kernels must keep no HBM of their own: ours do not, so go on",
    ),
    "an integer index into a tile of three dimensions": (
        _gather,
        1,
        "aws-neuron-sdk 1281 is in this release: our copies use slices, so go on",
    ),
    "a dict that is filled, and an assert": (
        lambda x: run(named, x),
        2,
        "this parser does not take our kernels: take SDK 2.28.1 (nki 0.2.0)",
    ),
    "one tensor passed twice": (
        lambda x: run(summed, x, x),
        4,
        "a kernel needs two tensors: where ours take a dummy, give it a copy",
    ),
}


def _repeat(kernel: Any, x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = run(kernel, x)
    return x


def try_forms(device: torch.device) -> dict[str, str]:
    """Computes every form on a device and returns what each decides: "right", or what went wrong
    and follows.

    The name of a form is printed before it runs, so that one which ends the process is known. Where
    not even one kernel runs, the others would say nothing, and are left out.
    """
    x = np.random.default_rng(0).integers(-8, 8, (SHAPE[0], SHAPE[2])).astype(np.float32)
    found = {}
    for name, (compute, factor, follows) in FORMS.items():
        print(f"chain: {name} ...", flush=True)
        try:
            result = compute(torch.from_numpy(x).to(device)).cpu().numpy()
            found[name] = "right"
            if not (result == factor * np.tile(x, (len(result) // len(x), 1))).all():
                found[name] = f"WRONG numbers: {follows}"
        except Exception as error:  # what a compiler raises is of no one type
            first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            found[name] = f"FAILED: {follows} ({first})"
            if len(found) == 1:
                break
    return found
