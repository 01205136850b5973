"""The first hour on a Trn1, without one: every stage runs, and decides by what its figures say."""

import json
import math
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from delta_trn.backends.parity.tables import MEDIAN, MOST
from nki_simulator import Numerics, language, record
from nki_simulator.core.tables import LOAD_US
from tests.support import team_run
from tests.support.warm import run_python
from tools import first_hour_chain as chain
from tools import first_hour_trn1 as hour

STAGES = [
    *("chain", "calls", "functions", "precision", "rate", "tables", "kernel", "layer", "step"),
    *("cache", "zero1"),
]


def fork_ranks(words, **options):
    """Stands for subprocess.run of torchrun, which imports everything in six processes; CI's
    `DRY=1 make measure-trn1` starts it.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert words[1:] == [*launch, "-m", "tools.first_hour_ranks", "cpu"]
    with TemporaryDirectory() as folder:
        program = options["cwd"] / "tools" / "first_hour_ranks.py"
        ranks = team_run.start(2, [program, "cpu"], Path(folder), team_run.run_file)
        status = max(team_run.join(ranks, Path(folder)))
        return subprocess.CompletedProcess(words, status, team_run.read_logs(Path(folder)), "")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Returns the lines of a dry run by stage, and what it printed."""
    lines = tmp_path_factory.mktemp("hour") / "trn1.jsonl"
    words = [*(name for name in STAGES if name != "zero1"), "--dry", "--json", str(lines)]
    done = run_python(["-m", "tools.first_hour_trn1", *words], cwd=hour.ROOT, timeout=280)
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(StringIO()) as output:
        patched.setattr(hour.subprocess, "run", fork_ranks)
        assert hour.main(["zero1", "--dry", "--json", str(lines)]) == 0
    found = {row["stage"]: row for row in map(json.loads, lines.read_text().splitlines())}
    return found, done.stdout + output.getvalue()


def test_every_stage_runs_dry_and_writes_what_it_decides(rows):
    found, output = rows
    assert list(found) == STAGES == list(hour.STAGES)
    for row in found.values():
        assert row["dry"] and row["bound"] and row["decides"] and row["holds"] in (True, False)
        assert len(set(row["verdicts"])) == 2
    assert output.count("would say, beyond it") == len(STAGES)
    assert all(found["chain"][n] == "right" for n, form in chain.FORMS.items() if form.is_ours)
    assert found["precision"]["both"] == "float32" and found["precision"]["holds"]
    assert found["functions"]["exp"]["at_0"] == 0 and found["functions"]["holds"]
    assert LOAD_US / 2 < found["tables"]["load_us"] < LOAD_US
    assert found["kernel"]["us"] == pytest.approx(found["kernel"]["model"])
    assert found["step"]["seconds"] > 0
    assert found["cache"]["second"] == [3, 3]
    assert found["zero1"]["first"] == found["zero1"]["second"] == "right"


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_says_one_thing_within_its_bound_and_another_beyond_it(name):
    stage = hour.STAGES[name]
    within, beyond = (stage.judge(figures) for figures in stage.sides)
    assert within.holds and not beyond.holds and within.decides != beyond.decides
    assert len(stage.bound) > 20 and len(stage.fails) > 20


def doubled_figures(figures, times):
    """Returns figures with every number so many times as large."""
    if isinstance(figures, dict):
        return {name: doubled_figures(x, times) for name, x in figures.items()}
    return figures * times if isinstance(figures, float) else figures


@pytest.mark.parametrize("name", ["calls", "rate", "tables", "kernel", "layer", "step"])
@pytest.mark.parametrize("times", [-1.0, math.nan])
def test_the_noise_of_two_measurements_decides_nothing(name, times):
    """Stage `layer` once printed -0.0026 s and its usual conclusion."""
    stage = hour.STAGES[name]
    verdict = stage.judge(doubled_figures(stage.sides[0], times))
    assert not verdict.holds and verdict.decides.startswith("nothing: "), verdict
    assert "run this stage again" in verdict.decides


