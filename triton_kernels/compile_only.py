"""Compiles every kernel in every configuration for sm_90, without a GPU; reports what the chip would need.

    python -m triton_kernels.compile_only [--quick] [--kernel NAME] [--dtype NAME] [--jobs N] [--json FILE]

A row: kernel, head sizes, element type, options; registers and stack bytes a thread (a stack is spilled
registers), shared memory a program, matrix instructions (HGMMA), and transposes of products. Exit 1 if a row
breaks a bound.

The bounds: SHARED_BYTES is what Hopper gives one program. STACK_BYTES is what a thread may park in L1 between
uses: little up to K = 128, up to 480 in the scans at K = 192 and 256, whose state alone fills the registers,
and more in float32, whose products run on the ordinary cores. Transposes must depend on loads alone: Triton
3.4 to 3.7.0 miscompiles tl.dot(tl.trans(result of tl.dot), ...) on Hopper.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from delta_trn.triton_kernels import (
    cross_entropy,
    delta_residual,
    gated_delta_rule_bwd,
    gated_delta_rule_fwd,
    gated_delta_rule_step,
    rms_norm,
    segments,
    short_convolution,
)
from delta_trn.triton_kernels.launch import Config, Tile, config, power_of_two, tile

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
STACK_BYTES = {"bf16": 512, "fp16": 512, "fp32": 768}

HEAD_SIZES = [
    (32, 64),
    (64, 64),
    (64, 128),
    (96, 192),
    (128, 128),
    (128, 256),
    (192, 384),
    (256, 256),
    (256, 512),
]
# Widths and value columns of Deep Delta Learning's stream.
STREAMS = [(768, 1), (768, 4), (2048, 1), (2048, 4), (1600, 8)]
# Channels and taps of the short convolution; sizes of heads and widths of norms; vocabularies.
CONVOLUTIONS = [(24, 4), (768, 2), (3072, 4), (3072, 8)]
ROWS = [32, 96, 128, 512, 768, 1600, 2048, 4096, 8192]
VOCABULARIES = [50, 50257, 151936]
# What compiles away where gates are given, and where they are made in the kernels.
GIVEN = {"GATE": False, "BIAS": False, "SIGMOID": False, "A_log": None, "dt_bias": None}
MADE = {"GATE": True, "BIAS": True, "SIGMOID": True}
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}

# Argument types by name; a kernel takes the ones it names.
MODEL_DTYPE = {
    "q",
    "k",
    "v",
    "o",
    "do",
    "dq",
    "dk",
    "dv",
    "N",
    "P",
    "N_out",
    "P_out",
    "h",
    "U",
    "dY",
    "dh",
    "x",
    "dx",
    "out",
    "dout",
    "y",
    "dy",
    "z",
    "gate",
    "dgate",
    "residual",
    "total",
    "dtotal",
    "prefix",
    "dprefix",
}
INTEGERS = {"cu_seqlens", "chunk_start", "chunk_length", "chunk_offsets", "offsets", "position", "goal"}
SCALARS = dict.fromkeys(("scale", "beta_max", "eps2", "eps"), "fp32") | dict.fromkeys(
    ("T", "NT", "NS", "L", "C", "M", "V", "tiles"), "i32"
)


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time arguments: what one launch would compile.

    K, V    also a stream's D and DV, a convolution's C and W, a norm's N, a vocabulary
    """

    kernel: str
    K: int
    V: int
    dtype: str
    options: str
    function: Any
    constants: dict[str, Any]
    tile: Tile


@dataclass(frozen=True)
class Row:
    """What the compiler made of a Variant. stack: bytes a thread; transposed: products transposed (must be
    0)."""

    kernel: str
    K: int
    V: int
    dtype: str
    options: str
    warps: int
    stages: int
    registers: int
    stack: int
    shared: int
    hgmma: int
    transposed: int

    def broken(self) -> list[str]:
        """The bounds this row exceeds, in words."""
        found = []
        if self.shared > SHARED_BYTES:
            found.append(f"shared memory {self.shared} exceeds {SHARED_BYTES}")
        if self.stack > STACK_BYTES[self.dtype]:
            found.append(f"stack {self.stack} exceeds {STACK_BYTES[self.dtype]}")
        if self.transposed:
            found.append(f"{self.transposed} transposes of a product's result")
        return found


