"""Every Triton kernel compiles for Hopper within its bounds. No GPU is needed: the compiler runs
here.

The compilations run in a process of their own: under TRITON_INTERPRET=1 a kernel is a Python
function.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.triton_kernels import compile_only, delta_residual
from delta_trn.triton_kernels.compile_only import SIZES
from delta_trn.triton_kernels.variants import GATE_ARGUMENTS, PACKED_ARGUMENTS, ROW_ARGUMENTS
from tests.support.warm import run_python

ROOT = Path(__file__).parents[2]


def compiler(*arguments, cache):
    """Runs a process in which Triton compiles, with a compilation cache of its own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    result = run_python(arguments, env=environment, cwd=ROOT, timeout=280)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Returns a folder of compiled kernels: what one test has compiled, the next one reads."""
    return tmp_path_factory.mktemp("cache")


def report(tmp_path, cache, *arguments):
    path = tmp_path / "rows.json"
    command = ["-m", "delta_trn.triton_kernels.compile_only", "--json", str(path), *arguments]
    result = compiler(*command, cache=cache)
    rows = json.loads(path.read_text())
    assert len(result.stdout.splitlines()) == len(rows) + 2
    return rows


def test_quick_configurations_compile_within_their_bounds(tmp_path, cache):
    rows = report(tmp_path, cache, "--quick", "--dtype", "bf16")
    kernels = {row["kernel"] for row in rows}
    scans = {"prepare", "scan", "reverse_scan", "gradients", "hopper_gradients"}
    scans |= {
        f"kimi_{name}"
        for name in ("prepare", "scan", "reverse", "products", "gradients", "prepare_hopper")
    }
    scans |= {"kimi_gradients_hopper"}
    layers = {"short_convolution", "rms_norm", "cross_entropy", "sum_heads", "kimi_copies"}
    assert kernels == scans | layers | {"step", "delta_residual", "chain", "refine", "gates"}
    assert any(row["kernel"] == "step" and row["options"].endswith("channels") for row in rows)
    for row in rows:
        # four warps issue one of them; `prepare` has two up to K = 128
        if row["kernel"] in scans and row["warps"] >= 4:
            assert row["hgmma"] > 0, f"{row} does not use Hopper's matrix instructions"


@pytest.mark.slow
def test_all_configurations_compile_within_their_bounds(tmp_path, cache):
    rows = report(tmp_path, cache)
    assert {(row["K"], row["V"]) for row in rows} >= {(32, 64), (96, 192), (192, 384), (256, 512)}
    assert {row["dtype"] for row in rows} == {"bf16", "fp16", "fp32"}


OTHERS = """
from delta_trn.triton_kernels.compile_only import compile_variant, variants
for architecture in (80, 120, 942):
    some = variants(quick=True, architecture=architecture)
    scan = next(x for x in some if x[:2] == (128, 128) and x[3].kernel == "scan")
    row = compile_variant(*scan, architecture)
    print(architecture, row.broken(), row.shared < 99 * 1024, row.hgmma)
"""


def test_a_scan_compiles_for_other_gpus_within_their_bounds(cache):
    """`make compile` compiles the other kernels, too."""
    result = compiler("-c", OTHERS, cache=cache)
    assert result.stdout.splitlines() == [
        f"{architecture} [] True 0" for architecture in (80, 120, 942)
    ]


UNFENCED = """
from dataclasses import replace
import triton
from delta_trn.triton_kernels import compile_only, gated_delta_rule_fwd, gated_delta_rule_reverse
from delta_trn.triton_kernels.sass import disassemble, parse, count_unfenced

modules = gated_delta_rule_fwd, gated_delta_rule_reverse
first = {f"{v.kernel} {K}": v for K in (64, 256) for m in modules for v in m.variants(K, 128, 2, True)}
for name, variant in first.items():
    stores = variant.values.get("UPRIGHT", False)
    source = compile_only.source("bf16", variant)
    compiled = triton.compile(source, compile_only.HOPPER, variant.tile.options())
    code = parse(disassemble(compiled.asm["cubin"]))
    bare = [replace(x, opcode="NOP") if x.name == "FENCE" else x for x in code]
    copies = any(x.name == "LDGSTS" for x in code)
    print(name, copies, sum(x.name == "HGMMA" for x in code) > 0, count_unfenced(code, stores=stores),
        count_unfenced(tuple(bare), stores=stores) > 0)