@pytest.mark.parametrize("name", ["calls", "functions", "kernel", "layer", "step"])
def test_a_verdict_depends_on_the_figure(name):
    stage = hour.STAGES[name]
    held = [
        stage.judge({**stage.sides[0], **{key: doubled_figures(stage.sides[0][key], times)}}).holds
        for key in list(stage.sides[0])[:1]
        for times in (0.99, 1.0, 10.0, 100.0)
    ]
    assert held[0] and held[1] and not held[3]
    assert all(earlier or not later for earlier, later in pairwise(held))


class TestChain:
    def found(self):
        return chain.try_forms(lambda name: chain.try_form(name, torch.device("cpu")))

    def test_what_decides_most_comes_first(self):
        names = list(chain.FORMS)
        assert names[0] == "one kernel"
        assert all("sum" in name or "PSUM" in name for name in names[1:7])
        assert [name for name in names[7:] if "GpSimd" in name] == names[7:9]
        five = [n for n in names if not chain.FORMS[n].is_ours and ("sum" in n or "PSUM" in n)]
        assert len(five) == 5

    def test_a_form_that_fails_names_what_follows_and_the_others_go_on(self, monkeypatch, capsys):
        def refuse(x):
            raise RuntimeError("[XTP003] too many\nand more")

        form = chain.Form(refuse, lambda x: x, "go on")
        kept = {"one kernel": chain.FORMS["one kernel"], "refused": form}
        kept["not ours"] = chain.Form(refuse, lambda x: x, "as others measured", "could be had")
        kept["wrong"] = chain.Form(lambda x: 3 * x, lambda x: 2 * x, "stop")
        monkeypatch.setattr(chain, "FORMS", kept)
        found = self.found()
        assert found["one kernel"] == "right"
        assert found["refused"].startswith("FAILED by the simulator's rules: go on (the compiler's")
        assert "XTP003 stands for more instructions than the compiler takes" in found["refused"]
        assert found["not ours"].startswith("not ours, FAILED by the simulator's rules: as others")
        assert found["wrong"] == "WRONG numbers: stop"
        assert "chain: refused ..." in capsys.readouterr().out
        verdict = hour.judge_chain(found)
        assert not verdict.holds and verdict.decides.startswith("look at refused first: FAILED")
        del found["refused"]
        assert hour.judge_chain(found).decides == "look at wrong first: WRONG numbers: stop"
        del found["wrong"]  # what is not ours may fail
        assert hour.judge_chain(found).holds

    def test_where_no_kernel_runs_nothing_else_is_said(self, monkeypatch):
        def refuse(x):
            raise RuntimeError("no")

        broken = chain.Form(refuse, lambda x: x, "see the versions")
        monkeypatch.setattr(chain, "FORMS", {"one kernel": broken, "other": broken})
        assert list(self.found()) == ["one kernel"]

    def test_a_form_that_ends_its_process_is_named(self, monkeypatch, tmp_path):
        monkeypatch.setattr(chain, "ROOT", tmp_path)
        package = tmp_path / "tools"
        package.mkdir()
        (package / "__init__.py").write_text("")
        program = package / "first_hour_chain.py"
        name = "elementwise work on GpSimd"
        program.write_text("import os\nos.kill(os.getpid(), 6)\n")
        said = chain.try_apart(name)
        assert said.startswith("not ours, FAILED: as others measured: the Vector engine")
        assert said.endswith("(SIGABRT ended its process)")
        program.write_text("print('other lines')\nprint('form: right')\n")
        assert chain.try_apart(name) == "right"
        program.write_text("raise SystemExit(3)\n")
        assert "its process ended with 3, and said nothing" in chain.try_apart(name)
        monkeypatch.setattr(chain, "FORM_SECONDS", 0.01)
        program.write_text("import time\ntime.sleep(60)\n")
        assert "it took more than 0.01 s" in chain.try_apart(name)

    @pytest.mark.parametrize(
        ("loses", "name"),
        [
            (0, "two sums in one PSUM tensor, one after the other"),
            (1, "two sums in one PSUM tensor, in turns"),
            (2, "a sum that is read before it is complete"),
        ],
    )
    def test_a_sum_that_loses_a_term_is_seen(self, loses, name, monkeypatch):
        """Every chain but the last loses its first term, as others measured on trn1."""
        count: list[int] = []

        def multiply(dst, powers_sb, i, adds):
            count.append(i)
            if len(count) != loses + 1:
                real(dst, powers_sb, i, adds)

        real = chain._multiply
        monkeypatch.setenv("DELTA_TRN_NKI_STRICT", "0")  # whose rules refuse these forms
        assert chain.try_form(name, torch.device("cpu")).startswith("not ours, right: ")
        monkeypatch.setattr(chain, "_multiply", multiply)
        said = chain.try_form(name, torch.device("cpu"))
        assert said == f"not ours, WRONG numbers: {chain.FORMS[name].fails}"

    @pytest.mark.parametrize("code", chain.CODES)
    def test_a_code_of_the_compiler_does_not_stand_alone(self, code):
        said = chain.explain(RuntimeError(f"ERROR [{code}] x\nmore"))
        assert said.startswith(f"the compiler's {code} stands for ")
        assert "nobody has explained" in chain.explain(RuntimeError("[NCC_XYZ123] x"))
        assert chain.explain(ValueError("plain words\nmore")) == "plain words"


