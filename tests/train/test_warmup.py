"""Warmup lists and compiles a run's graphs,
and the launch scripts start it as they start training.
"""

import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from delta_trn.backends.layers.nki_adapter import readout_block
from delta_trn.backends.nki_runtime_adapter import count_instructions
from delta_trn.train.commands import warmup
from delta_trn.train.neuron import instructions
from delta_trn.train.neuron.compiling import graphs
from delta_trn.train.neuron.instructions import MOST, per_sequence
from delta_trn.train.recipes import recipe
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig
from tests.support import tiny_run
from tests.support.warm import run_python


def config(**changes: str) -> RunConfig:
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return apply(
        recipe("tiny"), {"device": "cpu", "backend": "chunked", "precision": "float32", **dotted}
    )


def list_rows(changes: dict[str, str], **options: Any) -> dict[str, tuple[int | None, int]]:
    return {
        graph.name: (graph.rows, graph.length) for graph in graphs(config(**changes), **options)
    }


@pytest.mark.parametrize("blocks", [3, 5, 7])
def test_a_readout_of_many_blocks_of_words_has_the_counted_instructions(blocks):
    """Beyond four blocks they are not counted: they lie on a line."""
    c = config(model__width="64", batch__length="64")
    rows = blocks * readout_block(64) + 100
    counted = [
        count_instructions(partial(instructions._run_readout, c, rows, training=training))
        for training in (False, True)
    ]
    assert instructions._count_readout(c, rows) == tuple(counted)


class TestGraphs:
    def test_a_graph_of_a_step_has_one_micro_batch(self):
        changes = {"batch__sequences": "8", "batch__length": "32", "batch__micro": "2"}
        assert list_rows(changes, world=1)["step"] == list_rows(changes, world=2)["step"] == (2, 32)
        assert list_rows({**changes, "distribution__context": "2"}, world=2)["step"] == (2, 16)

    def test_the_last_batch_of_held_out_text_has_a_graph_of_its_own(self):
        changes = {
            "evaluation__final_tokens": "1000",
            "evaluation__batch": "4",
            "evaluation__sequences": "8",
        }
        changes |= {"batch__length": "32"}
        rows = list_rows(changes, world=1, held_out=10_000)
        assert rows["held-out"] == (4, 32) and rows["held-out, last"] == (1000 // 32 % 4, 32)
        rows = list_rows(changes, world=1, held_out=70)
        assert rows["held-out"] == (2, 32) and "held-out, last" not in rows
        assert list_rows(changes, world=1)["held-out, last"] == (None, 32)

    def test_graphs_of_a_cluster_are_listed_on_any_machine(self):
        status, out, _ = tiny_run.run_command(
            "warmup", "tiny", "--list", "--processes=2", "device=xla"
        )
        assert status == 0 and re.search(r"step +\[2, 32\]", out)
        assert "instructions of the NKI kernels" in out and "neuronx-cc refuses" not in out

    def test_warmup_runs_every_graph_that_it_lists_and_leaves_no_folder(self, data, tmp_path):
        changes = {"evaluation__final_tokens": 210, "batch__micro": 2, "log__probes": "true"}
        out = tiny_run.train("warmup", "tiny", *tiny_run.keys(data, tmp_path / "run", **changes))
        assert re.findall(r"^(.*?) +\[\d, 16\]", out, re.MULTILINE) == [
            "step",
            "evaluate",
            "held-out",
            "held-out, last",
        ]
        assert "nothing to compile" in out and not (tmp_path / "run").exists()

    def test_warmup_accepts_the_folder_of_a_run(self, finished):
        assert "[4, 16]" in tiny_run.train("warmup", finished, "--list")

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
            *("warmup", "tiny", "--list", "device=xla", "precision=float32"),
            *("model.layers=1", "batch.micro=4"),
        )
        assert (
            f"{4 * one.training:,}  above {4 * one.training - 1:,}: neuronx-cc refuses it, lower"
            in out
        )

    def test_launch_scripts_keep_graphs_within_the_bound(self):
        run = apply(recipe("gdn_mup_adamw"), {"model.width": "512"})
        counted = per_sequence(run)
        for script, processes in (("trn1.2xlarge", 2), ("trn1.32xlarge", 32)):
            text = (Path(warmup.__file__).parents[1] / "launch" / f"{script}.sh").read_text()
            keys = dict(
                word.split("=") for word in re.findall(r"(?:batch|evaluation)\.\w+=\d+", text)
            )
            assert keys.keys() == {"batch.micro", "evaluation.batch"}, (
                "a sequence is as long as the recipe's"
            )
            rows = {
                graph.name: graph.rows or 0 for graph in graphs(apply(run, keys), world=processes)
            }
            assert 50_000 < counted.training * rows["step"] <= MOST
            assert 50_000 < counted.forward * rows["evaluate"] <= MOST

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--list", "--processes=3"], "batch.sequences=4 cannot be shared by 3"),
            (["batch.sequence=3"], "batch.sequence"),
        ],
    )
    def test_impossible_warmup_arguments_are_refused(self, arguments, complaint):
        status, _, error = tiny_run.run_command("warmup", "tiny", *arguments)
        assert status == 2 and complaint in error


