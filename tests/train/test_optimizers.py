"""The schedule, the parameter groups, and both update rules against the same rules written out
in float64.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from delta_trn.backends.parity.judge import error
from delta_trn.models.mup import OPTIMIZERS, Role
from delta_trn.models.parameters import ScaledParameter
from delta_trn.train.data.loader import Batch
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.recipes import recipe
from delta_trn.train.run.model import make_model, model_config
from delta_trn.train.run.muon import Muon
from delta_trn.train.run.optimizer import (
    learning_rate,
    make_optimizer,
    rows,
    set_learning_rate,
)
from delta_trn.train.run.step import TrainingStep, loss_function
from delta_trn.train.settings.errors import CheckpointError, ConfigError
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig
from tests.support.tiny_run import ONE_SUM, SPREAD

CPU = torch.device("cpu")


def config(**changes: object) -> RunConfig:
    return apply(recipe("tiny"), {k.replace("__", "."): str(v) for k, v in changes.items()})


def build_model(c: RunConfig):
    return make_model(model_config(c, rows=320, bos=256, eos=257, pad=258), seed=c.seed, device=CPU)


def batch(seed: int, sequences: int = 4) -> Batch:
    tokens = torch.randint(0, 256, (sequences, 17), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def test_the_rate_of_each_role_is_multiplied_by_its_key():
    keys = {"embedding_lr": 2.0, "readout_lr": 3.0, "gate_lr": 5.0, "scalar_lr": 7.0,
            "vector_lr": 11.0}  # fmt: skip
    expected = {
        "model.embed.weight": 2.0,
        "lm_head.weight": 3.0,
        "model.blocks.0.mixer.q_proj.weight": 1.0,
        "model.blocks.0.mixer.a_proj.weight": 5.0,
        "model.blocks.0.mixer.A_log": 7.0,
        "model.blocks.0.mixer.dt_bias": 7.0,
        "model.blocks.0.mixer.conv.weight": 11.0,
        "model.norm.weight": 11.0,
    }
    changes = {"model__tie_word_embeddings": False}
    with_keys = changes | {f"optimizer__{key}": factor for key, factor in keys.items()}
    factors = []
    for c in (config(**changes), config(**with_keys)):
        optimizer = make_optimizer(Sharding(build_model(c)), c)
        factors.append(
            {name: group["factor"] for group in optimizer.param_groups for name in group["names"]}
        )
    one, several = factors
    assert {name: several[name] / one[name] for name in expected} == pytest.approx(expected)


def test_epsilon_and_decay_of_every_group_match_the_scaling_table():
    """Here m = 4. Epsilon scales as the gradient's entries: 1/m, and 1/sqrt(m) for gates and
    scalars.

    Decay applies to matrices only, and falls with their rate. arXiv:2606.04048 does not scale
    epsilon.
    """
    c = config(
        model__width=64, model__base_width=16, optimizer__eps=1e-6, optimizer__weight_decay=0.2
    )
    expected = {
        "model.embed.weight": (1 / 4, 0.0, 1.0),
        "model.blocks.0.mixer.q_proj.weight": (1 / 4, 0.2, 1 / 4),
        # 192 inputs, and 64 at the base width
        "model.blocks.0.mlp.down_proj.weight": (1 / 3, 0.2, 1 / 3),
        "model.blocks.0.mixer.a_proj.weight": (1 / 2, 0.2, 1 / 4),
        "model.blocks.0.mixer.b_proj.weight": (1 / 2, 0.2, 1 / 4),
        "model.blocks.0.mixer.dt_bias": (1 / 2, 0.0, 1.0),
        "model.blocks.0.mixer.A_log": (1 / 2, 0.0, 1.0),
        "model.blocks.0.mixer.conv.weight": (1 / 4, 0.0, 1.0),
        "model.norm.weight": (1 / 4, 0.0, 1.0),
    }
    model = build_model(c)
    for independent in (False, True):
        changed = apply(c, {"optimizer.independent_weight_decay": str(independent).lower()})
        optimizer = make_optimizer(Sharding(model), changed)
        groups = {name: group for group in optimizer.param_groups for name in group["names"]}
        for name, (epsilon, decay, factor) in expected.items():
            group = groups[name]
            assert group["eps"] == pytest.approx(1e-6 * epsilon), name
            assert group["weight_decay"] == pytest.approx(
                decay / factor if independent else decay
            ), name
            assert group["factor"] == pytest.approx(factor), name
    sp = make_optimizer(Sharding(build_model(c)), apply(c, {"parametrization": "sp"}))
    assert sp.param_groups[0]["eps"] == pytest.approx(1e-6 * 1 / 4), "the model decides the table"


class TestSchedule:
    C = config(steps=100, schedule__warmup=10, optimizer__lr=0.5, schedule__min_lr=0.1)

    def test_learning_rate_warms_up_linearly_from_zero(self):
        assert [learning_rate(self.C, i) for i in (0, 1, 5)] == [0.0, 0.05, 0.25]

    def test_learning_rate_follows_a_cosine_from_peak_to_min_lr(self):
        assert learning_rate(self.C, 10) == pytest.approx(0.5)
        # halfway down, at the mean of both ends
        assert learning_rate(self.C, 55) == pytest.approx(0.3)
        assert learning_rate(self.C, 10 + 30) == pytest.approx(
            0.1 + 0.2 * (1 + math.cos(math.pi / 3))
        )
        assert learning_rate(self.C, 100) == learning_rate(self.C, 10_000) == 0.1

    def test_decay_steps_replaces_steps_as_the_end_of_the_cosine(self):
        c = config(steps=100, schedule__warmup=10, schedule__decay_steps=50, schedule__min_lr=0.001)
        assert learning_rate(c, 30) == pytest.approx((c.optimizer.lr + 0.001) / 2)
        assert learning_rate(c, 50) == learning_rate(c, 99) == 0.001 < c.optimizer.lr


class TestGroups:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_parameter_groups_partition_the_parameters_and_scale_their_rates(self, name):
        c = config(optimizer__name=name, optimizer__weight_decay=0.1)
        model = build_model(c)
        optimizer = make_optimizer(Sharding(model), c)
        placed = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(placed)
        assert set(placed) == {id(p) for p in model.parameters()}
        set_learning_rate(optimizer, 0.25)
        for row in rows(model, c):
            group = placed[id(row.parameter)]
            assert group["lr"] == pytest.approx(0.25 * row.lr / c.optimizer.lr)
            assert group["weight_decay"] == row.weight_decay


def update_adamw(p: Tensor, grads: list[Tensor], row: ScaledParameter, c: RunConfig) -> Tensor:
    """Applies Loshchilov and Hutter's AdamW, whose decay is separate from the moments."""
    o = c.optimizer
    p, m, v = p.double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()
    for t, g in enumerate((g.double() for g in grads), start=1):
        p = p * (1 - row.lr * row.weight_decay)
        m = o.beta1 * m + (1 - o.beta1) * g
        v = o.beta2 * v + (1 - o.beta2) * g * g
        p = p - row.lr * (m / (1 - o.beta1**t)) / (
            (v / (1 - o.beta2**t)).sqrt() + row.epsilon * o.eps
        )
    return p