@pytest.mark.parametrize("precision", ["float32", "tfloat32", "bfloat16"])
@pytest.mark.parametrize("side", ["both", "stationary", "moving"])
def test_the_precision_of_products_is_named_by_side(precision, side):
    given = hour.operands(side)
    results = record(hour.products, *given, numerics=Numerics(matmul=precision)).outputs
    assert hour.name_precision(results, side)[0] == precision


def test_a_side_that_loses_digits_is_named():
    found = {"both": "bfloat16", "stationary": "float32", "moving": "bfloat16"}
    verdict = hour.judge_precision(found)
    assert "products have bfloat16 where moving need more digits" in verdict.decides


@pytest.mark.parametrize(("times", "holds"), [(0.9, True), (3.0, False)])
def test_functions_that_are_off_by_more_than_parity_grants_are_named(times, holds, monkeypatch):
    exp = language.exp.activation

    def off(x):
        u = np.random.default_rng(0).random(np.shape(x))
        sign = np.where(u * 1000 % 1 < 0.5, -1, 1)
        return (exp(x) * (1 + times * MOST * sign * u ** np.log2(MOST / MEDIAN))).astype(np.float32)

    monkeypatch.setattr(language.exp, "activation", off)
    found = hour.measure_functions(hour.model_clock, True)
    verdict = hour.judge_functions(found)
    assert verdict.holds == holds
    assert ("exp (median" in verdict.decides) != holds
    assert "rsqrt" not in verdict.decides


def test_a_function_that_a_release_lacks_is_named_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(language.softplus, "activation", None)
    found = hour.measure_functions(hour.model_clock, True)
    assert list(found) == list(hour.FUNCTIONS) and "failed" in found["softplus"]
    assert "kernels that use softplus do not run" in hour.judge_functions(found).decides


def test_a_stage_that_fails_names_itself_and_lets_the_next_run(monkeypatch, tmp_path):
    monkeypatch.setattr(hour, "operands", lambda side: 1 / 0)
    lines = tmp_path / "trn1.jsonl"
    assert hour.main(["precision", "tables", "--dry", "--json", str(lines)]) == 1
    first, second = map(json.loads, lines.read_text().splitlines())
    assert first["decides"].startswith("FAILED: stage precision has no figure; float32 on the chip")
    assert "ZeroDivisionError" in first["decides"] and not first["holds"]
    assert "loads count" in second["decides"]


