"""What Neuron's compiler takes of small kernels in a graph, and what a Trn1 makes of them, form by
form.

A form that fails says alone what a graph of a whole layer could not: which one of its forms it was.
The forms that decide most come first. Where a form is not ours, others have measured on trn1 (SDK
2.32, nki 0.6.0) that it fails, or nobody has tried it: there the result says what could come back.
"""

import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from delta_trn.backends import machine
from delta_trn.backends.nki_runtime_adapter import run
from delta_trn.nki_kernels.language import RUNTIME, nisa, nki, nl
from delta_trn.nki_kernels.tiles import load, psum, sbuf

ROOT = Path(__file__).resolve().parent.parent
SAYS = "form: "  # begins the line with what a process has found
FORM_SECONDS = 900
SHAPE = (128, 3, 64)  # of the tile of three dimensions; the others have its first and last size
# of tiles x, 2 x, .. 32 x, whose products with x tell which terms a sum has
POWERS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
# nki 0.2.0 has no such argument: it decides by the tile whether a product overwrites or adds. The
# simulator holds kernels to all releases unless one is named.
SAYS_SUMS = "accumulate" in inspect.signature(nisa.nc_matmul).parameters and (
    RUNTIME == "neuron" or os.environ.get("DELTA_TRN_NKI", "") not in ("", "0.2.0")
)


