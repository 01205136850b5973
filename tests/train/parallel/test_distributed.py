"""However many processes share a run, and however they do, it is the same run: loss, norms and weights.

Tolerances. A sum in another order errs by 300 u (tests/tiny_models.py derives it), u = 2^-24 in float32; so
does every gradient, relative to its own size. SGD at a small rate passes a step's error on without growing
it, so that after n steps the weights err by n * 300 u of the way they went.

AdamW divides a gradient by its own size: with a small epsilon entries that are nothing but rounding move as
far as others, and equally honest orders differ by ten times. So it has a large one here, 0.1, which is 0.05
for hidden matrices at twice the base width. An update m / (sqrt(v) + eps) then errs by no more than 2 / eps
of what m and sqrt(v) err by, and is no less than m / (1 + eps), since no entry exceeds the clipped norm, 1:
a relative error grows by 2 (1 + 1 / eps) = 42 at the most. Losses are held against n * 300 u throughout.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from delta_trn.train.parallel.layout import require_divisible
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig
from tests.support import team_run, tiny_run
from tests.support.tiny_run import lines

STEPS = 20
ALLOWED = STEPS * 300 * 2**-24
BATCH: dict[str, Any] = {
    "steps": STEPS,
    "batch.sequences": 8,
    "model.heads": 4,
    "model.width": 32,
    "evaluation.every": 10,
    "evaluation.sequences": 8,
    "checkpoint.every": 20,
    "log.every": 5,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer.name": "sgd", "optimizer.lr": 0.05, "optimizer.momentum": 0.5, "optimizer.clip": 1.0},
    "adamw": {
        "optimizer.name": "adamw",
        "optimizer.lr": 0.02,
        "optimizer.eps": 0.1,
        "optimizer.clip": 1.0,
    },
}
GROWS = {"sgd": 1, "adamw": 42}
# the first in each list is for the default suite
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp-2": (2, {}),
    "ddp-4": (4, {"batch.micro": 1}),
    "fsdp-2": (2, {"distribution.mode": "fsdp", "batch.micro": 2}),
    "fsdp-4": (4, {"distribution.mode": "fsdp"}),
    "zero1-2": (2, {"distribution.mode": "zero1"}),
    "zero1-4": (4, {"distribution.mode": "zero1"}),
    "tensor-2": (2, {"distribution.tensor": 2}),
    "tensor-4": (4, {"distribution.tensor": 4}),
    "tensor-2-fsdp-2": (4, {"distribution.tensor": 2, "distribution.mode": "fsdp"}),
    "context-2": (2, {"distribution.context": 2}),
    "context-4": (4, {"distribution.context": 4}),
    "context-2-fsdp": (4, {"distribution.context": 2, "distribution.mode": "fsdp"}),
}
QUICK = {
    ("ddp-2", "sgd"),
    ("zero1-2", "adamw"),
    ("fsdp-2", "sgd"),
    ("tensor-2", "sgd"),
    ("context-2", "sgd"),
}
EVERY = [
    pytest.param(way, optimizer, marks=[] if (way, optimizer) in QUICK else [pytest.mark.slow])
    for way in WAYS
    for optimizer in OPTIMIZERS
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_run.prepared(tmp_path_factory.mktemp("data"))


def keys(data: Path, out: Path, optimizer: str, changes: dict[str, Any]) -> list[str]:
    given = {**BATCH, **OPTIMIZERS[optimizer], **changes}
    return tiny_run.keys(data, out, **{key.replace(".", "__"): value for key, value in given.items()})


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The run of one process, by optimizer and changes; made once."""
    made: dict[tuple[str, str], Path] = {}

    def run(optimizer: str, **changes: Any) -> Path:
        key = (optimizer, json.dumps(changes))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("alone") / "run"
            dotted = {name.replace("__", "."): value for name, value in changes.items()}
            tiny_run.train("run", "tiny", *keys(data, made[key], optimizer, dotted))
        return made[key]

    return run