def variants(*, quick: bool = False) -> Iterator[Variant]:
    """Every configuration of every kernel; quick: one head size per tile shape and the options that train."""
    for dtype in ["bf16"] if quick else ["bf16", "fp16", "fp32"]:
        for K, V in [(64, 128), (256, 512)] if quick else HEAD_SIZES:
            yield from _head_size(K, V, dtype, config(K, V, itemsize=ITEMSIZE[dtype]), quick)
        for D, DV in STREAMS[:1] if quick else STREAMS:
            yield from _stream(D, DV, dtype)
        for C, W in CONVOLUTIONS[2:3] if quick else CONVOLUTIONS:
            yield from _convolution(C, W, dtype, quick)
        for N in [2048] if quick else ROWS:
            yield from _norm(N, dtype, quick)
        for V in VOCABULARIES[1:2] if quick else VOCABULARIES:
            row = tile("cross_entropy", V)
            constants = {"BV": row.columns, "GRADIENT": True, "DOT": "ieee"}
            yield Variant("cross_entropy", 0, V, dtype, "", cross_entropy.softmax_kernel, constants, row)
    if quick:
        yield from _head_size(64, 128, "fp32", config(64, 128, itemsize=4), quick)


def _head_size(K: int, V: int, dtype: str, row: Config, quick: bool) -> Iterator[Variant]:
    sizes = {"H": 2, "HV": 4, "K": K, "KP": power_of_two(K)}
    loops = {**sizes, "V": V, "C": row.C, "DOT": row.dot}
    words = 1 if dtype == "fp32" else 2

    def variant(name: str, options: str, function: Any, tile: Tile, constants: dict[str, Any]) -> Variant:
        return Variant(name, K, V, dtype, options, function, constants, tile)

    fwd, bwd = gated_delta_rule_fwd, gated_delta_rule_bwd
    forms = {"made": MADE} if quick else {"given": GIVEN, "made": MADE}
    for packed in [False] if quick else [False, True]:
        word = "packed" if packed else "dense"
        prepare = {**sizes, "C": row.C, "WORDS": words, "DOT": row.dot, "PACKED": packed, "L2NORM": True}
        for form, gates in forms.items():
            yield variant(
                "prepare", f"{word}, gates {form}", fwd.prepare_kernel, row.prepare, prepare | gates
            )
        scan = {**loops, "BV": row.scan.columns, "WORDS": words, "PACKED": packed, "HAS_INITIAL": packed}
        for kind, out, keep in [("train", True, True), ("infer", True, False), ("recompute", False, True)]:
            if quick and kind != "train":
                continue
            constants = {**scan, "WRITE_O": out, "WRITE_H": keep, "WRITE_FINAL": packed, "TRANSITION": False}
            yield variant("scan", f"{word} {kind}", fwd.scan_kernel, row.scan, constants)
        reverse = {**loops, "BV": row.reverse.columns, "WORDS": words, "PACKED": packed}
        reverse |= {"HAS_DSTATE": packed, "HAS_INITIAL": packed, "WRITE": True, "WRITE_INITIAL": packed}
        yield variant("reverse_scan", word, bwd.reverse_scan_kernel, row.reverse, reverse)
        scan |= {"HAS_INITIAL": False, "WRITE_O": False, "WRITE_H": False, "WRITE_FINAL": True}
        scan |= {"TRANSITION": True}
        yield variant("scan", f"{word} segments", fwd.scan_kernel, row.scan, scan)
        reverse |= {"HAS_DSTATE": False, "HAS_INITIAL": False, "WRITE": False, "WRITE_INITIAL": True}
        yield variant("reverse_scan", f"{word} segments", bwd.reverse_scan_kernel, row.reverse, reverse)
        gradients = {**loops, "BV": row.gradients.columns, "TILES": 2, "PACKED": packed, "L2NORM": True}
        for form, gates in forms.items():
            absent = {} if form == "made" else {"dgates": None}
            yield variant(
                "gradients",
                f"{word}, gates {form}",
                bwd.gradients_kernel,
                row.gradients,
                gradients | gates | absent,
            )
    link = tile("chain", V, K)
    chain = {
        **loops,
        "BK": link.rows,
        "BV": link.columns,
        "PACKED": True,
        "HAS_INITIAL": True,
        "WRITE_FINAL": True,
        "DOT": "ieee",
    }
    chain = {name: value for name, value in chain.items() if name not in ("H", "C")}
    for word, back in {"forward": False, "backward": True}.items():
        yield variant("chain", word, segments.chain_kernel, link, chain | {"REVERSE": back})
    token = tile("step", V)
    step = {**sizes, "V": V, "BV": token.columns, "L2NORM": True, "DOT": "ieee"}
    for form, gates in forms.items():
        yield variant("step", f"gates {form}", gated_delta_rule_step.step_kernel, token, step | gates)


