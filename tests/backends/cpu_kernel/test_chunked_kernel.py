"""The C++ kernel of the chunked backend: built once or not at all, and its bits."""

import os
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from delta_trn.backends import compiler, describe
from delta_trn.backends.dispatch import describe_choice
from delta_trn.backends.gated_delta_rule import chunked, chunked_kernel
from delta_trn.backends.parity import rule
from delta_trn.backends.parity.judge import error
from delta_trn.backends.parity.rule_cases import BOTH, BY_NAME, Case, inputs
from tests.support.forked import call_apart
from tests.support.fuzz import checks
from tests.support.fuzz.cases import random_cases
from tests.support.fuzz.run import fuzz

SOURCE = Path(chunked_kernel.__file__).with_suffix(".cpp")
WHOLE = Case(
    "kernel",
    1,
    151,
    2,
    24,
    40,
    "groups, tails, a state, one token",
    HV=4,
    decay="mixed",
    reflect=True,
    norm="random",
    state=True,
    loss=BOTH,
    lengths=(80, 1, 0, 70),
)
needs_kernel = pytest.mark.skipif(
    chunked_kernel.library(False).functions is None, reason=chunked_kernel.library(False).note
)


# last chunks that end in each of the four blocks of 16 tokens, whole blocks and whole chunks
ENDS = (5, 16, 17, 32, 33, 45, 48, 49, 64, 109)


@needs_kernel
@pytest.mark.parametrize("K", [24, 72])
def test_a_last_chunk_of_any_length_passes_parity(K):
    case = replace(WHOLE, name=f"ends of {K}", T=sum(ENDS), K=K, V=24, H=1, HV=1, lengths=ENDS)
    verdicts = list(rule.verdicts(case, torch.float32, "chunked"))
    assert verdicts and all(verdict.passed for verdict in verdicts), verdicts


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Gives compiled files an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiler.SWITCH, raising=False)
    return tmp_path / "delta-trn"


def script(folder, line):
    """Returns a compiler's command: it answers --version, and does `line` otherwise."""
    path = folder / "compiler"
    path.write_text(
        f"#!/bin/sh\n[ $# = 1 ] && echo version 1 && exit 0\necho . >> {folder}/calls\n{line}\n"
    )
    path.chmod(0o755)
    return shlex.quote(str(path))


def test_fuzzed_cases_pass_in_pytorch_where_there_is_no_kernel(without_cpu_kernel):
    """Twenty cases, the same every time."""
    fuzz(
        random_cases("chunked", "gated_delta_rule"), lambda case: checks.check(case, "chunked"), 20
    )


def check_bits_of_threads(case, dtype):
    """Asserts that any number of threads computes the same bits of a case."""
    x, before = inputs(case, dtype), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(rule.outcome(x, "chunked"))
    finally:
        torch.set_num_threads(before)
    for one, other in pairwise(results):
        assert all(torch.equal(one[name], other[name]) for name in one)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_have_the_same_bits_with_any_number_of_threads(dtype):
    check_bits_of_threads(WHOLE, dtype)


@needs_kernel
@pytest.mark.parametrize("name", ["packed_many", "packed_wide"])
def test_steps_with_more_rows_than_a_block_of_the_cache_agree_with_pytorch(name, request):
    """Parity judges these cases in `make test-slow`: the judge takes 10 s for each."""
    x = inputs(BY_NAME[name], torch.float32)
    kernel = rule.outcome(x, "chunked")
    request.getfixturevalue("without_cpu_kernel")
    plain = rule.outcome(x, "chunked")
    errors = {tensor: error(y, plain[tensor]) for tensor, y in kernel.items()}
    assert max(errors.values()) < 1e-5, errors


@needs_kernel
def test_long_sums_err_at_most_half_as_much_as_one_term_after_the_other():
    """In dq = dO S^T of one token. Where keys are equal, such sums cancel in dg (31:5574)."""
    case = Case(
        "sums", 1, 1, 1, 64, 1024, "sums over V", decay="none", beta=0.0, scale=1.0, state=True
    )
    x = inputs(case, torch.float32)
    assert x.do is not None and x.initial_state is not None
    dO, S = x.do.flatten(), x.initial_state[0, 0]
    one_by_one = torch.zeros(64)
    for term in (S * dO).T:
        one_by_one += term
    exact = S.double() @ dO.double()
    result = rule.outcome(x, "chunked")["dq"].flatten()
    assert (result - exact).norm() <= 0.5 * (one_by_one - exact).norm()


@needs_kernel
def test_float64_is_computed_in_pytorch_and_the_rest_by_the_kernel(monkeypatch):
    ran = []
    original = chunked_kernel._function
    monkeypatch.setattr(
        chunked_kernel, "_function", lambda name, call: ran.append(name) or original(name, call)
    )
    rule.outcome(inputs(WHOLE, torch.float64), "chunked")
    assert not ran
    rule.outcome(inputs(WHOLE, torch.bfloat16), "chunked")
    assert ran == ["forward", "backward"]