def weights(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {k: v for path in folder.glob("model*.safetensors") for k, v in load_file(path).items()}


def apart(found: Path, expected: Path, begin: dict[str, Tensor]) -> float:
    """The largest distance of a parameter from where it should be, relative to the way it went."""
    mine, theirs = weights(found), weights(expected)
    assert mine.keys() == theirs.keys()
    return max(float((mine[n] - w).norm() / (w - begin[n]).norm()) for n, w in theirs.items())


def worst(found: Path, expected: Path, what: str) -> float:
    """The largest relative difference of a number in metrics.jsonl."""
    mine, theirs = lines(found), lines(expected)
    where = [(line["step"], line["split"]) for line in theirs]
    assert [(line["step"], line["split"]) for line in mine] == where
    pairs = [(a[what], b[what]) for a, b in zip(mine, theirs, strict=True) if what in b]
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.fixture(scope="module")
def begin(data, tmp_path_factory) -> dict[str, Tensor]:
    """Weights before the first step: those after a step at a learning rate of 0, which is the warmup's."""
    out = tmp_path_factory.mktemp("begin") / "run"
    tiny_run.train("run", "tiny", *keys(data, out, "sgd", {"steps": 1}))
    return weights(out, 1)


@pytest.mark.parametrize(("way", "optimizer"), EVERY)
def test_it_is_the_run_of_one_process(data, alone, begin, tmp_path, way, optimizer):
    world, changes = WAYS[way]
    team_run.train(
        world, ["run", "tiny", *keys(data, tmp_path / "run", optimizer, changes)], tmp_path / "logs"
    )
    expected = alone(optimizer)
    assert worst(tmp_path / "run", expected, "loss") <= ALLOWED
    assert worst(tmp_path / "run", expected, "grad_norm") <= GROWS[optimizer] * ALLOWED
    assert apart(tmp_path / "run", expected, begin) <= GROWS[optimizer] * ALLOWED


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        pytest.param("sgd", {"data.seed": 0, "batch.sequences": 4}, id="half of the batch"),
        pytest.param("sgd", {"optimizer.clip": 0.5}, id="clipped before the reduction"),
        pytest.param("adamw", {"optimizer.beta2": 0.9}, id="another optimizer"),
    ],
)
def test_another_run_is_not_the_same(data, alone, begin, tmp_path, optimizer, changes):
    """The comparison can fail: what a wrong distribution would compute is outside of the tolerances."""
    tiny_run.train("run", "tiny", *keys(data, tmp_path / "run", optimizer, changes))
    assert worst(tmp_path / "run", alone(optimizer), "loss") > ALLOWED
    assert apart(tmp_path / "run", alone(optimizer), begin) > GROWS[optimizer] * ALLOWED


class TestResume:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("fsdp-2", "ddp-2"),
            pytest.param("tensor-2", "fsdp-4", marks=pytest.mark.slow),
            pytest.param("zero1-4", "tensor-2-fsdp-2", marks=pytest.mark.slow),
            pytest.param("context-2", "zero1-2", marks=pytest.mark.slow),
        ],
    )
    def test_on_another_number_of_processes_and_in_another_way(
        self, data, alone, begin, tmp_path, first, second
    ):
        out = tmp_path / "run"
        world, changes = WAYS[first]
        # stops in the middle as if killed after its checkpoint of step 10; a cosine's length is its own key
        half = {"checkpoint.every": 10, "schedule.decay_steps": STEPS, "steps": 10}
        team_run.train(
            world, ["run", "tiny", *keys(data, out, "sgd", {**changes, **half})], tmp_path / "first"
        )
        world, changes = WAYS[second]
        reset = {"distribution.mode": "ddp", "distribution.tensor": 1, "distribution.context": 1}
        given = [f"{k}={v}" for k, v in {**reset, **changes}.items() if k.startswith("distribution")]
        team_run.train(world, ["resume", out, f"steps={STEPS}", *given], tmp_path / "second")
        expected = alone("sgd")
        assert worst(out, expected, "loss") <= ALLOWED
        assert apart(out, expected, begin) <= ALLOWED


class TestDivides:
    @pytest.mark.parametrize(
        ("world", "changes", "complaint"),
        [
            (3, {}, "batch.sequences=4 cannot be shared by 3"),
            (2, {"batch.micro": "4"}, None),
            (2, {"batch.sequences": "12", "batch.micro": "4"}, "batch.micro=4 does not divide the 6"),
            (2, {"distribution.tensor": "4"}, "start a multiple of 4"),
            (4, {"distribution.tensor": "4"}, "does not divide model.heads=2"),
            (4, {"distribution.tensor": "2"}, "use distribution.mode=fsdp"),
            (2, {"distribution.context": "2", "batch.length": "33"}, "does not divide batch.length=33"),
            (2, {"distribution.context": "2", "batch.length": "4"}, "leaves 2 tokens"),
            (2, {"distribution.context": "2", "model.attention_layers": "1"}, "softmax attention"),
        ],
    )
    def test_or_says_what_does_not(self, world, changes, complaint):
        config = apply(tiny(), changes)
        if complaint is None:
            require_divisible(config, world)
            return
        with pytest.raises(ConfigError, match=complaint):
            require_divisible(config, world)

    def test_one_process_always_does(self):
        require_divisible(tiny(), 1)


def tiny() -> RunConfig:
    from delta_trn.train.recipes import recipe

    return recipe("tiny")


def test_channels_come_back_in_order():
    from delta_trn.train.parallel.heads import channels

    order = channels((8, 8, 16), 2)
    assert order.tolist()[:16] == [0, 1, 2, 3, 8, 9, 10, 11, *range(16, 24)]
    whole = torch.arange(32)
    assert torch.equal(whole[order][order.argsort()], whole)
