"""What a run compiles is listed, compiled once, recorded beside the cache, and looked up before a run."""

import json
import os
import stat

import pytest
import torch

from delta_trn.backends import machine
from delta_trn.train.commands import warmup
from delta_trn.train.neuron import record
from delta_trn.train.neuron.graphs import Sizes, graphs
from delta_trn.train.neuron.record import fingerprint, notice, record_path, write_record
from delta_trn.train.recipes import recipe
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig
from tests.support import tiny_run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(**changes: str) -> RunConfig:
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return apply(recipe("tiny"), {"device": "cpu", "backend": "chunked", "precision": "float32", **dotted})


def shapes(changes: dict[str, str], *, world: int = 1, xla: bool = False, sizes: Sizes | None = None):
    found = graphs(config(**changes), world=world, xla=xla, sizes=sizes or Sizes())
    return {graph.name: graph.inputs[0] for graph in found}


class TestGraphs:
    def test_a_step_is_one_micro_batch_and_on_xla_all_of_them(self):
        changes = {"batch__sequences": "8", "batch__length": "32", "batch__micro": "2"}
        assert shapes(changes)["step"] == (2, 32)
        assert shapes(changes, world=2, xla=True)["step"] == (4, 32)
        assert shapes(changes, world=2, xla=True)["first step"] == (4, 32)
        context = {**changes, "distribution__context": "2"}
        assert shapes(context, world=2)["step"] == (2, 16)

    def test_held_out_text_in_order_ends_in_a_smaller_batch(self):
        changes = {"evaluation__final_tokens": "1000", "evaluation__batch": "4", "evaluation__sequences": "8"}
        changes |= {"batch__length": "32"}
        found = shapes(changes, sizes=Sizes(held_out=10_000))
        assert found["held-out"] == (4, 32) and found["held-out, last"] == (1000 // 32 % 4, 32)
        found = shapes(changes, sizes=Sizes(held_out=70))
        assert "held-out" not in found and found["held-out, last"] == (2, 32)
        assert shapes(changes)["held-out, last"] == (None, 32)

    def test_without_samples_nothing_is_generated(self):
        assert shapes({}, sizes=Sizes(prompt=3))["prefill"] == (1, 3)
        assert not {"prefill", "decode"} & shapes({"sample__tokens": "0"}).keys()

    def test_without_probes_none_are_measured(self):
        assert shapes({"log__probes": "true"})["probes"] == shapes({})["evaluate"]
        assert "probes" not in shapes({})

    def test_graphs_of_a_cluster_are_listed_on_any_machine(self):
        status, out, _ = tiny_run.run_command("warmup", "tiny", "--list", "--processes=2", "device=xla")
        assert status == 0 and "first step" in out and "[2, 32]" in out and "[1, ?]" in out

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--list", "--processes=3"], "batch.sequences=4 cannot be shared by 3"),
            (["--processes=0"], "--processes=0: expected at least 1"),
            (["batch.sequence=3"], "batch.sequence"),
        ],
    )
    def test_impossible_arguments_are_refused(self, arguments, complaint):
        status, _, error = tiny_run.run_command("warmup", "tiny", *arguments)
        assert status == 2 and complaint in error