# A run in the emulator, which computes on CPU tensors: it has nothing of the stand-in.
RUN = """
import json, sys
from tests.support.emulator import driver
driver.install()
from triton import knobs
from delta_trn.train.__main__ import main
launched, keys = set(), sys.argv[1:]
def note(*, key, fn, **rest): launched.add(f"{fn.module}.{fn.name} {key}")
knobs.runtime.jit_cache_hook = note
assert main(["run", "tiny", "device=cpu", "backend=triton", *keys]) == 0
print("LAUNCHED", json.dumps(sorted(launched)))
"""
# What warmup notes, by the same name.
NOTED = """
import json, sys
from delta_trn.backends.gpu_stand_in.cuda import card
from delta_trn.backends.gpu_stand_in.launch_adapter import record_launches
from delta_trn.train.commands.warmup import _configuration
from delta_trn.train.run.launches import launch_run
from delta_trn.train.settings.overrides import apply, parse
from triton import knobs
noted, keys = set(), sys.argv[1:]
with record_launches(card((9, 0))):
    inner = knobs.runtime.jit_cache_hook
    def note(*, key, fn, **rest):
        noted.add(f"{fn.module}.{fn.name} {key}")
        return inner(key=key, fn=fn, **rest)
    knobs.runtime.jit_cache_hook = note
    launch_run(apply(_configuration("tiny"), parse(keys)), 1)
print("LAUNCHED", json.dumps(sorted(noted)))
"""


def launched(program: str, keys: list[str], cache: Path) -> set[str]:
    """Returns the kernels that a program names; Triton is not interpreted there."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = run_python(["-c", program, *keys], timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return set(json.loads(re.findall(r"^LAUNCHED (.*)$", done.stdout, re.MULTILINE)[-1]))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """Returns a folder of compiled kernels: both mixers have most of a model's in common."""
    return tmp_path_factory.mktemp("compiled")


class TestGpu:
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("mixer", ["gated_deltanet", "kimi_delta_attention"])
    def test_a_run_launches_what_warmup_notes(self, mixer, data, compiled, tmp_path):
        """Real steps, evaluations and a sample in the emulator; the notes by the stand-in alone."""
        pytest.importorskip("triton", reason="the triton extra is not installed")
        own = {"precision": "bf16", "model__mixer": mixer, "model__layers": 1, "steps": 2}
        own |= {"sample__tokens": 3, "evaluation__final_tokens": 200}
        keys = [*map(str, tiny_run.keys(data, tmp_path / "run", **own))]
        keys = [key for key in keys if key.split("=")[0] not in ("device", "backend")]
        noted = launched(NOTED, keys, compiled)
        assert len(noted) >= 15
        assert launched(RUN, keys, compiled) - noted == set()
        keys = ["model.width=64" if key.startswith("model.width=") else key for key in keys]
        other = launched(NOTED, keys, compiled)
        assert noted - other, "another width has kernels of its own"

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["tiny", "--bench"], "name one thing"),
            ([], "name one thing"),
            (["--bench", "--capability", "9"], "expected a compute capability such as 9.0"),
            (["--bench", "--capability", "7.5"], "7.5 has no card here; there are: 8.0 (A100)"),
            (["--bench", "--case", "x", "--capability", "9.0"], "no case is named 'x'"),
            (["--model", "nowhere", "--capability", "9.0"], "no config.json there"),
            (
                ["tiny", "--capability=9.0", "--processes=2", "distribution.mode=fsdp"],
                "start the run, in which they compile each kernel once",
            ),
            (
                ["tiny", "--capability=9.0", "--processes=2", "distribution.tensor=2"],
                "distribution.tensor=2 distribution.context=1 on 2 processes",
            ),
            (
                ["tiny", "--capability=9.0", "--processes=2", "distribution.context=2"],
                "distribution.tensor=1 distribution.context=2 on 2 processes",
            ),
            (["tiny", "--capability=9.0", "compile=true"], "warm up with compile=false"),
        ],
    )
    def test_impossible_warmups_are_refused(self, arguments, complaint):
        status, _, error = tiny_run.run_command("warmup", *arguments)
        assert status == 2 and complaint in error


