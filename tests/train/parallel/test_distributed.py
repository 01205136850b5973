"""However many processes share a run, and however they do, it is the same run: loss, norms and weights.

Tolerances come from controls in the same test run. One process trains on the same batches cut into micro-
batches of other sizes: the same mathematics, summed in another order. How far these runs end from each
other is what rounding does to this run on this CPU. A distributed run may end SPREAD times as far from
the run of one process.

Three orders are a small sample: on three instruction sets (ATEN_CPU_CAPABILITY default, avx2 and avx512),
nine other orders came out at up to 2.9 times the largest of the three. What a wrong distribution would
compute is off by thousands of times as much; `test_another_run_is_not_the_same` shows it.

AdamW has a large epsilon, because it divides a gradient by its own size: with a small one, entries that
are nothing but rounding move as far as others.
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
from tests.support.tiny_run import read_metrics

STEPS = 20
SPREAD = 8
ORDERS = (4, 2, 1)  # sequences of a micro-batch
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
    return tiny_run.prepare_data(tmp_path_factory.mktemp("data"))


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
    mine, theirs = read_metrics(found), read_metrics(expected)
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


def distances(run: Path, expected: Path, begin: dict[str, Tensor] | None = None) -> dict[str, float]:
    """How far a run is from the expected one: its losses, gradient norms and, with `begin`, its weights."""
    distance = {name: worst(run, expected, name) for name in ("loss", "grad_norm")}
    return distance if begin is None else {**distance, "weights": apart(run, expected, begin)}


def tolerances(controls: list[dict[str, float]]) -> dict[str, float]:
    """SPREAD times the largest distance among runs of one process that sum in other orders.

    Not less than what one sum in another order may err by (tests/support/tiny_models.py derives it): where
    training does not grow rounding, three orders can agree by chance.
    """
    one_sum = 300 * 2**-24
    return {name: max(one_sum, SPREAD * max(c[name] for c in controls)) for name in controls[0]}


@pytest.fixture(scope="module")
def allowed(alone, begin):
    """The tolerances of an optimizer's runs."""
    known: dict[str, dict[str, float]] = {}

    def of(optimizer: str) -> dict[str, float]:
        if optimizer not in known:
            runs = [alone(optimizer, batch__micro=micro) for micro in ORDERS]
            known[optimizer] = tolerances([distances(run, alone(optimizer), begin) for run in runs])
        return known[optimizer]

    return of


def above(distance: dict[str, float], tolerance: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Every distance that is above its tolerance, with the tolerance."""
    return {name: (x, tolerance[name]) for name, x in distance.items() if x > tolerance[name]}


@pytest.mark.parametrize(("way", "optimizer"), EVERY)
def test_it_is_the_run_of_one_process(data, alone, begin, allowed, tmp_path, way, optimizer):
    world, changes = WAYS[way]
    team_run.train(
        world, ["run", "tiny", *keys(data, tmp_path / "run", optimizer, changes)], tmp_path / "logs"
    )
    assert not above(distances(tmp_path / "run", alone(optimizer), begin), allowed(optimizer))


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        pytest.param("sgd", {"data.seed": 0, "batch.sequences": 4}, id="half of the batch"),
        pytest.param("sgd", {"optimizer.clip": 0.5}, id="clipped before the reduction"),
        pytest.param("adamw", {"optimizer.beta2": 0.9}, id="another optimizer"),
    ],
)
def test_another_run_is_not_the_same(data, alone, begin, allowed, tmp_path, optimizer, changes):
    """The comparison can fail: what a wrong distribution would compute is far outside of the tolerances."""
    tiny_run.train("run", "tiny", *keys(data, tmp_path / "run", optimizer, changes))
    distance = distances(tmp_path / "run", alone(optimizer), begin)
    tenfold = {name: 10 * x for name, x in allowed(optimizer).items()}
    assert above(distance, tenfold).keys() >= {"loss", "weights"}


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
        self, data, alone, begin, allowed, tmp_path, first, second
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
        assert not above(distances(out, alone("sgd"), begin), allowed("sgd"))


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
    from delta_trn.train.parallel.head_order import channels

    order = channels((8, 8, 16), 2)
    assert order.tolist()[:16] == [0, 1, 2, 3, 8, 9, 10, 11, *range(16, 24)]
    whole = torch.arange(32)
    assert torch.equal(whole[order][order.argsort()], whole)
