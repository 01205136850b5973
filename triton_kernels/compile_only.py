"""Compiles every kernel in every configuration without a GPU and reports what the chip would need.

    python -m triton_kernels.compile_only [--quick] [--kernel NAME] [--dtype NAME] [--jobs N]
    [--json FILE]
        [--architecture N ...]     90 unless it says others; 100 needs Triton 3.9; 942 is AMD's gfx942
        [--part I/N]               the configurations I, I + N, I + 2N, ... of all that are selected

A row of the report: kernel, its two sizes, element type, options; registers and stack bytes per
thread (a stack is spilled registers), shared memory per program, matrix instructions (HGMMA), those
that may read shared memory without a fence, reads that no barrier orders, the architecture (90 is
sm_90) and its columns of tensor memory. The exit status is 1 if a row exceeds a bound.

The bounds: SHARED is what an architecture gives one program. STACK_BYTES is what a thread may park
in L1 between uses: little up to K = 128; up to 480 in the scans at K = 192 and 256, whose state
alone fills the registers; and more in float32, whose products run on the ordinary cores, and on
other GPUs than Hopper, where those of 16 bits have their operands in registers, too. Triton 3.4 to
3.7.0
leaves out fences between copies and products: it is refused on Hopper, and its rows are errors
here.

What is compiled stands beside each kernel: `variants` says how.
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
from itertools import islice, product
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from delta_trn.triton_kernels import (
    cross_entropy,
    delta_residual,
    gated_delta_rule_bwd,
    gated_delta_rule_fwd,
    gated_delta_rule_refine,
    gated_delta_rule_reverse,
    gated_delta_rule_step,
    kimi_delta_attention,
    rms_norm,
    segments,
    short_convolution,
)
from delta_trn.triton_kernels.compiling.driver import AMD
from delta_trn.triton_kernels.compiling.driver import SHARED as SHARED
from delta_trn.triton_kernels.hopper import gradients as hopper_gradients
from delta_trn.triton_kernels.launch import Card, assume
from delta_trn.triton_kernels.sass import count_unfenced, disassemble, parse
from delta_trn.triton_kernels.variants import Variant

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = SHARED[90]
TENSOR_COLUMNS = 512
# the bounds on stack are those of this Triton; others compile to other code
BOUNDED = "3.7.1"
STACK_BYTES = {"bf16": 512, "fp16": 512, "fp32": 768}
OTHERS_STACK_BYTES = {"bf16": 1024, "fp16": 1024, "fp32": 1024}
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}

RULE = (
    gated_delta_rule_fwd, gated_delta_rule_reverse, gated_delta_rule_bwd,
    gated_delta_rule_refine, segments, gated_delta_rule_step,
)  # fmt: skip
CHANNELS = kimi_delta_attention.fwd, kimi_delta_attention.bwd
# modules; the two sizes of their variants; those that --quick compiles
# fmt: off
SIZES = (
    # K and V
    (RULE, [(32, 64), (64, 64), (64, 128), (96, 192), (128, 128), (128, 256), (192, 384), (256, 256),
            (256, 512)], [(64, 128)]),
    ((hopper_gradients,), [(128, 128)], [(128, 128)]),
    (CHANNELS, [(32, 64), (64, 128), (96, 192), (128, 128), (192, 384), (256, 256)], [(128, 128)]),
    # width and value columns of Deep Delta Learning's stream
    ((delta_residual,), [(768, 1), (768, 4), (2048, 1), (2048, 4), (1600, 8)], [(768, 1)]),
    # channels and taps
    ((short_convolution,), [(24, 4), (768, 2), (3072, 4), (3072, 8)], [(3072, 4)]),
    # sizes of heads and widths of models
    ((rms_norm,), [(N, 0) for N in (32, 96, 128, 512, 768, 1600, 2048, 4096, 8192)], [(2048, 0)]),
    # vocabularies
    ((cross_entropy,), [(0, 50), (0, 50257), (0, 151936)], [(0, 50257)]),
)
# fmt: on
# of K and V, those that --quick compiles as well for other GPUs than Hopper, which `make compile` does alone
OTHERS_SIZES = [(128, 128), (256, 256)]


@dataclass(frozen=True)
class Row:
    """What the compiler allotted to a variant.

    stack is in bytes per thread; unfenced and unordered must be 0; tensor is columns of tensor
    memory.
    """

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
    unfenced: int
    unordered: int
    architecture: int = 90
    tensor: int = 0

    def broken(self) -> list[tuple[str, bool]]:
        """Returns the bounds that this row exceeds, in words,
        and whether that is an error of ours.
        """
        most, hopper = SHARED[self.architecture], self.architecture == 90
        stack = (STACK_BYTES if hopper else OTHERS_STACK_BYTES)[self.dtype]
        bounded = triton.__version__.startswith(BOUNDED)
        unfenced = f"{self.unfenced} matrix instructions may read shared memory too early"
        bounds = (
            (self.shared, most, f"shared memory {self.shared} exceeds {most}", True),
            (
                self.tensor,
                TENSOR_COLUMNS,
                f"tensor memory {self.tensor} exceeds {TENSOR_COLUMNS}",
                True,
            ),
            (self.stack, stack, f"stack {self.stack} exceeds {stack}", bounded),
            (self.unfenced, 0, unfenced, True),
            (
                self.unordered,
                0,
                f"{self.unordered} reads of memory that another warp may have written",
                True,
            ),
        )
        return [(words, ours) for found, bound, words, ours in bounds if found > bound]


def variants(
    *, quick: bool = False, architecture: int = 90
) -> Iterator[tuple[int, int, str, Variant]]:
    """Yields K, V, dtype and variant; quick: few sizes, and the options that training uses."""
    with assume(Card(8 if architecture == AMD else architecture // 10)):
        for dtype, (modules, everything, few) in product(
            ("bf16", "fp32") if quick else ITEMSIZE, SIZES
        ):
            if modules is RULE and architecture != 90:
                few = [*few, *OTHERS_SIZES]
            if modules is CHANNELS and dtype == "fp16":
                continue  # which these do not take
            sizes = few if quick else everything
            if quick and dtype == "fp32":
                sizes = few if modules is RULE else []
            for (K, V), module in product(sizes, modules):
                for variant in module.variants(K, V, ITEMSIZE[dtype], quick):
                    yield K, V, dtype, variant


def source(dtype: str, variant: Variant) -> ASTSource:
    """Returns the specialization that a launch would compile: pointers are multiples of 16, too."""
    signature = variant.signature(dtype)
    places = {name: (i,) for i, name in enumerate(signature)}
    constants = {
        places[name]: variant.values[name] for name, t in signature.items() if t == "constexpr"
    }
    whole = {name for name, t in signature.items() if t == "i32"} & set(variant.multiples)
    multiples = [name for name, t in signature.items() if t[0] == "*" or name in whole]
    aligned = {places[name]: [["tt.divisibility", 16]] for name in multiples}
    form = GluonASTSource if variant.function.is_gluon() else ASTSource
    return form(variant.function, signature, constants, aligned)


def compile_variant(K: int, V: int, dtype: str, variant: Variant, architecture: int = 90) -> Row:
    """Compiles and reads what ptxas allotted. Raises RuntimeError under TRITON_INTERPRET=1."""
    if knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set, so the kernels are Python functions; unset it to compile them"
        )
    tile = variant.tile
    of_amd = architecture == AMD
    target = GPUTarget("hip", "gfx942", 64) if of_amd else GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source(dtype, variant), target, tile.options())
    if of_amd:
        found = re.findall(
            r"\.(?:private_segment_fixed_size|vgpr_count): +(\d+)", compiled.asm["amdgcn"]
        )
        stack, registers = map(int, found)
        return Row(
            variant.kernel, K, V, dtype, variant.options, tile.warps, tile.stages, registers, stack,
            compiled.metadata.shared, 0, 0, 0, AMD,
        )  # fmt: skip
    cubin = compiled.asm["cubin"]
    registers, stack = resources(cubin)
    return Row(
        variant.kernel,
        K,
        V,
        dtype,
        variant.options,
        tile.warps,
        tile.stages,
        registers,
        stack,
        compiled.metadata.shared,
        len(re.findall(r"wgmma\.mma_async", compiled.asm["ptx"])),
        # only Hopper's products need fences; upright tiles are operands that the kernel itself
        # stored
        count_unfenced(parse(disassemble(cubin)), stores=variant.values.get("UPRIGHT", False))
        if architecture == 90
        else 0,
        count_unordered(compiled.asm["ptx"]),
        architecture,
        getattr(compiled.metadata, "tmem_size", 0),
    )


def count_unordered(ptx: str) -> int:
    """Counts the reads of an argument's memory that no barrier separates from writes to it
    elsewhere.

    A thread may write over what it has read itself, at the same address. A read at another address
    may be of what a second warp writes: between the two stands a barrier, or the read's value
    depends on which warp is first. The order of instructions in the text stands for the order in
    time, so a loop's second turn is not looked at.
    """
    arguments: dict[str, set[str]] = {}  # by the register that holds an address
    for line in ptx.splitlines() * 2:  # twice, for registers of a loop
        if loaded := re.match(r"\s*ld\.param\.b64\s+(%rd\d+), \[(\w+)\]", line):
            arguments.setdefault(loaded[1], set()).add(loaded[2])
        elif computed := re.match(
            r"\s*(?:@!?%p\d+\s+)?(?:add|sub|mad|mov|cvta|selp)\.[\w.]+\s+(%rd\d+), (.*);", line
        ):
            for register in re.findall(r"%rd\d+", computed[2]):
                arguments.setdefault(computed[1], set()).update(arguments.get(register, ()))
    count = 0
    for part in re.split(r"\bbar\.sync\b", ptx):
        reads: set[tuple[str, str]] = set()
        writes: set[tuple[str, str]] = set()
        for access, address in re.findall(
            r"\b(ld|st|red|atom|cp\.async)\.\S*global\S*\s[^\[]*\[\s*(%rd\d+)", part
        ):
            places = {(argument, address) for argument in arguments.get(address, ())}
            (reads if access in ("ld", "cp.async") else writes).update(places)
        written = {argument for argument, _ in writes}
        count += sum(argument in written for argument, _ in reads - writes)
    return count


def table(rows: list[Row]) -> str:
    """Formats the rows as a Markdown table."""
    fields = list(Row.__dataclass_fields__)
    lines = ["| " + " | ".join(fields) + " |", "|" + " --- |" * len(fields)]
    return "\n".join(
        lines + ["| " + " | ".join(str(v) for v in asdict(row).values()) + " |" for row in rows]
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Returns registers and stack bytes per thread,
    as cuobjdump reads them from the machine code.
    """
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


