"""Training through torch_xla, on its CPU device: the same curve, one graph a step, nothing on the host.

torch_xla needs an older PyTorch, so `make test-xla` runs these in an environment of their own; elsewhere only
what needs no torch_xla runs.
"""

from importlib.util import find_spec

import pytest
import torch

from delta_trn.backends import gated_delta_rule, machine
from delta_trn.backends.gated_delta_rule.triangular import merged_inverse, triangular_inverse
from tests.support import tiny_run

needs_xla = pytest.mark.skipif(
    find_spec("torch_xla") is None,
    reason="torch_xla is not installed here; make test-xla makes an environment that has it",
)
STEPS = 6
# a sum in another order errs by 300 u (tests/tiny_models.py), and so does each step's gradient
ALLOWED = STEPS * 300 * 2**-24


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run on both devices, in two micro-batches a step, evaluated and sampled twice.

    Lines of metrics, and XLA's compilations after every step, evaluation and sample.
    """
    from delta_trn.train.run import loop
    from delta_trn.train.run.step import TrainingStep

    folder = tmp_path_factory.mktemp("runs")
    data = tiny_run.prepare_data(folder)
    counts = {"step": [], "evaluate": [], "sample": []}
    device = ""

    def counted(kind, work):
        def wrapped(*arguments):
            before = machine.compilations() if device == "xla" else 0
            found = work(*arguments)
            if device == "xla":
                counts[kind].append(machine.compilations() - before)
            return found

        return wrapped

    lines = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "__call__", counted("step", TrainingStep.__call__))
        patch.setattr(loop, "evaluate", counted("evaluate", loop.evaluate))
        patch.setattr(loop, "continue_text", counted("sample", loop.continue_text))
        # autograd's engine counts devices at the first backward pass: torch_xla has to be there before it
        for device in ("xla", "cpu"):
            out = folder / device
            changes = {"device": device, "backend": "chunked", "precision": "float32", "steps": STEPS}
            changes |= {"evaluation.every": STEPS // 2, "evaluation.sequences": 6, "batch.micro": 2}
            changes |= {"sample.tokens": 4, "model.layers": 1, "log.every": 3}
            renamed = {key.replace(".", "__"): value for key, value in changes.items()}
            tiny_run.train("run", "tiny", *tiny_run.keys(data, out, **renamed))
            lines[device] = tiny_run.read_metrics(out)
    return lines, counts, machine.fallbacks(), folder / "xla"


@needs_xla
class TestRun:
    @pytest.mark.parametrize("what", ["loss", "grad_norm"])
    def test_it_is_the_run_of_eager_pytorch(self, runs, what):
        lines, *_ = runs
        pairs = [(a[what], b[what]) for a, b in zip(lines["xla"], lines["cpu"], strict=True) if what in b]
        assert len(pairs) >= STEPS
        for mine, theirs in pairs:
            assert mine == pytest.approx(theirs, rel=ALLOWED)

    def test_the_comparison_can_fail(self, runs):
        losses = [line["loss"] for line in runs[0]["cpu"]]
        assert losses[1] != pytest.approx(losses[2], rel=ALLOWED)

    def test_nothing_is_compiled_after_the_second_step(self, runs):
        """A step is one graph, its two micro-batches in it. AdamW has its memory from the second step on."""
        steps = runs[1]["step"]
        assert len(steps) == STEPS and max(steps) == 1, steps
        assert sum(steps[:2]) > 0 and not any(steps[2:]), steps

    @pytest.mark.parametrize("kind", ["evaluate", "sample"])
    def test_nor_by_the_second_evaluation_and_sample(self, runs, kind):
        first, second = runs[1][kind]
        assert first > 0 and second == 0, runs[1]

    def test_no_operation_runs_on_the_host(self, runs):
        """`item` is how the finished numbers are fetched, some steps later."""
        assert set(runs[2]) <= {"aten::_local_scalar_dense"}, runs[2]

    def test_its_checkpoint_continues_on_the_cpu(self, runs):
        tiny_run.train("resume", runs[3], f"steps={STEPS + 2}", "device=cpu", "backend=chunked")
        assert tiny_run.read_metrics(runs[3])[-1]["step"] == STEPS + 2


@needs_xla
class TestGatedDeltaRule:
    def both(self, **options):
        """Outputs and gradients on the CPU and on XLA."""
        generator = torch.Generator().manual_seed(0)
        B, T, H, HV, K, V = 2, 70, 1, 2, 8, 16  # two chunks and a piece; heads that group; V is not K
        given = [torch.randn(B, T, H, K, generator=generator) for _ in range(2)]
        given.append(torch.randn(B, T, HV, V, generator=generator))
        given += [-torch.rand(B, T, HV, generator=generator), torch.rand(B, T, HV, generator=generator)]
        given.append(torch.randn(B, HV, K, V, generator=generator))
        found = []
        for device in (machine.pick("xla"), torch.device("cpu")):
            inputs = [x.detach().to(device).requires_grad_() for x in given]
            *five, state = inputs
            o, final = gated_delta_rule(
                *five, initial_state=state, output_final_state=True, backend="chunked", **options
            )
            ((o**2).sum() + (final**2).sum()).backward()
            found.append([x.detach().cpu() for x in (o, final, *(x.grad for x in inputs))])
        return found

    def test_forward_and_backward_are_those_of_the_cpu(self):
        """With the norm of q and k inside: without it the graph is a part of this one, and takes as long."""
        mine, theirs = self.both(use_qk_l2norm_in_kernel=True, scale=0.1)
        for a, b in zip(mine, theirs, strict=True):
            assert (a - b).norm() <= 300 * 2**-24 * b.norm()


@needs_xla
def test_a_new_shape_is_counted():
    device = machine.pick("xla")
    counts = []
    for size in (3, 3, 4):
        torch.ones(size, device=device).mul(2).cumsum(0)
        (torch.ones(size).to(device) * 2.5).sum().item()
        counts.append(machine.compilations())
    assert counts[0] == counts[1] < counts[2]


@needs_xla
def test_an_operation_on_the_host_is_counted():
    L = torch.eye(4, device=machine.pick("xla"))
    torch.linalg.solve_triangular(L, L, upper=False)
    assert any("solve_triangular" in name for name in machine.fallbacks())


class TestMergedInverse:
    @pytest.mark.parametrize("C", [1, 2, 16, 64])
    @pytest.mark.parametrize("kind", ["random", "equal keys"])
    def test_it_errs_no_more_than_substitution(self, C, kind):
        generator = torch.Generator().manual_seed(C)
        if kind == "random":
            L = torch.randn(4, C, C, generator=generator, dtype=torch.float64) / C**0.5
        else:
            L = torch.full((4, C, C), 2.0, dtype=torch.float64)  # beta = 2: powers of L reach 8e28
        judge = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + L.tril(-1))

        def error(found: torch.Tensor) -> float:
            return float((found.double() - judge).norm() / judge.norm())

        honest = error(triangular_inverse(L.float()))
        assert error(merged_inverse(L.float())) <= 2 * honest + 2**-24
        assert error(merged_inverse(2 * L.float())) > 2 * honest + 2**-24 or C == 1
