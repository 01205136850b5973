"""Training through torch_xla on its CPU device: the same losses, one graph per step, nothing on the
host.

torch_xla needs an older PyTorch, so `make test-xla` runs these tests in their own environment.
Elsewhere only those that need no torch_xla run.
"""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from delta_trn.backends import default_backend, gated_delta_rule, machine
from delta_trn.train.neuron import reduction
from delta_trn.train.neuron.sharding import NeuronSharding
from delta_trn.train.parallel import pytorch
from delta_trn.train.parallel import sharding as whole
from delta_trn.train.parallel.team import Team
from delta_trn.train.recipes import recipe
from delta_trn.train.run import loop
from delta_trn.train.run.model import checkpoint_blocks, make_model, model_config
from delta_trn.train.run.optimizer import make_optimizer
from delta_trn.train.run.step import TrainingStep
from delta_trn.train.settings.overrides import apply
from tests.support import published, tiny_run

needs_xla = pytest.mark.skipif(
    find_spec("torch_xla") is None,
    reason="torch_xla is not installed here; make test-xla makes an environment that has it",
)
STEPS = 6
CHANGES = {
    "backend": "chunked",
    "precision": "float32",
    "steps": STEPS,
    "evaluation.every": STEPS // 2,
    "evaluation.sequences": 6,
    "batch.micro": 2,
    "sample.tokens": 4,
    "model.layers": 1,
    "log.every": 3,
}


