"""Warmup lists and compiles a run's graphs, and records them beside the cache for later runs to look up."""

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import torch

from delta_trn.backends import machine
from delta_trn.train.commands import warmup
from delta_trn.train.neuron import record
from delta_trn.train.neuron.graphs import Sizes, graphs
from delta_trn.train.neuron.instructions import MOST, per_sequence
from delta_trn.train.neuron.record import fingerprint, notice, record_path, write_record
from delta_trn.train.recipes import recipe
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig
from tests.support import tiny_run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(**changes: str) -> RunConfig:
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return apply(recipe("tiny"), {"device": "cpu", "backend": "chunked", "precision": "float32", **dotted})


def list_shapes(changes: dict[str, str], *, world: int = 1, xla: bool = False, sizes: Sizes | None = None):
    listed = graphs(config(**changes), world=world, xla=xla, sizes=sizes or Sizes())
    return {graph.name: graph.inputs[0] for graph in listed}


class TestGraphs:
    def test_a_graph_of_a_step_has_one_micro_batch(self):
        changes = {"batch__sequences": "8", "batch__length": "32", "batch__micro": "2"}
        assert list_shapes(changes)["step"] == (2, 32)
        assert list_shapes(changes, world=2, xla=True)["step"] == (2, 32)
        assert list_shapes(changes, world=2, xla=True)["first step"] == (2, 32)
        context = {**changes, "distribution__context": "2"}
        assert list_shapes(context, world=2)["step"] == (2, 16)

    def test_the_last_batch_of_held_out_text_has_a_graph_of_its_own(self):
        changes = {"evaluation__final_tokens": "1000", "evaluation__batch": "4", "evaluation__sequences": "8"}
        changes |= {"batch__length": "32"}
        shapes = list_shapes(changes, sizes=Sizes(held_out=10_000))
        assert shapes["held-out"] == (4, 32) and shapes["held-out, last"] == (1000 // 32 % 4, 32)
        shapes = list_shapes(changes, sizes=Sizes(held_out=70))
        assert "held-out" not in shapes and shapes["held-out, last"] == (2, 32)
        assert list_shapes(changes)["held-out, last"] == (None, 32)

    def test_a_run_without_samples_lists_no_generation_graphs(self):
        assert list_shapes({}, sizes=Sizes(prompt=3))["prefill"] == (1, 3)
        assert not {"prefill", "decode"} & list_shapes({"sample__tokens": "0"}).keys()

    def test_a_run_without_probes_lists_no_probe_graph(self):
        assert list_shapes({"log__probes": "true"})["probes"] == list_shapes({})["evaluate"]
        assert "probes" not in list_shapes({})

    def test_graphs_of_a_cluster_are_listed_on_any_machine(self):
        status, out, _ = tiny_run.run_command("warmup", "tiny", "--list", "--processes=2", "device=xla")
        assert status == 0 and "first step" in out and "[2, 32]" in out and "[1, ?]" in out
        assert "instructions of the NKI kernels" in out and "neuronx-cc may refuse" not in out

    def test_instructions_are_those_of_a_layer_times_layers_and_of_the_readout(self, monkeypatch):
        counted = per_sequence(config(model__layers="3"))
        assert counted.training > 2 * counted.forward > 0
        one, two = (per_sequence(config(model__layers=str(n))) for n in (1, 2))
        assert counted.forward - two.forward == two.forward - one.forward > 0
        assert counted.training - two.training == two.training - one.training > 0
        assert 2 * one.training > two.training, "the readout counts once"
        hybrid = per_sequence(config(model__layers="3", model__attention_layers="1"))
        assert hybrid.training == two.training, "attention has no kernel of ours"
        monkeypatch.setattr("delta_trn.train.neuron.instructions.MOST", 4 * one.training - 1)
        _, out, _ = tiny_run.run_command(
            *(
                "warmup",
                "tiny",
                "--list",
                "device=xla",
                "precision=float32",
                "model.layers=1",
                "batch.micro=4",
            )
        )
        assert f"{4 * one.training:,}  above {4 * one.training - 1:,}: neuronx-cc may refuse it, lower" in out

    @pytest.mark.parametrize(("script", "processes"), [("trn1.2xlarge", 2), ("trn1.32xlarge", 32)])
    def test_a_launch_script_keeps_graphs_within_the_bound(self, script, processes):
        text = (Path(warmup.__file__).parents[1] / "launch" / f"{script}.sh").read_text()
        keys = dict(word.split("=") for word in re.findall(r"(?:batch|evaluation)\.\w+=\d+", text))
        run = apply(recipe("gdn_mup_adamw"), {"model.width": "512", **keys})
        listed = graphs(run, world=processes, xla=True, sizes=Sizes())
        rows = {graph.name: graph.inputs[0][0] or 0 for graph in listed}
        counted = per_sequence(run)
        assert 50_000 < counted.training * rows["step"] <= MOST
        assert 50_000 < counted.forward * rows["evaluate"] <= MOST

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--list", "--processes=3"], "batch.sequences=4 cannot be shared by 3"),
            (["--processes=0"], "--processes=0: expected at least 1"),
            (["batch.sequence=3"], "batch.sequence"),
        ],
    )
    def test_impossible_warmup_arguments_are_refused(self, arguments, complaint):
        status, _, error = tiny_run.run_command("warmup", "tiny", *arguments)
        assert status == 2 and complaint in error