def _stream(D: int, DV: int, dtype: str) -> Iterator[Variant]:
    row = tile("delta_residual", DV, D)
    constants = {"D": D, "DV": DV, "BD": row.rows, "DVP": row.columns, "NORMALIZE": True, "DOT": "ieee"}
    for kind in ("forward", "backward"):
        function = getattr(delta_residual, f"{kind}_kernel")
        yield Variant("delta_residual", D, DV, dtype, kind, function, constants, row)


def _convolution(C: int, W: int, dtype: str, quick: bool) -> Iterator[Variant]:
    row = tile("short_convolution", C)
    sizes = {"W": W, "BT": row.rows, "BC": row.columns, "DOT": "ieee"}
    forms = {"dense": (False, False), "packed": (False, True), "prefix": (True, False)}
    for form, (prefix, packed) in forms.items():
        if quick and form != "packed":
            continue
        for kind in ("forward", "backward"):
            constants = {**sizes, "SILU": True, "PREFIX": prefix, "PACKED": packed}
            constants |= (
                {} if prefix else {"prefix": None} | ({"dprefix": None} if kind == "backward" else {})
            )
            constants |= {} if packed else {"position": None}
            constants |= {"P": 21} if kind == "backward" else {}
            function = getattr(short_convolution, f"{kind}_kernel")
            yield Variant("short_convolution", C, W, dtype, f"{kind} {form}", function, constants, row)


def _norm(N: int, dtype: str, quick: bool) -> Iterator[Variant]:
    row = tile("rms_norm", N)
    sizes = {"N": N, "NP": row.columns, "R": row.rows, "DOT": "ieee"}
    for form in ("gated", "sum") if quick else ("plain", "gated", "sum"):
        flags = {"GATED": form == "gated", "SUM": form == "sum"}
        gate = {} if form == "gated" else {"gate": None}
        total = {} if form == "sum" else {"residual": None, "total": None}
        constants = {**sizes, **flags, **gate, **total}
        yield Variant("rms_norm", N, 0, dtype, f"forward {form}", rms_norm.forward_kernel, constants, row)
        gate |= {} if form == "gated" else {"dgate": None}
        total = {} if form == "sum" else {"dtotal": None}
        constants = {**sizes, **flags, **gate, **total, "P": 1024}
        yield Variant("rms_norm", N, 0, dtype, f"backward {form}", rms_norm.backward_kernel, constants, row)