def _double(x_sb):
    """Doubles a tile and returns it in HBM."""
    out = nl.ndarray(x_sb.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.tensor_scalar(dst=x_sb, data=x_sb, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=x_sb)
    return out


def _give(x_sb):
    """Copies a tile to HBM and returns it."""
    out = nl.ndarray(x_sb.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x_sb)
    return out


def _load_powers(x):
    """Loads x [128, N], and returns 2^i x, [128, 6, N] bfloat16."""
    x_sb = load(x, nl.float32)
    powers_sb = sbuf((x.shape[0], len(POWERS), x.shape[1]), nl.bfloat16)
    for i in range(len(POWERS)):
        nisa.tensor_scalar(dst=powers_sb[:, i, :], data=x_sb, op0=nl.multiply, operand0=POWERS[i])
    return powers_sb


def _multiply_silently(dst, powers_sb, i, adds):
    """Sets dst = x^T (2^i x), or adds that to it where a product was there before."""
    nisa.nc_matmul(dst=dst, stationary=powers_sb[:, 0, :], moving=powers_sb[:, i, :])


def _multiply_and_say(dst, powers_sb, i, adds):
    """Sets dst = x^T (2^i x), or adds that to it if `adds`."""
    nisa.nc_matmul(
        dst=dst, stationary=powers_sb[:, 0, :], moving=powers_sb[:, i, :], accumulate=adds
    )


_multiply = _multiply_and_say if SAYS_SUMS else _multiply_silently


@nki.jit
def doubled(x):
    """Returns 2 x for x [128, N] float32."""
    return _double(load(x, nl.float32))


@nki.jit
def sums_apart(x):
    """Returns 7 and 56 x^T x: two sums of three products, each in a PSUM tensor of its own."""
    powers_sb = _load_powers(x)
    N = x.shape[1]
    out_sb = sbuf((N, 2, N))
    for s in range(2):
        sum_ps = psum((N, N))
        for j in range(3):
            _multiply(sum_ps, powers_sb, 3 * s + j, j > 0)
        nisa.tensor_copy(dst=out_sb[:, s, :], src=sum_ps)
    return _give(out_sb)


@nki.jit
def sums_in_turn(x):
    """Returns the same by one PSUM tensor, one sum after the other."""
    powers_sb = _load_powers(x)
    N = x.shape[1]
    sums_ps, out_sb = psum((N, 2, N)), sbuf((N, 2, N))
    for s in range(2):
        for j in range(3):
            _multiply(sums_ps[:, s, :], powers_sb, 3 * s + j, j > 0)
    nisa.tensor_copy(dst=out_sb, src=sums_ps)
    return _give(out_sb)


@nki.jit
def sums_interleaved(x):
    """Returns the same by one PSUM tensor, a product of each sum in turns."""
    powers_sb = _load_powers(x)
    N = x.shape[1]
    sums_ps, out_sb = psum((N, 2, N)), sbuf((N, 2, N))
    for j in range(3):
        for s in range(2):
            _multiply(sums_ps[:, s, :], powers_sb, 3 * s + j, j > 0)
    nisa.tensor_copy(dst=out_sb, src=sums_ps)
    return _give(out_sb)


@nki.jit
def sum_read_open(x):
    """Returns 3 and 7 x^T x: a sum that is read before its last product is added."""
    powers_sb = _load_powers(x)
    N = x.shape[1]
    sum_ps, out_sb = psum((N, N)), sbuf((N, 2, N))
    _multiply(sum_ps, powers_sb, 0, False)
    _multiply(sum_ps, powers_sb, 1, True)
    nisa.tensor_copy(dst=out_sb[:, 0, :], src=sum_ps)
    _multiply(sum_ps, powers_sb, 2, True)
    nisa.tensor_copy(dst=out_sb[:, 1, :], src=sum_ps)
    return _give(out_sb)


@nki.jit
def tile_again(x):
    """Returns 1 and 9 x^T x: two products in one tile, neither of which says `accumulate`."""
    powers_sb = _load_powers(x)
    N = x.shape[1]
    tile_ps, out_sb = psum((N, N)), sbuf((N, 2, N))
    nisa.nc_matmul(dst=tile_ps, stationary=powers_sb[:, 0, :], moving=powers_sb[:, 0, :])
    nisa.tensor_copy(dst=out_sb[:, 0, :], src=tile_ps)
    nisa.nc_matmul(dst=tile_ps, stationary=powers_sb[:, 0, :], moving=powers_sb[:, 3, :])
    nisa.tensor_copy(dst=out_sb[:, 1, :], src=tile_ps)
    return _give(out_sb)


@nki.jit
def sum_between_products(x):
    """Returns 1, 6 and 8 x^T x by one PSUM tensor: a product, a sum of two, a product."""
    powers_sb = _load_powers(x)
    N = x.shape[1]
    sums_ps, out_sb = psum((N, 3, N)), sbuf((N, 3, N))
    _multiply(sums_ps[:, 0, :], powers_sb, 0, False)
    _multiply(sums_ps[:, 1, :], powers_sb, 1, False)
    _multiply(sums_ps[:, 1, :], powers_sb, 2, True)
    _multiply(sums_ps[:, 2, :], powers_sb, 3, False)
    nisa.tensor_copy(dst=out_sb, src=sums_ps)
    return _give(out_sb)


@nki.jit
def psum_operand(x):
    """Returns x^T x times x's first rows, a Vector product that reads the matmul's result."""
    powers_sb = _load_powers(x)
    N = x.shape[1]
    product_ps, out_sb = psum((N, N)), load(x[0:N, :], nl.float32)
    _multiply(product_ps, powers_sb, 0, False)
    nisa.tensor_tensor(dst=out_sb, data1=product_ps, data2=out_sb, op=nl.multiply)
    return _give(out_sb)


@nki.jit
def squared_on_gpsimd(x):
    """Returns x * x, multiplied on GpSimd."""
    x_sb = load(x, nl.float32)
    nisa.tensor_tensor(dst=x_sb, data1=x_sb, data2=x_sb, op=nl.multiply, engine=nisa.engine.gpsimd)
    return _give(x_sb)


@nki.jit
def root_on_gpsimd(x):
    """Returns (x * x + 1)^-1/2, whose root is GpSimd's."""
    x_sb = load(x, nl.float32)
    nisa.tensor_tensor(dst=x_sb, data1=x_sb, data2=x_sb, op=nl.multiply)
    nisa.tensor_scalar(dst=x_sb, data=x_sb, op0=nl.add, operand0=1.0)
    nisa.tensor_scalar(dst=x_sb, data=x_sb, op0=nl.rsqrt, operand0=0.0, engine=nisa.engine.gpsimd)
    return _give(x_sb)


@nki.jit
def root_on_scalar(x):
    """Returns (x * x + 1)^-1/2, whose root is the Scalar engine's."""
    x_sb = load(x, nl.float32)
    nisa.tensor_tensor(dst=x_sb, data1=x_sb, data2=x_sb, op=nl.multiply)
    nisa.tensor_scalar(dst=x_sb, data=x_sb, op0=nl.add, operand0=1.0)
    nisa.activation(dst=x_sb, op=nl.rsqrt, data=x_sb)
    return _give(x_sb)


@nki.jit
def four_dimensions(x):
    """Returns x plus x with axes exchanged, of columns [2, 2, 4, 4]: four free dimensions."""
    x_sb, out_sb = load(x, nl.float32), sbuf(x.shape)
    P, N = x.shape
    nisa.tensor_tensor(
        dst=out_sb.reshape((P, 2, 2, 4, 4)),
        data1=x_sb.reshape((P, 2, 2, 4, 4)),
        data2=x_sb.ap(pattern=[[N, P], [16, 2], [32, 2], [1, 4], [4, 4]], offset=0),
        op=nl.add,
    )
    return _give(out_sb)


@nki.jit
def three_dimensions(x):
    """Returns x plus x with axes exchanged, of columns [4, 4, 4]: three free dimensions."""
    x_sb, out_sb = load(x, nl.float32), sbuf(x.shape)
    P, N = x.shape
    nisa.tensor_tensor(
        dst=out_sb.reshape((P, 4, 4, 4)),
        data1=x_sb.reshape((P, 4, 4, 4)),
        data2=x_sb.ap(pattern=[[N, P], [4, 4], [16, 4], [1, 4]], offset=0),
        op=nl.add,
    )
    return _give(out_sb)


@nki.jit
def output_read_back(x):
    """Returns x and 2 x, [2, 128, N], of which the second is made of the first, read from HBM."""
    out = nl.ndarray((2, x.shape[0], x.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[0, :, :], src=load(x, nl.float32))
    again_sb = sbuf(x.shape)
    nisa.dma_copy(dst=again_sb, src=out[0, :, :])
    nisa.tensor_scalar(dst=again_sb, data=again_sb, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out[1, :, :], src=again_sb)
    return out


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


def _multiples(*factors: float) -> Callable[[np.ndarray], np.ndarray]:
    """Returns what gives these multiples of x^T x, [64, factors, 64]."""
    return lambda x: np.stack([factor * (x.T @ x) for factor in factors], 1)


def _exchanged(*sizes: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns what adds x to itself with neighboring axes of its columns exchanged in pairs."""

    def compute(x: np.ndarray) -> np.ndarray:
        axes = [i + 1 - 2 * (i % 2) for i in range(len(sizes) // 2 * 2)]
        axes += range(len(axes), len(sizes))
        other = x.reshape(-1, *sizes).transpose(0, *(axis + 1 for axis in axes))
        return x + other.reshape(x.shape)

    return compute


@dataclass(frozen=True)
class Form:
    """A form of kernels and graphs.

    compute     of x [128, 64] on a device
    expected    the same, in NumPy
    fails       what follows where it fails
    works       what follows where it works, of a form that is not ours; None: ours have it
    most        relative error
    """

    compute: Callable[[torch.Tensor], torch.Tensor]
    expected: Callable[[np.ndarray], np.ndarray]
    fails: str
    works: str | None = None
    most: float = 0.0

    @property
    def is_ours(self) -> bool:
        return self.works is None


def _alone(kernel: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: run(kernel, x)


_SEVERAL = "as others measured: keep one PSUM tensor for each sum of two or more products"
_ONE = (
    "sums may share a PSUM tensor in this release; keep them apart until parity has shown it in a "
    "whole kernel"
)
FORMS: dict[str, Form] = {
    "one kernel": Form(
        _alone(doubled),
        lambda x: 2 * x,
        "no kernel runs: compare the versions that `make neuron` printed with docs/trainium.md",
    ),
    "two sums, a PSUM tensor each": Form(
        _alone(sums_apart),
        _multiples(7, 56),
        "all kernels sum so, and none is right: take another SDK of docs/trainium.md's table",
    ),
    "two sums in one PSUM tensor, one after the other": Form(
        _alone(sums_in_turn), _multiples(7, 56), _SEVERAL, _ONE
    ),
    "two sums in one PSUM tensor, in turns": Form(
        _alone(sums_interleaved), _multiples(7, 56), _SEVERAL, _ONE
    ),
    "a sum that is read before it is complete": Form(
        _alone(sum_read_open),
        _multiples(3, 7),
        "read a sum when it is complete, as our kernels do",
        "a sum may be read while it is open; ours are not",
    ),
    "a PSUM tile used twice, `accumulate` not said": Form(
        _alone(tile_again),
        _multiples(1, 9),
        "what is not said is not added, or not to what was there: our kernels say it where the "
        "release has the argument, and have a tile for each sum where it has not",
        "a product adds to what a product has left, as the simulator has it",
    ),
    "a product, a sum of two and a product in one PSUM tensor": Form(
        _alone(sum_between_products),
        _multiples(1, 6, 8),
        _SEVERAL,
        "right, as one public kernel has it; a sum between single products keeps its terms",
    ),
    "elementwise work on GpSimd": Form(
        _alone(squared_on_gpsimd),
        lambda x: x * x,
        "as others measured: the Vector engine multiplies, as in our kernels",
        "GpSimd can take elementwise work from the Vector engine again: see the cost model",
    ),
    "roots on GpSimd": Form(
        _alone(root_on_gpsimd),
        lambda x: 1 / np.sqrt(x * x + 1),
        "the Scalar engine takes roots, as in our kernels",
        "GpSimd can take roots, which spares the Scalar engine's loads of tables",
        most=1e-4,
    ),
    "roots on the Scalar engine": Form(
        _alone(root_on_scalar),
        lambda x: 1 / np.sqrt(x * x + 1),
        "norms need them: see whether GpSimd's work, and take those in nki_kernels/tiles.py",
        most=1e-4,
    ),
    "a product of Vector with an operand in PSUM": Form(
        _alone(psum_operand),
        lambda x: (x.T @ x) * x[: x.shape[1]],
        "all kernels read products so: copy them to SBUF first, in nki_kernels/tiles.py",
    ),
    "three free dimensions": Form(
        _alone(three_dimensions),
        _exchanged(4, 4, 4),
        "Kimi Delta Attention needs them: an instruction for each of the first dimension",
    ),
    "four free dimensions": Form(
        _alone(four_dimensions),
        _exchanged(2, 2, 4, 4),
        "at most three, as in our kernels",
        "an instruction can have four; ours need three",
    ),
    "an output that is read back": Form(
        _alone(output_read_back),
        lambda x: np.stack([x, 2 * x]),
        "a kernel must not read what it has stored: ours do not",
        "a kernel can read what it has stored",
    ),
    "two kernels in one graph": Form(
        lambda x: run(doubled, run(doubled, x)),
        lambda x: 4 * x,
        "aws-neuron-sdk 1311 is in this release, and a layer has 4 kernels: take SDK 2.31 (nki "
        "0.5.0)",
    ),
    "32 kernels in one graph": Form(
        lambda x: _repeat(doubled, x, 32),
        lambda x: 2.0**32 * x,
        "fewer kernels fit in one graph than training needs: lower model.layers until stage "
        "`layer` runs",
    ),
    "two kernels with HBM of their own": Form(
        lambda x: run(doubled_through_scratch, run(doubled_through_scratch, x)),
        lambda x: 4 * x,
        "kernels must keep no HBM of their own: ours do not",
        "kernels can keep HBM of their own",
    ),
    "an integer index into a tile of three dimensions": Form(
        lambda x: run(gathered, x, x + 1),
        lambda x: np.stack([x, x + 1, 2 * x + 1]),
        "aws-neuron-sdk 1281 is in this release: our copies use slices",
        "integers can index a tile",
    ),
    "a dict that is filled, and an assert": Form(
        lambda x: run(named, x),
        lambda x: 2 * x,
        "this parser does not take our kernels: take SDK 2.28.1 (nki 0.2.0)",
    ),
    "one tensor passed twice": Form(
        lambda x: run(summed, x, x),
        lambda x: 4 * x,
        "a kernel needs two tensors: where ours take a dummy, give it a copy",
    ),
}

# what others have found a code of Neuron's compiler to stand for
CODES = {
    "NCC_IXCG965": "elementwise work on GpSimd",
    "NCC_IBVF027": "two operands in PSUM on one Vector instruction",
    "NCC_IBVF043": "a copy on the Scalar engine with a tensor as bias",
    "NCC_IBIR058": "a tile of the Tensor engine's array with 32 columns",
    "NCC_ISCH714": "several sums in one PSUM tensor, or one that is read while open",
    "NCC_INLA001": "an access that the hardware lacks, such as four dimensions",
    "NCC_IBIR829": "an address of SBUF or PSUM in a register",
    "NCC_IBIR040": "an address of SBUF or PSUM in a register",
    "NCC_IXCG967": "too much unrolled code: one copy waits for more than 65,535 others",
    "NCC_EBVF030": "more instructions than the compiler takes: fewer sequences in a graph",
    "NCC_EVRF059": "a kernel that was compiled on another host: clear the cache of compilations",
    "TEN404": "four free dimensions or more",
    "XTP003": "more instructions than the compiler takes: fewer sequences in a graph",
}


def explain(error: BaseException) -> str:
    """Returns an error's first line, behind what its code stands for, where it has one."""
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0][:200]
    for code, meaning in CODES.items():
        if code in text:
            return f"the compiler's {code} stands for {meaning}: {first}"
    if "NCC_" in text:
        return f"nobody has explained this code; log-neuron-cc.txt has more: {first}"
    return first


def _repeat(kernel: Any, x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = run(kernel, x)
    return x


def try_form(name: str, device: torch.device) -> str:
    """Computes a form on a device and returns what it decides: "right", or what went wrong, and
    what follows.
    """
    x = np.random.default_rng(0).integers(-8, 8, (SHAPE[0], SHAPE[2])).astype(np.float32)
    form = FORMS[name]
    try:
        result = form.compute(torch.from_numpy(x).to(device)).cpu().numpy()
    except Exception as error:  # what a compiler raises is of no one type
        return failed(name, explain(error), by=" by the simulator's rules" * (device.type == "cpu"))
    expected = form.expected(x.astype(np.float64))
    if result.shape != expected.shape or not np.allclose(result, expected, rtol=form.most, atol=0):
        return f"{'' if form.is_ours else 'not ours, '}WRONG numbers: {form.fails}"
    return f"not ours, right: {form.works}" if form.works else "right"


def failed(name: str, why: str, by: str = "") -> str:
    """Returns what the failure of a form decides."""
    form = FORMS[name]
    return f"{'' if form.is_ours else 'not ours, '}FAILED{by}: {form.fails} ({why})"


def try_apart(name: str) -> str:
    """Computes a form on the chip in a process of its own: what a form breaks, no other has."""
    words = [sys.executable, "-m", "tools.first_hour_chain", name]
    try:
        done = subprocess.run(
            words, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=FORM_SECONDS
        )
    except subprocess.TimeoutExpired:
        return failed(name, f"it took more than {FORM_SECONDS} s")
    if done.returncode < 0:
        return failed(name, f"{signal.Signals(-done.returncode).name} ended its process")
    lines = [line for line in done.stdout.splitlines() if line.startswith(SAYS)]
    if not lines:
        return failed(name, f"its process ended with {done.returncode}, and said nothing")
    return lines[-1].removeprefix(SAYS)


def try_forms(try_one: Callable[[str], str]) -> dict[str, str]:
    """Computes every form by `try_one`, and returns what each decides.

    The name of a form is printed before it runs. Where not even one kernel runs, the others would
    say nothing, and are left out.
    """
    found: dict[str, str] = {}
    for name in FORMS:
        print(f"chain: {name} ...", flush=True)
        found[name] = try_one(name)
        if len(found) == 1 and "FAILED" in found[name]:
            break
    return found


if __name__ == "__main__":
    print(f"{SAYS}{try_form(sys.argv[1], machine.pick(*sys.argv[2:] or ['xla']))}")