def test_a_stage_whose_process_ends_without_a_word_is_named(monkeypatch, tmp_path, capsys):
    """On a chip each stage runs in a process of its own."""
    lines = tmp_path / "trn1.jsonl"
    run = subprocess.run

    def end(words, **options):
        name = words[words.index("tools.first_hour_trn1") + 1]
        program = "import os; os.kill(os.getpid(), 9)" if name == "rate" else "pass"
        return run([sys.executable, "-c", program], **options)

    monkeypatch.setattr(hour.subprocess, "run", end)
    monkeypatch.setattr(hour.machine, "platforms", lambda: ("xla",))
    monkeypatch.setattr(hour, "RUNTIME", "neuron")
    assert hour.main(["rate", "tables", "--json", str(lines)]) == 1
    (row,) = map(json.loads, lines.read_text().splitlines())
    assert row["stage"] == "rate" and "SIGKILL ended its process" in row["decides"]
    assert "FAILED: stage rate" in capsys.readouterr().out


def test_beside_a_chip_the_model_is_asked_in_a_process_of_its_own(monkeypatch):
    """There the kernels of this process are AWS's, which leave no trace."""
    calls = [(f"{hour.RULE}fwd", {"T": 128, "H": 1, "K": 32, "V": 32})]
    here = hour.model_us(calls)

    def run(words, *, cwd, env, **options):
        assert words[0] == sys.executable and env["DELTA_TRN_NKI_RUNTIME"] == "simulator"
        return run_python(words[1:], cwd=cwd, env=env)

    monkeypatch.setattr(hour.subprocess, "run", run)
    monkeypatch.setattr(hour, "RUNTIME", "neuron")
    assert hour.model_us(calls) == here and here[0] > 1
    with pytest.raises(RuntimeError, match=r"the cost model failed: .*nothing_of_this_name"):
        hour.model_us([("delta_trn.nothing_of_this_name", {})])


def test_a_kernel_that_the_cache_does_not_tell_from_the_edited_one_is_stale():
    found = {"first": [2, 2], "second": [3, 2], "edited kernel": "right"}
    found["edited function that a kernel calls"] = "stale"
    verdict = hour.judge_cache(found)
    assert not verdict.holds
    assert verdict.decides.startswith("an edited function that a kernel calls still gives the old")


def test_a_wrong_sum_of_two_processes_is_seen(monkeypatch, tmp_path):
    """The ranks' program is copied with a mistake: stage zero1 must not call it right."""
    package = tmp_path / "tools"
    package.mkdir()
    (package / "__init__.py").write_text("")
    source = (hour.ROOT / "tools" / "first_hour_ranks.py").read_text()
    assert source.count("2 * total.chunk") == 1
    (package / "first_hour_ranks.py").write_text(source.replace("2 * total.chunk", "total.chunk"))
    monkeypatch.setattr(hour, "ROOT", tmp_path)
    monkeypatch.setattr(hour.subprocess, "run", fork_ranks)
    found = hour.measure_zero1(hour.model_clock, True)
    assert re.match(r"failed: rank [01]: WRONG", found["first"]) and "second" not in found
    assert "ZeRO-1 does not run" in hour.judge_zero1(found).decides


def test_without_a_chip_the_command_says_how_to_go_on():
    with pytest.raises(SystemExit, match="torch_xla is not installed"):
        hour.main([])
    with (
        pytest.MonkeyPatch.context() as patched,
        pytest.raises(SystemExit, match="nki is not installed"),
    ):
        patched.setattr(hour.machine, "platforms", lambda: ("xla",))
        hour.main([])
    with pytest.raises(SystemExit, match="'speed' is not one of chain, calls, functions"):
        hour.main(["speed", "--dry"])