def update_muon(p: Tensor, grads: list[Tensor], row: ScaledParameter, c: RunConfig) -> Tensor:
    """Applies Muon to each head's block of a hidden matrix, AdamW to all else.

    O is about U V^T by the quintic of arXiv:2502.16982: each singular value s becomes a s + b s^3 +
    c s^5, five times, here by singular values and not by products of matrices.
    """
    if row.role is not Role.HIDDEN:
        return update_adamw(p, grads, row, c)
    if row.tag.of_columns:
        flat = update_muon(
            p.T, [g.T for g in grads], replace(row, tag=replace(row.tag, of_columns=False)), c
        )
        return flat.T
    mu, heads = c.optimizer.momentum, row.tag.heads
    p, u = p.double().clone(), torch.zeros_like(p).double()
    for g in (g.double() for g in grads):
        u = mu * u + g
        p *= 1 - row.lr * row.weight_decay
        for block, direction in zip(p.chunk(heads), (g + mu * u).chunk(heads), strict=True):
            left, s, right = torch.linalg.svd(direction, full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            block -= row.lr * 0.2 * max(block.shape) ** 0.5 * (left * s) @ right
    return p


def update_sgd(p: Tensor, grads: list[Tensor], row: ScaledParameter, c: RunConfig) -> Tensor:
    """Applies PyTorch's Nesterov momentum: buffer u <- mu u + g, step lr (g + mu u)."""
    mu = c.optimizer.momentum
    p, u = p.double(), torch.zeros_like(p).double()
    for g in (g.double() for g in grads):
        g = g + row.weight_decay * p
        u = mu * u + g
        p = p - row.lr * (g + mu * u)
    return p


@pytest.mark.parametrize(
    ("name", "rule"), [("adamw", update_adamw), ("sgd", update_sgd), ("muon", update_muon)]
)
def test_optimizer_updates_match_the_rule_written_out_in_float64(name, rule):
    # an epsilon that matters, at twice the base width, where its factor is not 1
    epsilon = {} if name == "sgd" else {"optimizer.eps": 0.1}
    c = config(optimizer__name=name, optimizer__lr=0.03, optimizer__weight_decay=0.1, **epsilon)
    # each of Muon's five steps multiplies the rounding of a small singular value by 3.4
    growth = 3.4445**5 if name == "muon" else 1.0
    model = build_model(c)
    optimizer = make_optimizer(Sharding(model), c)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    grads = {
        n: [torch.randn(p.shape, generator=generator) for _ in range(4)] for n, p in start.items()
    }
    set_learning_rate(optimizer, c.optimizer.lr)
    for i in range(4):
        for n, p in model.named_parameters():
            p.grad = grads[n][i].clone()
        optimizer.step()
    moved = 0
    for row in rows(model, c):
        expected = rule(start[row.name], grads[row.name], row, c)
        # float32 rounding of four steps, each a handful of operations
        scale = max(expected.abs().max().item(), 1.0)
        bound = 64 * 2**-24 * scale * (growth * 0.03 if row.role is Role.HIDDEN else 1)
        assert (row.parameter.double() - expected).abs().max() < bound, row.name
        moved += int(not torch.equal(row.parameter, start[row.name]))
    assert moved == len(start)


def test_muons_update_of_a_packed_projection_is_that_of_its_parts_alone():
    """A part is a head's rows of q, k, v and the gate, or its columns of the output,
    as a parameter.
    """
    c = config(optimizer__name="muon", optimizer__weight_decay=0.1)
    model = build_model(c)
    optimizer = make_optimizer(Sharding(model), c)
    set_learning_rate(optimizer, 0.1)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    generator, mixer = torch.Generator().manual_seed(0), model.model.blocks[0].mixer
    expected, allowed = {}, {}
    for name in ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"):
        p = getattr(mixer, name).weight
        p.grad = torch.randn(p.shape, generator=generator)
        group, dim = groups[id(p)], 1 if name == "o_proj" else 0
        assert group["heads"] == 2 and group["of_columns"] == bool(dim)
        parts = [torch.nn.Parameter(part.clone()) for part in p.detach().chunk(2, dim)]
        for part, grad in zip(parts, p.grad.chunk(2, dim), strict=True):
            part.grad = grad.clone()
        nudged = [torch.nn.Parameter(part.detach().clone()) for part in parts]
        for part, control in zip(parts, nudged, strict=True):
            noise = torch.randn(part.shape, generator=generator).sign()
            control.grad = part.grad * (1 + 2**-23 * noise)
        for each in (parts, nudged):
            Muon([{**group, "params": each, "heads": 1, "of_columns": False}]).step()
        expected[name] = torch.cat([part.detach() for part in parts], dim)
        # what one rounding of the gradients changes
        allowed[name] = SPREAD * (torch.cat(nudged, dim) - expected[name]).abs().max()
        whole = torch.nn.Parameter(p.detach().clone())
        whole.grad = p.grad.clone()
        Muon([{**group, "params": [whole], "heads": 1, "of_columns": False}]).step()
        assert (whole - expected[name]).abs().max() > 1e-3, (
            "without blocks the update would be another"
        )
    optimizer.step()
    for name, parts in expected.items():
        assert (getattr(mixer, name).weight - parts).abs().max() <= allowed[name] < 1e-4, name


def test_muon_is_refused_where_matrices_are_divided():
    with pytest.raises(ConfigError, match="muon needs whole matrices on every process"):
        config(optimizer__name="muon", distribution__mode="fsdp")


def build_step(c: RunConfig, micro: int = 4, clip: float | None = None):
    model = build_model(c)
    sharding = Sharding(model)
    optimizer = make_optimizer(sharding, c)
    return model, TrainingStep(
        loss_function(model, c, CPU), optimizer, sharding, micro=micro, clip=clip
    )


class TestStep:
    @pytest.mark.parametrize("micro", [1])
    def test_gradient_accumulation_gives_the_gradients_of_the_whole_batch(self, micro):
        c = config()
        results = {}
        for size in (4, micro):
            model, step = build_step(c, size)
            loss, norm = step(batch(0), 0.0)
            results[size] = (
                loss.item(),
                norm.item(),
                {n: p.grad.clone() for n, p in model.named_parameters()},
            )
        (loss, norm, grads), (loss_m, norm_m, grads_m) = results[4], results[micro]
        # sums of the same terms in another order
        assert loss_m == pytest.approx(loss, rel=ONE_SUM) and norm_m == pytest.approx(
            norm, rel=ONE_SUM
        )
        for n in grads:
            assert error(grads_m[n], grads[n]) <= ONE_SUM, n

    def test_the_loss_is_the_mean_over_all_micro_batches_not_the_last(self):
        c = config()
        model, step = build_step(c, 1)
        inputs, targets = batch(1)[:2]
        with torch.no_grad():
            parts = [model.loss(inputs[i : i + 1], targets[i : i + 1]).item() for i in range(4)]
        loss, _ = step(batch(1), 0.0)
        assert loss.item() == pytest.approx(sum(parts) / 4, rel=ONE_SUM)
        assert abs(loss.item() - parts[-1]) > 1e-4

    def test_clipping_scales_the_whole_gradient_and_reports_the_norm_before_it(self):
        c = config()
        model, step = build_step(c, 4, clip=0.01)
        free_model, free = build_step(c, 4)
        _, norm = step(batch(2), 0.0)
        _, free_norm = free(batch(2), 0.0)
        assert norm.item() == free_norm.item() > 0.02
        total = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
        assert total == pytest.approx(0.01, rel=ONE_SUM)
        for p, q in zip(model.parameters(), free_model.parameters(), strict=True):
            assert error(p.grad, q.grad * (0.01 / norm)) <= ONE_SUM

    def test_gradients_are_clipped_by_a_norm_that_does_not_depend_on_width_if_asked(self):
        """The plain norm falls with width: embedding, gains and taps have d entries of 1 / d."""
        slopes = {}
        for name in ("global", "width"):
            norms = []
            for width in (32, 128):
                sizes = {"model__width": width, "model__base_width": 32}
                c = config(optimizer__clip_norm=name, optimizer__clip=0.01, **sizes)
                model, step = build_step(c, clip=0.01)
                before = step(batch(2), 0.0)[1].item()
                weights = {row.name: row.clip if name == "width" else 1.0 for row in rows(model, c)}
                squares = [weights[n] * p.grad.square().sum() for n, p in model.named_parameters()]
                assert math.sqrt(sum(squares)) == pytest.approx(0.01, rel=ONE_SUM), (
                    "that norm is the limit"
                )
                norms.append(before)
            slopes[name] = math.log(norms[1] / norms[0]) / math.log(4)
        assert slopes["global"] < -0.2 and abs(slopes["width"]) < 0.1

    def test_bf16_keeps_weights_gradients_and_optimizer_state_in_float32(self):
        c = config(precision="bf16")
        model, step = build_step(c, 4, clip=1.0)
        loss, _ = step(batch(3), 0.01)
        assert loss.dtype == torch.float32
        kept = [*model.parameters(), *(p.grad for p in model.parameters())]
        kept += [v for s in step.optimizer.state.values() for v in s.values()]
        assert {t.dtype for t in kept} == {torch.float32}


class TestState:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_optimizer_state_survives_a_round_trip_bit_for_bit(self, name):
        c = config(optimizer__name=name)
        model, step = build_step(c, clip=1.0)
        for seed in range(3):
            step(batch(seed), 0.01)
        saved = {k: v.clone() for k, v in Sharding(model).slots(step.optimizer).items()}
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}

        other, second = build_step(c, clip=1.0)
        other.load_state_dict(weights, strict=False)
        Sharding(other).load_slots(second.optimizer, saved)
        step(batch(9), 0.01)
        second(batch(9), 0.01)
        for (n, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), n
        slots, expected = (
            Sharding(other).slots(second.optimizer),
            Sharding(model).slots(step.optimizer),
        )
        assert all(torch.equal(v, slots[k]) for k, v in expected.items())

    def test_optimizer_state_of_another_model_is_refused(self):
        c = config()
        model, step = build_step(c, clip=1.0)
        step(batch(0), 0.1)
        saved = Sharding(model).slots(step.optimizer)
        other = build_model(c)
        missing = {
            k: v for k, v in saved.items() if not k.startswith(next(iter(saved)).rpartition("/")[0])
        }
        with pytest.raises(CheckpointError, match="of another model: 1 parameters differ"):
            Sharding(other).load_slots(make_optimizer(Sharding(other), c), missing)
