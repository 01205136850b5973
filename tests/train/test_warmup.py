"""What a run compiles is listed, compiled once, written down beside the cache, and looked up before a run."""

import json
import multiprocessing
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from delta_trn.backends import machine as platform
from delta_trn.train.commands import warmup
from delta_trn.train.neuron import identity, manifest
from delta_trn.train.neuron.graphs import Sizes, graphs
from delta_trn.train.neuron.identity import Identity
from delta_trn.train.neuron.manifest import Compiled
from delta_trn.train.neuron.notice import notice
from delta_trn.train.recipes import recipe
from delta_trn.train.settings.errors import TrainError
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig
from tests.support import tiny_run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DONE = [Compiled("step", ((4, 16), (4, 16)), 1, 2.5, ("abc",))]


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

    def test_a_cluster_is_listed_on_any_machine(self):
        status, out, _ = tiny_run.command("warmup", "tiny", "--list", "--processes=2", "device=xla")
        assert status == 0 and "first step" in out and "[2, 32]" in out and "[1, ?]" in out

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--list", "--processes=3"], "batch.sequences=4 cannot be shared by 3"),
            (["--processes=0"], "--processes=0: expected at least 1"),
            (["batch.sequence=3"], "batch.sequence"),
        ],
    )
    def test_what_cannot_be_is_refused(self, arguments, complaint):
        status, _, error = tiny_run.command("warmup", "tiny", *arguments)
        assert status == 2 and complaint in error