def fallbacks():
    """Counts the calls of ATen operations that XLA could not compile; each waits for the device."""
    metrics = import_module("torch_xla.debug.metrics")
    return {
        name: metrics.counter_value(name)
        for name in metrics.counter_names()
        if name.startswith("aten::")
    }


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Runs the same training on both devices, with two micro-batches per step, evaluated and
    sampled twice.

    Returns the metrics per device, XLA's compilations in every step and evaluation, operations that
    ran on the host, and the folder of XLA's run.
    """
    folder = tmp_path_factory.mktemp("runs")
    counts = {"step": [], "evaluate": []}
    device = ""

    def count(name, work):
        def wrapped(*arguments):
            before = machine.compilations() if device == "xla" else 0
            result = work(*arguments)
            if device == "xla":
                counts[name].append(machine.compilations() - before)
            return result

        return wrapped

    lines = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "__call__", count("step", TrainingStep.__call__))
        patch.setattr(loop, "evaluate", count("evaluate", loop.evaluate))
        # autograd's engine counts devices at the first backward pass: torch_xla has to be there
        # before it
        for device in ("xla", "cpu"):
            out = folder / device
            tiny_run.train("run", "tiny", *tiny_run.keys(data, out, **CHANGES, device=device))
            lines[device] = tiny_run.read_metrics(out)
    return lines, counts, fallbacks(), folder / "xla"


@pytest.fixture(scope="module")
def rounding(data, runs, tmp_path_factory):
    """Returns a function: how far rounding alone may move a metric of the run on the CPU."""
    folder, controls = runs[3].parent, []
    for seed in range(3):
        out = tmp_path_factory.mktemp("control") / "run"
        with tiny_run.nudge_weights(seed):
            tiny_run.train("run", "tiny", *tiny_run.keys(data, out, **CHANGES, device="cpu"))
        controls.append(out)
    return lambda metric: tiny_run.tolerance(
        [tiny_run.metric_distance(out, folder / "cpu", metric) for out in controls]
    )


@needs_xla
class TestRun:
    @pytest.mark.parametrize("what", ["loss", "grad_norm"])
    def test_a_run_on_xla_has_the_losses_and_norms_of_eager_pytorch(self, runs, rounding, what):
        lines, *_, folder = runs
        assert sum(what in line for line in lines["cpu"]) >= STEPS
        assert tiny_run.metric_distance(folder, folder.parent / "cpu", what) <= rounding(what)

    def test_losses_of_consecutive_steps_differ_by_more_than_the_tolerance(self, runs, rounding):
        losses = [line["loss"] for line in runs[0]["cpu"]]
        assert losses[1] != pytest.approx(losses[2], rel=10 * rounding("loss"))

    def test_xla_compiles_nothing_after_the_second_step(self, runs):
        """A micro-batch is a graph, the first adds to no gradient.
        AdamW has state from the second step.
        """
        steps = runs[1]["step"]
        assert len(steps) == STEPS and max(steps) <= 3, steps
        assert sum(steps[:2]) > 0 and not any(steps[2:]), steps

    def test_xla_compiles_nothing_for_the_second_evaluation(self, runs):
        first, second = runs[1]["evaluate"]
        assert first > 0 and second == 0, runs[1]

    def test_no_operation_of_a_run_on_xla_falls_back_to_the_host(self, runs):
        """Only `item` does, which fetches finished numbers some steps later."""
        assert set(runs[2]) <= {"aten::_local_scalar_dense"}, runs[2]

    def test_a_checkpoint_of_a_run_on_xla_resumes_on_the_cpu(self, runs):
        tiny_run.train("resume", runs[3], f"steps={STEPS + 2}", "device=cpu", "backend=chunked")
        assert tiny_run.read_metrics(runs[3])[-1]["step"] == STEPS + 2

    def test_a_checkpoint_of_a_run_on_xla_has_the_position_of_a_run_on_the_cpu(self, runs):
        """On XLA a thread has read further by then, batches that no step has taken."""
        folder = runs[3]
        positions = [
            json.loads((out / "checkpoints" / f"step-{STEPS:08d}" / "state.json").read_bytes())[
                "position"
            ]
            for out in (folder, folder.parent / "cpu")
        ]
        assert positions[0] == positions[1]


@needs_xla
class TestReduction:
    """XLA_ALWAYS_ALLREDUCE records collectives also for one process,
    over which they return what they get.
    """

    @pytest.mark.parametrize(("most", "checkpoints"), [(2**30, False), (4096, True)])
    def test_a_steps_graph_has_one_all_reduce_for_each_bucket_and_no_ddp(
        self, most, checkpoints, monkeypatch
    ):
        """With many buckets blocks are computed twice,
        which torch's own checkpoint cannot do on XLA.
        """
        from torch_xla import _XLAC

        monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")
        monkeypatch.setattr(pytorch, "DistributedDataParallel", None)
        config = apply(
            recipe("tiny"), {"model.layers": "1", "optimizer.lr": "0.01", "optimizer.clip": "0.01"}
        )
        tokens = torch.arange(32).reshape(2, 16) % 7
        gradients = []
        for device in (machine.pick("xla"), torch.device("cpu")):
            model = make_model(model_config(config, rows=8), seed=0, device=device)
            alone = device.type == "cpu"
            if checkpoints and not alone:
                checkpoint_blocks(model, device)
                model.train()
            # of these two processes the other has no text, and a gradient of 0
            team = Team() if alone else Team(world=2, mesh=object())  # type: ignore[arg-type]
            sharding = (
                whole.Sharding(model) if alone else NeuronSharding(model, config.distribution, team)
            )
            sharding._bucket = most  # type: ignore[attr-defined]
            optimizer = make_optimizer(sharding, config)
            with default_backend("chunked"):
                sharding.loss(tokens.to(device), (tokens + 1).to(device)).backward()
                norm = sharding.step(optimizer, config.optimizer.clip)
            parameters = [p for _, p in whole.named_parameters(optimizer) if p.grad is not None]
            if not alone:
                graph = _XLAC._get_xla_tensors_hlo([*parameters, norm])
                count = len(list(reduction.buckets([p.grad for p in parameters], most)))
                assert graph.count(" all-reduce(") == count > (0 if most > 4096 else 5)
                assert "replica_groups={}" in graph
                machine.synchronize(device)
            gradients.append((norm.cpu(), [p.grad.cpu() for p in parameters]))
        (half, clipped), (norm, expected) = gradients
        assert abs(2 * half - norm) <= 300 * 2**-24 * norm
        for a, b in zip(clipped, expected, strict=True):  # both are clipped to one norm
            assert (a - b).norm() <= 300 * 2**-24 * b.norm() + 1e-9


@needs_xla
def test_the_published_signatures_are_those_of_the_installed_torch_xla():
    assert published.differences(published.XLA) == []


SPLITTING = """
import torch
from delta_trn.backends import machine
from delta_trn.models.layers import consecutive_parts