"""


def test_products_that_read_before_a_fence_are_found_where_fences_are_taken_out(cache):
    result = compiler("-c", UNFENCED, cache=cache)
    assert result.stdout.splitlines() == [
        f"{kernel} {K} True True 0 True"
        for K in (64, 256)
        for kernel in ("prepare", "scan", "reverse_scan")
    ], result.stderr


UNORDERED = """
import re, triton
from delta_trn.triton_kernels import compile_only, cross_entropy

variant = next(cross_entropy.variants(0, 300, 2, True))
source = compile_only.source("bf16", variant)
ptx = triton.compile(source, compile_only.HOPPER, variant.tile.options()).asm["ptx"]
barriers = [match.span() for match in re.finditer(r"bar\\.sync", ptx)]
count = compile_only.count_unordered
print(count(ptx), [count(ptx[:a] + ptx[b:]) for a, b in barriers][-1])
"""


def test_the_goals_logit_is_read_before_any_warp_writes_its_gradient(cache):
    """Without the barrier between them another warp could write dz over z[goal]:
    a wrong loss, silently.
    """
    result = compiler("-c", UNORDERED, cache=cache)
    assert result.stdout == "0 1\n"


BROKEN = """
from dataclasses import replace
import triton
from delta_trn.triton_kernels import compile_only
from delta_trn.triton_kernels.compile_only import Row, SHARED_BYTES
good = Row("scan", 64, 128, "bf16", "dense", 4, 2, 200, 0, 70000, 8, 0, 0)
print(good.broken())
bad = Row("scan", 64, 128, "bf16", "dense", 4, 2, 255, 5000, SHARED_BYTES + 1, 8, 3, 2)
print(bad.broken())
for architecture in (80, 89):
    print([text for text, _ in replace(good, shared=110000, stack=900, architecture=architecture).broken()])
print([text for text, _ in replace(good, architecture=100, tensor=576).broken()])
for triton.__version__ in ("3.7.1", "3.9.0"):
    print([error for _, error in bad.broken()])
"""


def test_a_row_beyond_its_bounds_names_each_bound(cache):
    result = compiler("-c", BROKEN, cache=cache)
    good, bad, a100, l40s, b200, *errors = result.stdout.splitlines()
    assert good == "[]"
    assert all(
        word in bad for word in ("shared memory 232449", "stack 5000", "3 matrix", "2 reads")
    )
    assert (a100, l40s) == ("[]", "['shared memory 110000 exceeds 101376']")
    assert b200 == "['tensor memory 576 exceeds 512']"
    # of shared memory, stack, fences and barriers, with Triton 3.7.1 and 3.9.0
    assert errors == ["[True, True, True, True]", "[True, False, True, True]"]


def test_an_argument_without_a_declared_type_is_an_error():
    variant = next(delta_residual.variants(64, 4, 2, quick=False))
    assert (
        variant.signature("bf16")["x"] == "*bf16" and variant.signature("bf16")["D"] == "constexpr"
    )
    with pytest.raises(KeyError, match="delta_residual: argument 'k' has no type; add it to TYPES"):
        replace(variant, types={"*x": "x", "fp32": "eps2"}).signature("bf16")


def test_every_declared_value_and_type_belongs_to_an_argument():
    for modules, sizes, _ in SIZES:
        for module in modules:
            variants = list(module.variants(*sizes[0], 2, quick=False))
            arguments = {name for variant in variants for name in variant.function.arg_names}
            declared = {name for names in module.TYPES.values() for name in names.split()}
            declared |= {name for variant in variants for name in variant.values}
            assert declared - arguments <= set(GATE_ARGUMENTS + PACKED_ARGUMENTS + ROW_ARGUMENTS), (
                module.__name__
            )


def test_compile_report_refuses_to_run_under_the_interpreter(tmp_path):
    command = [sys.executable, "-m", "delta_trn.triton_kernels.compile_only", "--quick"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0 and "TRITON_INTERPRET is set" in result.stderr


def test_parts_are_all_configurations_each_once(monkeypatch, capsys):
    class Pool(nullcontext):
        def map(self, function, places):
            seen.append(places)
            return []

    seen = []
    monkeypatch.setattr(compile_only, "ProcessPoolExecutor", lambda jobs: Pool(Pool()))
    for words in ("", "--part 1/3", "--part 2/3", "--part 3/3"):
        assert compile_only.main(["--quick", *words.split()]) == 0
    whole, *parts = seen
    assert sorted(chain(*parts)) == sorted(whole) and len(whole) > 50
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(SystemExit):
        compile_only.main(["--part", "4/3"])
    assert "'4/3' is no part; expected I/N with I from 1 to N" in capsys.readouterr().err