def test_what_computes_a_call_is_said_where_it_may_be_slower():
    assert "float64" in describe_choice("chunked", torch.float64, "cpu")
    assert "tensors are on xla" in describe_choice("chunked", torch.float32, "xla")
    assert describe_choice("recurrent", torch.float32, "cpu") == "recurrent"


def test_each_rule_names_its_own_kernel(monkeypatch):
    """One may be there and the other not."""
    names = {True: "a kernel of channels", False: "a kernel of heads"}
    made = {
        channels: compiler.Library(cast(Any, object()), name) for channels, name in names.items()
    }
    monkeypatch.setattr(chunked_kernel, "library", made.__getitem__)
    for op in ("gated_delta_rule", "kimi_delta_attention"):
        own = names[op == "kimi_delta_attention"]
        assert describe_choice("chunked", torch.float32, "cpu", op) == f"chunked ({own})"
        rows = [row for row in describe() if (row.op, row.backend) == (op, "chunked")]
        assert f"here: {own}" in rows[0].reasons


@needs_kernel
@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("scale_state(f.S, h.K, h.V, x.gam[m - 1])", "scale_state(f.S, h.K, h.V, 1.0f)"),
        ("log_decay_gradient(f, m, x.gam[m - 1] * carried)", "log_decay_gradient(f, m, 0.0f)"),
        ("product<TRANSPOSED, UPPER>(m, h.K, m, dkk, k, f.dK);", ""),
        ("normalize_back(f.dK, k, x.rk, m, h.K);", ""),
        ("add_row(E[0], -t.gam, read, h.V);", "add_row(E[0], -1.0f, read, h.V);"),
        ("reads + t.gam * carried", "reads + carried"),
        ("f.reads_dS = c.dfinal_state || ", "f.reads_dS = "),
    ],
)
def test_a_mistake_in_the_kernel_turns_parity_red(line, mistake, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "FLAGS", compiler.FLAGS.replace("-O3", "-O1"))
    text = SOURCE.read_text()
    assert text.count(line) == 1
    folder = tmp_path / "rule"
    folder.mkdir()
    (folder / "kernel.cpp").write_text(text.replace(line, mistake))
    for header in chunked_kernel.HEADERS:
        # where it lies beside the kernel
        (folder / os.path.relpath(header, SOURCE.parent)).write_text(header.read_text())
    assert all(verdict.passed for verdict in rule.verdicts(WHOLE, torch.float32, "chunked"))
    library = compiler.load(folder / "kernel.cpp")
    assert library.functions is not None, library.note
    monkeypatch.setattr(chunked_kernel, "library", lambda channels: library)
    assert not all(verdict.passed for verdict in rule.verdicts(WHOLE, torch.float32, "chunked"))


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        (compiler.SWITCH, "0", "PyTorch, since DELTA_TRN_CPU_KERNEL=0"),
        ("CXX", "no-such-compiler", "there is no no-such-compiler; install a C++ compiler"),
        ("CXX", "false", "'false', '--version'"),
    ],
)
def test_without_a_kernel_pytorch_computes_and_describe_says_why(
    variable, value, reason, cache, monkeypatch
):
    monkeypatch.setenv(variable, value)
    library = compiler.load(SOURCE)
    assert library.functions is None and reason in library.note
    monkeypatch.setattr(chunked_kernel, "library", lambda channels: library)
    (row,) = (row for row in describe() if (row.op, row.backend) == ("gated_delta_rule", "chunked"))
    assert row.reasons[-1] == f"here: {library.note}" and row.automatic == ("cpu",)
    assert describe_choice("chunked", torch.bfloat16, "cpu") == f"chunked ({library.note})"
    x = inputs(WHOLE, torch.float32)
    assert rule.outcome(x, "chunked")["o"].isfinite().all()
    *_, saved = chunked.forward(chunked.Rule(x.q, x.k, x.v, x.g, x.beta), save=True)
    assert saved == chunked.saved_shapes(chunked.Rule(x.q, x.k, x.v, x.g, x.beta)) == []


@needs_kernel
def test_processes_that_need_a_kernel_at_once_compile_it_once(cache, tmp_path, monkeypatch):
    """And one whose cache cannot be written compiles for itself."""
    (tmp_path / "one.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setenv("CXX", script(tmp_path, 'sleep 0.5; exec g++ "$@"'))

    def answer():
        library = compiler.load(tmp_path / "one.cpp")
        return library.functions.answer() if library.functions else library.note

    assert call_apart(answer, answer) == ["42", "42"]
    assert (tmp_path / "calls").read_text().count(".") == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert answer() == 42
    assert (tmp_path / "calls").read_text().count(".") == 2