def _compile_at(place: tuple[int, bool, int]) -> Row:
    """Compiles the variant at a position of `variants`,
    since a kernel cannot travel between processes.
    """
    architecture, quick, i = place
    return compile_variant(
        *next(islice(variants(quick=quick, architecture=architecture), i, None)), architecture
    )


def _part(text: str) -> tuple[int, int]:
    """Returns I and N of "I/N", with I from 1 to N."""
    first, _, parts = text.partition("/")
    if not (first.isdigit() and parts.isdigit() and 1 <= int(first) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; expected I/N with I from 1 to N")
    return int(first), int(parts)


def main(arguments: list[str] | None = None) -> int:
    """Compiles what the command line selects; returns 1 if a row exceeds a bound."""
    parser = argparse.ArgumentParser(
        prog="python -m triton_kernels.compile_only", description="compile every kernel, for sm_90"
    )
    parser.add_argument("--quick", action="store_true", help="compile a part, which takes seconds")
    parser.add_argument("--kernel", action="append", help="only this kernel; may be repeated")
    parser.add_argument(
        "--dtype", action="append", choices=list(ITEMSIZE), help="only this type; may be repeated"
    )
    parser.add_argument(
        "--architecture",
        type=int,
        nargs="+",
        choices=list(SHARED),
        default=[90],
        help="such as 90 for sm_90",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes (default: one per core)"
    )
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="I/N", help="every Nth, from the Ith on"
    )
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args(arguments)
    kernels = dict.fromkeys(variant.kernel for *_, variant in variants(quick=options.quick))
    if unknown := [name for name in options.kernel or () if name not in kernels]:
        parser.error(f"no kernel is named {unknown[0]!r}; choose from: {', '.join(kernels)}")
    selected = [
        (architecture, options.quick, i)
        for architecture in options.architecture
        for i, (_, _, dtype, x) in enumerate(
            variants(quick=options.quick, architecture=architecture)
        )
        if x.kernel in (options.kernel or kernels) and dtype in (options.dtype or ITEMSIZE)
    ]
    first, parts = options.part
    selected = selected[first - 1 :: parts]
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in pool.map(_compile_at, selected):
            rows.append(row)
            print(table(rows).splitlines()[-1] if len(rows) > 1 else table(rows), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    broken = [(row, *excess) for row in rows for excess in row.broken()]
    for row, reason, error in broken:
        place = f"sm_{row.architecture} {row.kernel} K={row.K} V={row.V} {row.dtype} {row.options}"
        told = "" if error else f" (no error with Triton {triton.__version__})"
        print(f"{place}: {reason}{told}", file=sys.stderr)
    return 1 if any(error for *_, error in broken) else 0


if __name__ == "__main__":
    sys.exit(main())