def compile_variant(variant: Variant) -> Row:
    """Compile for sm_90 and read what ptxas allotted. Raises RuntimeError under TRITON_INTERPRET=1."""
    if knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set, so the kernels are Python functions; unset it to compile them"
        )
    names = variant.function.arg_names
    constants = dict(variant.constants)
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        signature[name] = "constexpr" if name in constants else _type(name, variant.dtype)
        if signature[name].startswith("*"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(variant.function, signature, constexprs, attributes)
    tile = variant.tile
    compiled = triton.compile(source, HOPPER, {"num_warps": tile.warps, "num_stages": tile.stages})
    registers, stack = _usage(compiled.asm["cubin"])
    return Row(
        variant.kernel, variant.K, variant.V, variant.dtype, variant.options, tile.warps, tile.stages,
        registers, stack, compiled.metadata.shared,
        len(re.findall(r"wgmma\.mma_async", compiled.asm["ptx"])), transposed_products(compiled.asm["ttir"]),
    )  # fmt: skip


def transposed_products(ttir: str) -> int:
    """Transposes in Triton's IR whose operand depends on a product, or on a loop's results, which may."""
    made_by: dict[str, tuple[str, list[str]]] = {}
    for line in ttir.splitlines():
        match = re.match(r"\s*(%[\w#:]+(?:, %[\w#:]+)*) = \"?([\w.]+)\"?(.*)", line)
        if match:
            operands = re.findall(r"%\w+", match[3])
            for name in re.findall(r"%\w+", match[1]):
                made_by[name] = (match[2], operands)

    def from_product(name: str, seen: frozenset[str] = frozenset()) -> bool:
        operation, operands = made_by.get(name, ("argument", []))
        if operation == "tt.dot" or operation.startswith("scf."):
            return True
        if operation in ("tt.load", "argument") or name in seen:
            return False
        return any(from_product(operand, seen | {name}) for operand in operands)

    transposes = [operands for operation, operands in made_by.values() if operation == "tt.trans"]
    return sum(from_product(operands[0]) for operands in transposes)


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    fields = list(Row.__dataclass_fields__)
    lines = ["| " + " | ".join(fields) + " |", "|" + " --- |" * len(fields)]
    return "\n".join(lines + ["| " + " | ".join(str(v) for v in asdict(row).values()) + " |" for row in rows])


def _type(name: str, dtype: str) -> str:
    if name in SCALARS:
        return SCALARS[name]
    return "*" + (dtype if name in MODEL_DTYPE else "i64" if name in INTEGERS else "fp32")


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, as cuobjdump reads them from the machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if match is None:
        raise RuntimeError(f"{tool} -res-usage printed no REG and STACK: {report!r}")
    return int(match[1]), int(match[2])


def _compiled(place: tuple[bool, int]) -> Row:
    """Of a position in `variants`, since a Variant cannot travel between processes."""
    quick, i = place
    return compile_variant(next(islice(variants(quick=quick), i, None)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m triton_kernels.compile_only", description="compile every kernel for sm_90"
    )
    parser.add_argument("--quick", action="store_true", help="a part that takes seconds")
    parser.add_argument("--kernel", action="append", help="only this one; may be repeated")
    parser.add_argument("--dtype", action="append", choices=list(ITEMSIZE), help="only this one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time (default: a core each)")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args(arguments)
    everything = list(variants(quick=options.quick))
    kernels = dict.fromkeys(variant.kernel for variant in everything)
    if unknown := [name for name in options.kernel or () if name not in kernels]:
        parser.error(f"no kernel is named {unknown[0]!r}; there are: {', '.join(kernels)}")
    wanted = [
        (options.quick, i)
        for i, variant in enumerate(everything)
        if variant.kernel in (options.kernel or kernels) and variant.dtype in (options.dtype or ITEMSIZE)
    ]
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in pool.map(_compiled, wanted):
            rows.append(row)
            print(table(rows).splitlines()[-1] if len(rows) > 1 else table(rows), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    broken = [(row, reason) for row in rows for reason in row.broken()]
    for row, reason in broken:
        print(f"{row.kernel} K={row.K} V={row.V} {row.dtype} {row.options}: {reason}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