class TestOnACpu:
    """Nothing is compiled, and it says so; every listed graph runs."""

    def test_every_graph_runs_and_nothing_is_left_behind(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        data = tiny_run.prepared(tmp_path)
        changes = {"evaluation__final_tokens": 210, "batch__micro": 2, "log__probes": "true"}
        out = tiny_run.train("warmup", "tiny", *tiny_run.keys(data, tmp_path / "run", **changes))
        for name in ("step", "evaluate", "probes", "held-out", "held-out, last", "prefill", "decode"):
            assert f"\n{name:14}[" in f"\n{out}"
        assert "?" not in out and "nothing to compile" in out
        assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()

    def test_a_run_is_not_told(self, tmp_path):
        assert notice(config(), CPU, 1, tmp_path) == notice(config(), CPU, 4, tmp_path) == []


def made(changes: dict[str, str], world: int = 1) -> Identity:
    return Identity.of(config(**changes), CPU, world)


class TestIdentity:
    @pytest.mark.parametrize(
        "changes",
        [{"steps": "7"}, {"optimizer__lr": "0.5"}, {"seed": "3"}, {"out": "x"}, {"schedule__min_lr": "0.1"}],
        ids=str,
    )
    def test_what_changes_no_graph_is_the_same(self, changes):
        assert made(changes).fingerprint() == made({}).fingerprint()

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
    def test_what_changes_a_graph_is_another(self, changes):
        assert made(changes).fingerprint() != made({}).fingerprint()
        name = next(iter(changes)).replace("__", ".")
        assert made(changes).differences(json.loads(json.dumps(vars(made({}))))) == [name]

    def test_so_are_another_world_source_version_and_flag(self, monkeypatch):
        before = made({})
        assert made({}, 2).differences(vars(before)) == ["world"]
        monkeypatch.setattr(identity, "version", lambda name: "0")
        assert "torch" in made({}).differences(vars(before))
        monkeypatch.undo()
        monkeypatch.setattr(platform, "is_neuron", lambda device: True)
        monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=all")
        assert made({}).differences(vars(before)) == ["NEURON_CC_FLAGS"]

    def test_kernels_count_for_those_who_use_them(self):
        nki = Identity.of(config().model_copy(update={"backend": "nki"}), CPU, 1)
        assert "nki_kernels" in nki.sources and "nki_kernels" not in made({}).sources
        assert nki.sources["backends"] != made({}).sources["backends"]
        assert nki.sources["models"] == made({}).sources["models"]


def _record(path: Path, number: int) -> None:
    manifest.record(path, replace(made({}), world=number), DONE)


class TestManifest:
    def test_entries_are_found_again_and_replaced(self, tmp_path):
        path = tmp_path / "cache" / manifest.NAME
        assert manifest.read(path) == {}
        for world in (1, 2, 1):
            manifest.record(path, made({}, world), DONE)
        entries = manifest.read(path)
        assert entries.keys() == {made({}, world).fingerprint() for world in (1, 2)}
        (graph,) = entries[made({}).fingerprint()]["graphs"]
        assert graph["inputs"] == [{"shape": [4, 16], "dtype": "int64"}] * 2
        assert graph["keys"] == ["abc"] and graph["seconds"] == 2.5
        assert manifest.nearest(entries, made({}, 3)) == ["world"]

    def test_several_that_write_at_once_lose_nothing(self, tmp_path):
        path = tmp_path / manifest.NAME
        context = multiprocessing.get_context("fork")
        writers = [context.Process(target=_record, args=(path, n)) for n in range(1, 5)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
        assert [writer.exitcode for writer in writers] == [0] * 4
        assert {entry["world"] for entry in manifest.read(path).values()} == {1, 2, 3, 4}

    def test_the_oldest_go_when_there_are_too_many(self, tmp_path, monkeypatch):
        monkeypatch.setattr(manifest, "KEPT", 2)
        path = tmp_path / manifest.NAME
        for world in (1, 2, 3):
            manifest.record(path, made({}, world), DONE)
        assert len(manifest.read(path)) == 2

    @pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}', '{"format": 1, "entries": {"a": 3}}'])
    def test_a_damaged_one_is_named(self, tmp_path, content):
        path = tmp_path / manifest.NAME
        path.write_text(content)
        with pytest.raises(TrainError, match=r"delta-trn-warmup.json cannot be read .* delete it"):
            manifest.read(path)

    def test_another_format_is_refused(self, tmp_path):
        path = tmp_path / manifest.NAME
        path.write_text('{"format": 2, "entries": {}}')
        with pytest.raises(TrainError, match="has format 2, expected 1"):
            manifest.read(path)


class TestCaches:
    def test_a_gpus_is_tritons(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        (cache,) = platform.program_caches(CUDA, compiled=False, triton=True)
        assert cache.keys() == frozenset()
        (tmp_path / "KEY").mkdir()
        assert cache.keys() == {"KEY"} and manifest.place((cache,)) == tmp_path / manifest.NAME

    def test_torch_compiles_is_inductors(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        (cache,) = platform.program_caches(CPU, compiled=True, triton=False)
        (tmp_path / "fxgraph" / "ab" / "KEY").mkdir(parents=True)
        assert cache.keys() == {"KEY"}

    def test_neurons_is_where_its_variables_say(self, tmp_path, monkeypatch):
        monkeypatch.setattr(platform, "is_neuron", lambda device: True)
        xla = torch.device("xla")

        def found() -> platform.ProgramCache:
            return platform.program_caches(xla, compiled=False, triton=False)[0]

        for name in ("NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL"):
            monkeypatch.delenv(name, raising=False)
        assert found().place == "/var/tmp/neuron-compile-cache"
        monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "s3://bucket/cache")
        assert found().place == "s3://bucket/cache" and found().keys() == frozenset()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert manifest.place((found(),)) == tmp_path / "delta-trn" / manifest.NAME
        monkeypatch.setenv("NEURON_CC_FLAGS", f"--auto-cast=none --cache_dir={tmp_path}")
        (tmp_path / "neuronxcc-2.23" / "MODULE_1").mkdir(parents=True)
        assert found().place == str(tmp_path) and found().keys() == {"MODULE_1"}

    def test_xlas_cpu_device_keeps_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr(platform, "is_neuron", lambda device: False)
        xla = torch.device("xla")
        assert platform.program_caches(xla, compiled=False, triton=False) == ()
        assert notice(config(), xla, 2, tmp_path) == [
            "cache      none: XLA's CPU device compiles in every process anew"
        ]


class TestNotice:
    @pytest.fixture
    def compiled(self, tmp_path, monkeypatch) -> RunConfig:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        return config(compile="true")

    def test_cold_then_warm_then_cold_for_another(self, tmp_path, compiled):
        (line,) = notice(compiled, CPU, 2, tmp_path / "a run")
        assert "cold" in line and f"python -m train warmup '{tmp_path}/a run' --processes=2" in line
        path = tmp_path / "inductor" / manifest.NAME
        manifest.record(path, Identity.of(compiled, CPU, 2), DONE)
        (line,) = notice(compiled, CPU, 2, tmp_path)
        assert "warm: 1 graphs" in line and str(path) in line
        other = apply(compiled, {"batch.micro": "2"})
        (line,) = notice(other, CPU, 2, tmp_path)
        assert "cold" in line and "nearest differs in batch.micro;" in line

    def test_a_damaged_manifest_does_not_stop_the_run(self, tmp_path, compiled):
        path = tmp_path / "inductor" / manifest.NAME
        path.parent.mkdir()
        path.write_text("{")
        (line,) = notice(compiled, CPU, 1, tmp_path)
        assert line.startswith("cache      unknown: ") and "delete it" in line

    def test_a_runs_folder_is_warmed_as_its_recipe_is(self, tmp_path, monkeypatch):
        data = tiny_run.prepared(tmp_path)
        tiny_run.train(
            "run", "tiny", *tiny_run.keys(data, tmp_path / "run", steps=1, evaluation__sequences=2)
        )
        out = tiny_run.train("warmup", tmp_path / "run", "--list")
        assert "[4, 16]" in out

    @pytest.mark.slow
    def test_a_compiled_run_is_warm_afterwards(self, tmp_path, compiled):
        data = tiny_run.prepared(tmp_path)
        changes = {"compile": "true", "model__layers": 1, "steps": 2, "evaluation__every": 2}
        keys = tiny_run.keys(data, tmp_path / "run", **changes)
        assert "cache      cold" in tiny_run.train("run", "tiny", *keys)
        tiny_run.train("warmup", tmp_path / "run")
        (entry,) = manifest.read(tmp_path / "inductor" / manifest.NAME).values()
        assert [g["name"] for g in entry["graphs"]] == ["step", "evaluate", "prefill", "decode"]
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
        monkeypatch.setattr(platform, "is_neuron", lambda device: True)
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

    def test_a_failure_is_not_recorded(self, started, monkeypatch):
        monkeypatch.setenv("STATUS", "3")
        status, _, error = tiny_run.command("warmup", "tiny", "device=cpu")
        assert status == 2 and "neuron_parallel_compile ended with status 3" in error
        assert len(started.read_text().splitlines()) == 1

    def test_without_the_tool_it_says_where_it_comes_from(self, monkeypatch):
        monkeypatch.setattr(platform, "is_neuron", lambda device: True)
        monkeypatch.setattr(warmup.shutil, "which", lambda name: None)
        status, _, error = tiny_run.command("warmup", "tiny", "device=cpu")
        assert status == 2 and "it comes with torch-neuronx" in error

    def test_what_is_only_collected_is_not_written_down(self, tmp_path, monkeypatch):
        monkeypatch.setenv(warmup.COLLECTING, "1")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        monkeypatch.setattr("delta_trn.train.run.step.torch.compile", lambda f, **options: f)
        data = tiny_run.prepared(tmp_path)
        out = tiny_run.train("warmup", "tiny", *tiny_run.keys(data, tmp_path / "run", compile="true"))
        assert "collected for neuron_parallel_compile" in out
        assert not (tmp_path / "inductor" / manifest.NAME).exists()