class TestOnACpu:
    """Nothing is compiled, and it says so; every listed graph runs."""

    def test_every_graph_runs_and_nothing_is_left_behind(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        data = tiny_run.prepare_data(tmp_path)
        changes = {"evaluation__final_tokens": 210, "batch__micro": 2, "log__probes": "true"}
        out = tiny_run.train("warmup", "tiny", *tiny_run.keys(data, tmp_path / "run", **changes))
        for name in ("step", "evaluate", "probes", "held-out", "held-out, last", "prefill", "decode"):
            assert f"\n{name:14}[" in f"\n{out}"
        assert "?" not in out and "nothing to compile" in out
        assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()

    def test_a_run_that_compiles_nothing_gets_no_notice(self, tmp_path):
        assert notice(config(), CPU, 1, tmp_path) == notice(config(), CPU, 4, tmp_path) == []


class TestFingerprint:
    @pytest.mark.parametrize(
        "changes",
        [{"steps": "7"}, {"optimizer__lr": "0.5"}, {"seed": "3"}, {"out": "x"}, {"schedule__min_lr": "0.1"}],
        ids=str,
    )
    def test_a_key_that_changes_no_graph_does_not_count(self, changes):
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
    def test_a_key_that_changes_a_graph_counts(self, changes):
        assert fingerprint(config(**changes), CPU, 1) != fingerprint(config(), CPU, 1)

    def test_processes_versions_flags_and_sources_count(self, tmp_path, monkeypatch):
        seen = {fingerprint(config(), CPU, 1), fingerprint(config(), CPU, 2)}
        with monkeypatch.context() as patch:
            patch.setattr(record, "version", lambda name: "0")
            seen.add(fingerprint(config(), CPU, 1))
        with monkeypatch.context() as patch:
            patch.setenv("NEURON_CC_FLAGS", "--auto-cast=all")
            seen.add(fingerprint(config(), CPU, 1))
        monkeypatch.setattr(record, "_ROOT", tmp_path)
        for text in ("x = 1", "x = 2"):
            (tmp_path / "models").mkdir(exist_ok=True)
            (tmp_path / "models" / "new.py").write_text(text)
            seen.add(fingerprint(config(), CPU, 1))
        assert len(seen) == 6


class TestCaches:
    def test_the_cache_of_a_gpu_is_tritons(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        (cache,) = machine.program_caches(CUDA, compiled=False, triton=True)
        assert cache.keys() == frozenset()
        (tmp_path / "KEY").mkdir()
        assert cache.keys() == {"KEY"}

    def test_the_cache_of_torch_compile_is_inductors(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        (cache,) = machine.program_caches(CPU, compiled=True, triton=False)
        (tmp_path / "fxgraph" / "ab" / "KEY").mkdir(parents=True)
        assert cache.keys() == {"KEY"}

    def test_the_cache_of_neuron_is_where_its_variables_say(self, tmp_path, monkeypatch):
        monkeypatch.setattr(machine, "is_neuron", lambda device: True)
        xla = torch.device("xla")

        def found() -> machine.ProgramCache:
            return machine.program_caches(xla, compiled=False, triton=False)[0]

        for name in ("NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL"):
            monkeypatch.delenv(name, raising=False)
        assert found().place == "/var/tmp/neuron-compile-cache"
        monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "s3://bucket/cache")
        assert found().place == "s3://bucket/cache" and found().keys() == frozenset()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert record_path(config(), xla, 1).parent == tmp_path / record.FOLDER
        monkeypatch.setenv("NEURON_CC_FLAGS", f"--auto-cast=none --cache_dir={tmp_path}")
        (tmp_path / "neuronxcc-2.23" / "MODULE_1").mkdir(parents=True)
        assert found().place == str(tmp_path) and found().keys() == {"MODULE_1"}

    def test_the_cpu_device_of_xla_has_no_cache(self, tmp_path, monkeypatch):
        monkeypatch.setattr(machine, "is_neuron", lambda device: False)
        xla = torch.device("xla")
        assert machine.program_caches(xla, compiled=False, triton=False) == ()
        assert notice(config(), xla, 2, tmp_path) == [
            "cache      none: XLA's CPU device compiles in every process anew"
        ]


class TestNotice:
    @pytest.fixture
    def compiled(self, tmp_path, monkeypatch) -> RunConfig:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        return config(compile="true")

    def test_a_run_is_cold_then_warm_and_another_is_cold(self, tmp_path, compiled):
        (line,) = notice(compiled, CPU, 2, tmp_path / "a run")
        assert "cold" in line and f"python -m train warmup '{tmp_path}/a run' --processes=2" in line
        path = record_path(compiled, CPU, 2)
        assert path.parent == tmp_path / "inductor" / record.FOLDER
        write_record(path, [{"name": "step"}])
        (line,) = notice(compiled, CPU, 2, tmp_path)
        assert "warm: 1 graphs" in line and str(path) in line
        (line,) = notice(apply(compiled, {"batch.micro": "2"}), CPU, 2, tmp_path)
        assert "cold" in line

    def test_a_damaged_record_is_none(self, tmp_path, compiled):
        path = record_path(compiled, CPU, 1)
        path.parent.mkdir(parents=True)
        path.write_text("{")
        (line,) = notice(compiled, CPU, 1, tmp_path)
        assert "cold" in line

    def test_a_runs_folder_can_be_warmed(self, tmp_path, monkeypatch):
        data = tiny_run.prepare_data(tmp_path)
        tiny_run.train(
            "run", "tiny", *tiny_run.keys(data, tmp_path / "run", steps=1, evaluation__sequences=2)
        )
        out = tiny_run.train("warmup", tmp_path / "run", "--list")
        assert "[4, 16]" in out

    @pytest.mark.slow
    def test_a_compiled_run_is_warm_afterwards(self, tmp_path, compiled):
        data = tiny_run.prepare_data(tmp_path)
        changes = {"compile": "true", "model__layers": 1, "steps": 2, "evaluation__every": 2}
        keys = tiny_run.keys(data, tmp_path / "run", **changes)
        assert "cache      cold" in tiny_run.train("run", "tiny", *keys)
        tiny_run.train("warmup", tmp_path / "run")
        (path,) = (tmp_path / "inductor" / record.FOLDER).iterdir()
        assert [g["name"] for g in json.loads(path.read_bytes())["graphs"]] == [
            "step",
            "evaluate",
            "prefill",
            "decode",
        ]
        keys = tiny_run.keys(data, tmp_path / "again", **changes)
        assert "cache      warm: 4 graphs" in tiny_run.train("run", "tiny", *keys)


class TestNeuron:
    """The commands that are started, with a script in neuron_parallel_compile's place. Not run on a chip."""

    @pytest.fixture
    def started(self, tmp_path, monkeypatch):
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

    def test_graphs_are_compiled_in_parallel_and_then_loaded(self, started):
        tiny_run.train("warmup", "tiny", "steps=3", "device=cpu", "--processes=2")
        wrapped, plain = started.read_text().splitlines()
        inner = (
            "-m torch.distributed.run --standalone --nproc_per_node=2 -m train warmup tiny steps=3 device=cpu"
        )
        assert wrapped.startswith("wrapped ") and wrapped.endswith(f"{inner} --here")
        assert plain == f"plain {inner} --here"

    def test_a_failed_compiler_ends_the_command(self, started, monkeypatch):
        monkeypatch.setenv("STATUS", "3")
        status, _, error = tiny_run.run_command("warmup", "tiny", "device=cpu")
        assert status == 2 and "neuron_parallel_compile ended with status 3" in error
        assert len(started.read_text().splitlines()) == 1

    def test_a_missing_neuron_parallel_compile_is_named(self, monkeypatch):
        monkeypatch.setattr(machine, "is_neuron", lambda device: True)
        monkeypatch.setattr(warmup.shutil, "which", lambda name: None)
        status, _, error = tiny_run.run_command("warmup", "tiny", "device=cpu")
        assert status == 2 and "it comes with torch-neuronx" in error

    def test_collected_graphs_are_not_recorded(self, tmp_path, monkeypatch):
        monkeypatch.setenv(warmup.COLLECTING, "1")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        monkeypatch.setattr("delta_trn.train.run.step.torch.compile", lambda f, **options: f)
        data = tiny_run.prepare_data(tmp_path)
        out = tiny_run.train("warmup", "tiny", *tiny_run.keys(data, tmp_path / "run", compile="true"))
        assert "collected for neuron_parallel_compile" in out
        assert not (tmp_path / "inductor" / record.FOLDER).exists()