class TestOnACpu:
    """On a CPU warmup compiles nothing, says so, and runs every listed graph."""

    def test_warmup_on_a_cpu_runs_every_graph_and_leaves_no_files(self, data, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        changes = {"evaluation__final_tokens": 210, "batch__micro": 2, "log__probes": "true"}
        out = tiny_run.train("warmup", "tiny", *tiny_run.keys(data, tmp_path / "run", **changes))
        for name in ("step", "evaluate", "probes", "held-out", "held-out, last", "prefill", "decode"):
            assert f"\n{name:14}[" in f"\n{out}"
        assert "?" not in out and "nothing to compile" in out
        assert not (tmp_path / "run").exists() and not list((tmp_path / "cache").rglob(f"*{record.FOLDER}*"))

    def test_a_run_that_compiles_nothing_prints_no_cache_notice(self, tmp_path):
        assert notice(config(), CPU, 1, tmp_path) == notice(config(), CPU, 4, tmp_path) == []


class TestFingerprint:
    @pytest.mark.parametrize(
        "changes",
        [
            {"steps": "7"},
            {"optimizer__lr": "0.5"},
            {"seed": "3"},
            {"out": "x"},
            {"schedule__min_lr": "0.01"},
        ],
        ids=str,
    )
    def test_fingerprint_ignores_keys_that_change_no_graph(self, changes):
        assert fingerprint(config(**changes), CPU, 1) == fingerprint(config(), CPU, 1)

    @pytest.mark.parametrize(
        "changes",
        [
            {"batch__micro": "2"},
            {"model__width": "64"},
            {"compile": "true"},
            {"optimizer__beta1": "0.8"},
            {"log__probes": "true"},
        ],
        ids=str,
    )
    def test_fingerprint_covers_keys_that_change_a_graph(self, changes):
        assert fingerprint(config(**changes), CPU, 1) != fingerprint(config(), CPU, 1)

    def test_fingerprint_covers_processes_versions_flags_and_sources(self, tmp_path, monkeypatch):
        fingerprints = {fingerprint(config(), CPU, 1), fingerprint(config(), CPU, 2)}
        with monkeypatch.context() as patch:
            patch.setattr(record, "version", lambda name: "0")
            fingerprints.add(fingerprint(config(), CPU, 1))
        with monkeypatch.context() as patch:
            patch.setenv("NEURON_CC_FLAGS", "--auto-cast=all")
            fingerprints.add(fingerprint(config(), CPU, 1))
        monkeypatch.setattr(record, "_ROOT", tmp_path)
        for text in ("x = 1", "x = 2"):
            (tmp_path / "models").mkdir(exist_ok=True)
            (tmp_path / "models" / "new.py").write_text(text)
            fingerprints.add(fingerprint(config(), CPU, 1))
        assert len(fingerprints) == 6


class TestCaches:
    def test_the_cache_of_a_gpu_is_tritons(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        (cache,) = record.program_caches(CUDA, compiled=False, triton=True)
        assert cache.keys() == frozenset()
        (tmp_path / "KEY").mkdir()
        assert cache.keys() == {"KEY"}

    def test_the_cache_of_torch_compile_is_inductors(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        (cache,) = record.program_caches(CPU, compiled=True, triton=False)
        (tmp_path / "fxgraph" / "ab" / "KEY").mkdir(parents=True)
        assert cache.keys() == {"KEY"}

    def test_the_cache_of_neuron_is_where_its_variables_say(self, tmp_path, monkeypatch):
        monkeypatch.setattr(machine, "is_neuron", lambda device: True)
        xla = torch.device("xla")

        def find_cache() -> record.ProgramCache:
            return record.program_caches(xla, compiled=False, triton=False)[0]

        for name in ("NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL"):
            monkeypatch.delenv(name, raising=False)
        assert find_cache().place == "/var/tmp/neuron-compile-cache"
        monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "s3://bucket/cache")
        assert find_cache().place == "s3://bucket/cache" and find_cache().keys() == frozenset()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert record_path(config(), xla, 1).parent == tmp_path / record.FOLDER
        monkeypatch.setenv("NEURON_CC_FLAGS", f"--auto-cast=none --cache_dir={tmp_path}")
        (tmp_path / "neuronxcc-2.23" / "MODULE_1").mkdir(parents=True)
        assert find_cache().place == str(tmp_path) and find_cache().keys() == {"MODULE_1"}

    def test_the_cpu_device_of_xla_has_no_cache(self, tmp_path, monkeypatch):
        monkeypatch.setattr(machine, "is_neuron", lambda device: False)
        xla = torch.device("xla")
        assert record.program_caches(xla, compiled=False, triton=False) == ()
        assert notice(config(), xla, 2, tmp_path) == [
            "cache      none: XLA's CPU device compiles in every process anew"
        ]


class TestNotice:
    @pytest.fixture
    def compiled(self, tmp_path, monkeypatch) -> RunConfig:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        return config(compile="true")

    def test_the_cache_notice_is_cold_until_that_run_is_recorded(self, tmp_path, compiled):
        (line,) = notice(compiled, CPU, 2, tmp_path / "a run")
        assert "cold" in line and f"delta-trn warmup '{tmp_path}/a run' --processes=2" in line
        path = record_path(compiled, CPU, 2)
        assert path.parent == tmp_path / "inductor" / record.FOLDER
        write_record(path, [{"name": "step"}])
        (line,) = notice(compiled, CPU, 2, tmp_path)
        assert "warm: 1 graphs" in line and str(path) in line
        (line,) = notice(apply(compiled, {"batch.micro": "2"}), CPU, 2, tmp_path)
        assert "cold" in line

    def test_a_damaged_warmup_record_counts_as_cold(self, tmp_path, compiled):
        path = record_path(compiled, CPU, 1)
        path.parent.mkdir(parents=True)
        path.write_text("{")
        (line,) = notice(compiled, CPU, 1, tmp_path)
        assert "cold" in line

    def test_warmup_accepts_the_folder_of_a_run(self, finished):
        out = tiny_run.train("warmup", finished, "--list")
        assert "[4, 16]" in out

    @pytest.mark.slow
    def test_a_compiled_run_is_warm_after_its_warmup(self, data, tmp_path, compiled):
        changes = {"compile": "true", "model__layers": 1, "steps": 2, "evaluation__every": 2}
        keys = tiny_run.keys(data, tmp_path / "run", **changes)
        assert "cache      cold" in tiny_run.train("run", "tiny", *keys)
        tiny_run.train("warmup", tmp_path / "run")
        (path,) = (tmp_path / "inductor" / record.FOLDER).iterdir()
        graph_names = [g["name"] for g in json.loads(path.read_bytes())["graphs"]]
        assert graph_names == ["step", "evaluate", "prefill", "decode"]
        keys = tiny_run.keys(data, tmp_path / "again", **changes)
        assert "cache      warm: 4 graphs" in tiny_run.train("run", "tiny", *keys)


class TestLaunchScripts:
    """Stand-ins for programs log their words and AWS's variables. Nothing runs on a chip."""

    FOLDER = Path(warmup.__file__).parents[1] / "launch"

    @pytest.fixture
    def launch(self, tmp_path):
        """Returns a function that runs a launch script: the logged words and variables of each command."""
        log = tmp_path / "log"
        for name in ("python", "neuron_parallel_compile"):
            program = tmp_path / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\nenv >> {log}\necho END >> {log}\n')
            program.chmod(0o755)

        def run(script: str, *words: str, **variables: str) -> list[tuple[str, dict[str, str]]]:
            path = f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
            log.unlink(missing_ok=True)
            subprocess.run(
                [self.FOLDER / script, *words], env={"PATH": path, **variables}, check=True, timeout=200
            )
            commands = []
            for part in log.read_text().split("END\n")[:-1]:
                command, *lines = part.splitlines()
                pairs = dict(line.partition("=")[::2] for line in lines)
                kept = r"NEURON|XLA|FI_|MALLOC|ALLREDUCE"
                commands.append((command, {k: v for k, v in pairs.items() if re.match(kept, k)}))
            return commands

        return run

    @pytest.mark.parametrize("script", ["trn1.2xlarge.sh", "trn1.32xlarge.sh"])
    def test_warmup_and_training_get_the_same_variables_and_keys(self, launch, script):
        ((trained, variables),) = launch(script, "tiny", "steps=3", XLA_DOWNCAST_BF16="1")
        ((warmed, same),) = launch(script, "warmup", "tiny", "steps=3", "--list")
        assert variables == same
        assert "XLA_DOWNCAST_BF16" not in variables
        assert variables["NEURON_CC_FLAGS"].split() == ["--model-type=transformer", "--auto-cast=none"]
        assert variables["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] == "3"
        assert ("FI_PROVIDER" in variables) == (script == "trn1.32xlarge.sh")
        keys = trained.partition("--or-resume tiny ")[2]
        assert keys and warmed.startswith(f"python -m train warmup tiny {keys} --list --processes=")
        assert warmed.rpartition("=")[2] == re.findall(r"--nproc_per_node=(\d+)", trained)[0]

    def test_several_nodes_compile_for_all_their_processes_and_then_load(self, launch):
        (compiled, _), (loaded, _) = launch("trn1.32xlarge.sh", "warmup", "tiny", NODES="4", HEAD="10.0.0.1")
        assert compiled == f"neuron_parallel_compile {loaded}"
        assert "--nnodes=4" in loaded and "-m train warmup tiny" in loaded
        assert loaded.startswith("python -m torch.distributed.run ")

    def test_what_a_user_sets_stays_and_flags_are_added(self, launch):
        given = {"NEURON_CC_FLAGS": "--cache_dir=/x", "MALLOC_ARENA_MAX": "8"}
        ((_, variables),) = launch("trn1.2xlarge.sh", "tiny", **given)
        assert variables["NEURON_CC_FLAGS"].endswith(" --cache_dir=/x")
        assert variables["MALLOC_ARENA_MAX"] == "8" and variables["XLA_DISABLE_FUNCTIONALIZATION"] == "0"

    def test_every_variable_is_preceded_by_a_reason_with_its_source(self):
        for path in sorted(self.FOLDER.glob("*.sh")):
            if path.name.startswith("8x"):
                continue
            for paragraph in re.split(r"\n\s*\n|(?<=\n)(?=# )(?<!#)", path.read_text()):
                if re.search(r"^(export|unset) ", paragraph, re.MULTILINE):
                    reason = paragraph[: re.search(r"^(export|unset) ", paragraph, re.MULTILINE).start()]
                    assert re.search(r"# .*\.rst|aws-neuron/", reason, re.DOTALL), paragraph

    def test_variables_that_change_graphs_are_part_of_a_record(self, monkeypatch):
        text = (self.FOLDER / "neuron_environment.sh").read_text()
        named = re.findall(r"^export (\w+)", text, re.MULTILINE)
        of_graphs = set(named) - {"MALLOC_ARENA_MAX", *(n for n in named if n.startswith("NEURON_RT_"))}
        assert of_graphs <= set(record._VARIABLES) and len(of_graphs) == 3
        before = fingerprint(config(), CPU, 1)
        for name in of_graphs:
            with monkeypatch.context() as patch:
                patch.setenv(name, "7")
                assert fingerprint(config(), CPU, 1) != before


class TestNeuron:
    """A script stands in for neuron_parallel_compile and logs the commands. Nothing runs on a chip."""

    @pytest.fixture
    def log(self, tmp_path, monkeypatch):
        log = tmp_path / "log"
        script = tmp_path / "bin" / "neuron_parallel_compile"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\necho wrapped "$@" >> {log}\nexit ${{STATUS:-0}}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(machine, "is_neuron", lambda device: True)
        python = tmp_path / "bin" / "python"
        python.write_text(f'#!/bin/sh\necho plain "$@" >> {log}\n')
        python.chmod(script.stat().st_mode)
        monkeypatch.setattr(warmup.sys, "executable", str(python))
        return log

    def test_warmup_on_neuron_compiles_in_parallel_and_then_loads(self, log):
        tiny_run.train("warmup", "tiny", "steps=3", "device=cpu", "--processes=2")
        wrapped, plain = log.read_text().splitlines()
        launcher = "-m torch.distributed.run --standalone --nproc_per_node=2"
        inner = f"{launcher} -m delta_trn warmup tiny steps=3 device=cpu"
        assert wrapped.startswith("wrapped ") and wrapped.endswith(f"{inner} --here")
        assert plain == f"plain {inner} --here"

    def test_a_failed_neuron_compiler_ends_warmup(self, log, monkeypatch):
        monkeypatch.setenv("STATUS", "3")
        status, _, error = tiny_run.run_command("warmup", "tiny", "device=cpu")
        assert status == 2 and "neuron_parallel_compile ended with status 3" in error
        assert len(log.read_text().splitlines()) == 1

    def test_a_missing_neuron_parallel_compile_is_named(self, monkeypatch):
        monkeypatch.setattr(machine, "is_neuron", lambda device: True)
        monkeypatch.setattr(warmup.shutil, "which", lambda name: None)
        status, _, error = tiny_run.run_command("warmup", "tiny", "device=cpu")
        assert status == 2 and "it comes with torch-neuronx" in error

    def test_warmup_does_not_record_graphs_that_it_only_collected(self, data, tmp_path, monkeypatch):
        monkeypatch.setenv(warmup.COLLECTING, "1")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        monkeypatch.setattr("delta_trn.train.run.step.torch.compile", lambda f, **options: f)
        out = tiny_run.train("warmup", "tiny", *tiny_run.keys(data, tmp_path / "run", compile="true"))
        assert "collected for neuron_parallel_compile" in out
        assert not (tmp_path / "inductor" / record.FOLDER).exists()