x = torch.arange(24.0).view(2, 3, 4)
for dim, sizes in ((-1, (1, 3)), (1, (2, 1)), (0, (1, 1)), (2, (4,)), (2, (0, 4))):
    on_xla = x.to(machine.pick("xla")).requires_grad_()
    parts = consecutive_parts(on_xla, sizes, dim)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(parts, x.split(sizes, dim), strict=True)), (dim, sizes)
    sum((i + 1) * part.sum() for i, part in enumerate(parts)).backward()
    here = x.clone().requires_grad_()
    sum((i + 1) * part.sum() for i, part in enumerate(here.split(sizes, dim))).backward()
    assert torch.equal(on_xla.grad.cpu(), here.grad), (dim, sizes)
print(torch.equal(x.to(machine.pick("xla")).split((1, 3), -1)[0].cpu(), x.split((1, 3), -1)[0]))
"""


@needs_xla
def test_parts_of_channels_are_right_without_functionalization():
    """torch-neuronx switches it off. torch's own split is wrong then (pytorch/xla issue 8640)."""
    process = subprocess.run(
        [sys.executable, "-c", SPLITTING],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_DISABLE_FUNCTIONALIZATION": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert process.stdout == "False\n", process.stderr


@needs_xla
class TestGatedDeltaRule:
    def compute(self, **options):
        """Returns outputs and gradients on XLA and on the CPU."""
        generator = torch.Generator().manual_seed(0)
        # two chunks and a part of one; grouped heads; V is not K
        B, T, H, HV, K, V = (2, 70, 1, 2, 8, 16)
        tensors = [torch.randn(B, T, H, K, generator=generator) for _ in range(2)]
        tensors.append(torch.randn(B, T, HV, V, generator=generator))
        tensors += [
            -torch.rand(B, T, HV, generator=generator),
            torch.rand(B, T, HV, generator=generator),
        ]
        tensors.append(torch.randn(B, HV, K, V, generator=generator))
        results = []
        for device in (machine.pick("xla"), torch.device("cpu")):
            inputs = [x.detach().to(device).requires_grad_() for x in tensors]
            *five, state = inputs
            o, final = gated_delta_rule(
                *five, initial_state=state, output_final_state=True, backend="chunked", **options
            )
            ((o**2).sum() + (final**2).sum()).backward()
            results.append([x.detach().cpu() for x in (o, final, *(x.grad for x in inputs))])
        return results

    def test_delta_rule_outputs_and_gradients_on_xla_equal_those_on_the_cpu(self):
        """The norm of q and k is included. The graph without it is a part of this one."""
        xla, cpu = self.compute(use_qk_l2norm_in_kernel=True, scale=0.1)
        for a, b in zip(xla, cpu, strict=True):
            assert (a - b).norm() <= 300 * 2**-24 * b.norm()


@needs_xla
def test_compilations_count_a_new_shape():
    device = machine.pick("xla")
    counts = []
    for size in (3, 3, 4):
        torch.ones(size, device=device).mul(2).cumsum(0)
        (torch.ones(size).to(device) * 2.5).sum().item()
        counts.append(machine.compilations())
    assert counts[0] == counts[1] < counts[2]


@needs_xla
def test_fallbacks_count_an_operation_on_the_host():
    L = torch.eye(4, device=machine.pick("xla"))
    torch.linalg.solve_triangular(L, L, upper=False)
    assert any("solve_triangular" in name for name in fallbacks())