class TestLaunchScripts:
    """Stand-ins for programs log their words and AWS's variables. Nothing runs on a chip."""

    FOLDER = Path(warmup.__file__).parents[1] / "launch"

    @pytest.fixture
    def launch(self, tmp_path):
        """Returns a function that runs a launch script:
        the logged words and variables of each command.
        """
        log = tmp_path / "log"
        for name in ("python", "neuron_parallel_compile"):
            program = tmp_path / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(
                f'#!/bin/sh\necho {name} "$@" >> {log}\nenv >> {log}\necho END >> {log}\n'
            )
            program.chmod(0o755)

        def run(script: str, *words: str, **variables: str) -> list[tuple[str, dict[str, str]]]:
            path = f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
            log.unlink(missing_ok=True)
            subprocess.run(
                [self.FOLDER / script, *words],
                env={"PATH": path, **variables},
                check=True,
                timeout=200,
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
    def test_collectives_without_a_barrier_are_refused(self, launch, script, capfd):
        with pytest.raises(subprocess.CalledProcessError):
            launch(script, "tiny", NEURON_RT_DISABLE_EXECUTION_BARRIER="1")
        assert (
            "NEURON_RT_DISABLE_EXECUTION_BARRIER=1 makes collectives wrong"
            in capfd.readouterr().err
        )
        assert len(launch(script, "tiny", NEURON_RT_DISABLE_EXECUTION_BARRIER="0")) == 1

    @pytest.mark.parametrize("script", ["trn1.2xlarge.sh", "trn1.32xlarge.sh"])
    def test_warmup_and_training_get_the_same_variables_and_keys(self, launch, script):
        ((trained, variables),) = launch(script, "tiny", "steps=3", XLA_DOWNCAST_BF16="1")
        ((listed, _),) = launch(script, "warmup", "tiny", "steps=3", "--list")
        (compiled, same), (loaded, again) = launch(script, "warmup", "tiny", "steps=3")
        assert variables == same == again
        assert "XLA_DOWNCAST_BF16" not in variables
        assert variables["NEURON_CC_FLAGS"].split() == [
            "--model-type=transformer",
            "--auto-cast=none",
        ]
        assert variables["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] == "3"
        large = script == "trn1.32xlarge.sh"
        assert ("FI_PROVIDER" in variables) == large
        # slower on Trn2, and for two processes nobody has measured it
        barrier = variables.get("NEURON_RT_ENABLE_HW_EXECUTION_BARRIER")
        assert barrier == ("1" if large else None)
        assert "NEURON_RT_DISABLE_EXECUTION_BARRIER" not in variables
        keys = trained.partition("--or-resume tiny ")[2]
        processes = re.findall(r"--nproc_per_node=(\d+)", trained)[0]
        assert (
            keys and listed == f"python -m train warmup tiny {keys} --list --processes={processes}"
        )
        launcher = trained.partition(" -m train")[0]
        assert loaded == f"{launcher} -m train warmup tiny {keys} --processes={processes}"
        alone = " --num_parallel 1" if script == "trn1.2xlarge.sh" else ""  # 32 GB
        assert compiled == f"neuron_parallel_compile{alone} {loaded}"
        assert variables["XLA_DISABLE_FUNCTIONALIZATION"] == "1", "AWS's own default"
        ((_, asked),) = launch(script, "tiny", XLA_DISABLE_FUNCTIONALIZATION="0")
        assert asked["XLA_DISABLE_FUNCTIONALIZATION"] == "0"
