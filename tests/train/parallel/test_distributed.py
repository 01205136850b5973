"""A distributed run equals the run of one process in loss, gradient norms and weights.

Tolerances come from control runs. In these, one process trains on the same batches with
micro-batches of other sizes, which sums in another order. How far these runs end from each other is
what rounding does to this run on this CPU. A distributed run may end SPREAD times as far from the
run of one process.

A wrong distribution would be thousands of times as far off, as
`test_a_different_run_is_outside_the_tolerances` shows.

AdamW divides a gradient by its own size. With a small epsilon, entries of mere rounding would move
as far as others, so its epsilon is large.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from delta_trn.train.__main__ import main
from delta_trn.train.parallel.heads import channels
from delta_trn.train.parallel.layout import require_divisible
from delta_trn.train.parallel.pytorch import PyTorchSharding
from delta_trn.train.parallel.team import Team
from delta_trn.train.recipes import recipe
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import DistributionSection
from tests.support import team_run, tiny_run
from tests.support.tiny_run import metric_distance, tolerance

STEPS = 10
ORDERS = (4, 2, 1)  # sequences per micro-batch
BATCH: dict[str, Any] = {
    "steps": STEPS,
    # A document's first output is normalized from q.k of BOS alone. Where that is nearly 0 in some
    # head, as for seeds 7 and 42 after step 8, rounding is multiplied by thousands, and tolerances
    # would show nothing.
    "seed": 8,
    "batch.sequences": 8,
    "model.heads": 4,
    "model.width": 32,
    "evaluation.every": 5,
    "evaluation.sequences": 8,
    "checkpoint.every": 10,
    "log.every": 5,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {
        "optimizer.name": "sgd",
        "optimizer.lr": 0.05,
        "optimizer.momentum": 0.5,
        "optimizer.clip": 1.0,
    },
    "adamw": {
        "optimizer.name": "adamw",
        "optimizer.lr": 0.02,
        "optimizer.eps": 0.1,
        "optimizer.clip": 1.0,
    },
}
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
QUICK = {(way, "sgd") for way in ("ddp-2", "fsdp-2", "tensor-2", "context-2")} | {
    ("zero1-2", "adamw")
}
EVERY = [
    pytest.param(way, optimizer, marks=[] if (way, optimizer) in QUICK else [pytest.mark.slow])
    for way in WAYS
    for optimizer in OPTIMIZERS
]


def keys(data: Path, out: Path, optimizer: str, changes: dict[str, Any]) -> list[str]:
    return tiny_run.keys(data, out, **{**BATCH, **OPTIMIZERS[optimizer], **changes})


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """Returns a function that runs one process with an optimizer and changes,
    once for each of them.
    """
    runs: dict[tuple[str, str], Path] = {}

    def run(optimizer: str, **changes: Any) -> Path:
        key = (optimizer, json.dumps(changes))
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("alone") / "run"
            dotted = {name.replace("__", "."): value for name, value in changes.items()}
            tiny_run.train("run", "tiny", *keys(data, runs[key], optimizer, dotted))
        return runs[key]

    return run


def weights(run: Path) -> dict[str, Tensor]:
    """Returns the weights of a run's newest checkpoint."""
    folder = max((run / "checkpoints").glob("step-*"))
    return {k: v for path in folder.glob("model*.safetensors") for k, v in load_file(path).items()}


def weight_distances(run: Path, expected: Path, begin: dict[str, Tensor]) -> dict[str, float]:
    """Returns the distance of the weights from the expected ones, relative to their change.

    weights         of all of them together
    a parameter     the largest of a single one, such as A_log, which rounding moves most

    One unit in the last place does not count: it is the least difference there can be, and some
    parameters move by a few hundred of them in all.
    """
    mine, theirs = weights(run), weights(expected)
    assert mine.keys() == theirs.keys()
    beyond = [((mine[n] - w).abs() - _last_place(w)).clamp(min=0).norm() for n, w in theirs.items()]
    change = [(w - begin[n]).norm() for n, w in theirs.items()]
    return {
        "weights": float(torch.stack(beyond).norm() / torch.stack(change).norm()),
        "a parameter": max(float(x / y) for x, y in zip(beyond, change, strict=True)),
    }


def _last_place(x: Tensor) -> Tensor:
    return torch.nextafter(x.abs(), torch.tensor(torch.inf)) - x.abs()


@pytest.fixture(scope="module")
def begin(data, tmp_path_factory) -> dict[str, Tensor]:
    """Returns the initial weights: those after one step of the warmup, whose learning rate is 0."""
    out = tmp_path_factory.mktemp("begin") / "run"
    tiny_run.train("run", "tiny", *keys(data, out, "sgd", {"steps": 1}))
    return weights(out)


def distances(
    run: Path, expected: Path, begin: dict[str, Tensor] | None = None
) -> dict[str, float]:
    """Returns how far a run is from the expected one in loss, gradient norm and,
    with `begin`, weights.
    """
    distance = {name: metric_distance(run, expected, name) for name in ("loss", "grad_norm")}
    return distance if begin is None else {**distance, **weight_distances(run, expected, begin)}


def tolerances(controls: list[dict[str, float]]) -> dict[str, float]:
    """Returns how far a run may be, from runs of one process that sum in other orders."""
    return {name: tolerance([c[name] for c in controls]) for name in controls[0]}


@pytest.fixture(scope="module")
def allowed(alone, begin):
    """Returns a function that gives the tolerances for an optimizer's runs."""
    known: dict[str, dict[str, float]] = {}

    def tolerances_of(optimizer: str) -> dict[str, float]:
        if optimizer not in known:
            runs = [alone(optimizer, batch__micro=micro) for micro in ORDERS]
            known[optimizer] = tolerances([distances(run, alone(optimizer), begin) for run in runs])
        return known[optimizer]

    return tolerances_of


def above(
    distance: dict[str, float], tolerance: dict[str, float]
) -> dict[str, tuple[float, float]]:
    """Returns every distance that is above its tolerance, with the tolerance."""
    return {name: (x, tolerance[name]) for name, x in distance.items() if x > tolerance[name]}


@pytest.mark.parametrize(("way", "optimizer"), EVERY)
def test_a_distributed_run_equals_the_run_of_one_process(
    data, alone, begin, allowed, tmp_path, way, optimizer
):
    world, changes = WAYS[way]
    team_run.train(
        world, ["run", "tiny", *keys(data, tmp_path / "run", optimizer, changes)], tmp_path / "logs"
    )
    assert not above(distances(tmp_path / "run", alone(optimizer), begin), allowed(optimizer))


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        pytest.param("sgd", {"batch.sequences": 4}, id="half of the batch"),
        pytest.param("sgd", {"optimizer.clip": 0.5}, id="clipped before the reduction"),
        pytest.param("sgd", {"data.boundaries": "false"}, id="documents that reach the next one"),
        # AdamW's step of 2 g is m / (sqrt(v) + eps / 2) of g
        pytest.param("adamw", {"optimizer.eps": 0.05}, id="summed instead of averaged"),
    ],
)
def test_a_different_run_is_outside_the_tolerances(
    data, alone, begin, allowed, tmp_path, optimizer, changes
):
    """What a wrong distribution would compute is far outside the tolerances."""
    tiny_run.train("run", "tiny", *keys(data, tmp_path / "run", optimizer, changes))
    distance = distances(tmp_path / "run", alone(optimizer), begin)
    tenfold = {name: 10 * x for name, x in allowed(optimizer).items()}
    seen = {"loss", "weights", "a parameter"}
    if "data.boundaries" in changes:
        seen -= {"loss"}  # the first tokens of documents, which are few, weigh little in it
        assert above(distance, allowed(optimizer)).keys() >= seen
        if hasattr(torch, "_other_products"):
            # A_log is rounded more there: ten tolerances are farther than this
            seen -= {"a parameter"}
    assert above(distance, tenfold).keys() >= seen


DROPOUT = {"model.dropout": 0.2}
WITH_DROPOUT = ("ddp-2", "ddp-4", "fsdp-4", "zero1-2", "tensor-2", "context-2", "tensor-2-fsdp-2")


# Six steps, for the reason that BF16 gives; without boundaries for the other one.
KIMI: dict[str, Any] = {
    "model.mixer": "kimi_delta_attention",
    "data.boundaries": "false",
    "steps": 6,
}
KIMI |= {"evaluation.every": 6, "log.every": 1}


@pytest.mark.parametrize("way", ["tensor-2", "context-2"])
def test_a_distributed_run_of_kimi_delta_attention_equals_the_run_of_one_process(
    data, alone, tmp_path, way
):
    expected, *controls = [alone("sgd", **KIMI, batch__micro=micro) for micro in (4, 2, 1)]
    world, changes = WAYS[way]
    run = ["run", "tiny", *keys(data, tmp_path / "run", "sgd", {**changes, **KIMI})]
    team_run.train(world, run, tmp_path / "logs")
    allowed = tolerances([distances(control, expected) for control in controls])
    assert not above(distances(tmp_path / "run", expected), allowed)
    without = distances(alone("sgd", **{**KIMI, "model.mixer": "gated_deltanet"}), expected)
    assert above(without, {name: 10 * x for name, x in allowed.items()}).keys() == allowed.keys()


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[] if way == "ddp-2" else [pytest.mark.slow]) for way in WITH_DROPOUT],
)
def test_a_distributed_run_with_dropout_equals_the_run_of_one_process(
    data, alone, begin, tmp_path, way
):
    """Masks belong to sequences. Were they drawn by rank,
    even the controls would differ in everything.
    """
    world, changes = WAYS[way]
    keys_of_run = keys(data, tmp_path / "run", "sgd", {**changes, **DROPOUT})
    team_run.train(world, ["run", "tiny", *keys_of_run], tmp_path / "logs")
    expected = alone("sgd", model__dropout=0.2)
    controls = [alone("sgd", model__dropout=0.2, batch__micro=micro) for micro in (4, 1)]
    allowed = tolerances([distances(control, expected, begin) for control in controls])
    assert not above(distances(tmp_path / "run", expected, begin), allowed)
    without = distances(expected, alone("sgd"), begin)
    tenfold = {name: 10 * x for name, x in allowed.items()}
    assert above(without, tenfold).keys() >= {"loss", "weights", "a parameter"}


# Without boundaries: q.k of BOS is rounded to bf16 in every step, see BATCH. Three steps: after
# twenty, other orders of bf16's sums have moved A_log so far apart that no gradient of it could be
# missed.
BF16: dict[str, Any] = {"precision": "bf16", "data.boundaries": "false", "steps": 3}
BF16 |= {"schedule.warmup": 1, "schedule.decay_steps": STEPS, "evaluation.every": 3, "log.every": 1}


@pytest.fixture(scope="module")
def in_bf16(alone, begin):
    """Returns a run's distances from that of one process in bf16,
    as a function, and their tolerances.
    """
    expected = alone("sgd", **BF16)
    controls = [alone("sgd", **BF16, batch__micro=micro) for micro in (4, 1)]
    allowed = tolerances([distances(control, expected, begin) for control in controls])
    return lambda run: distances(run, expected, begin), allowed


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[] if way == "fsdp-2" else [pytest.mark.slow])
        for way in ("fsdp-2", "zero1-2", "ddp-2", "tensor-2-fsdp-2", "context-2-fsdp")
    ],
)
def test_a_distributed_run_in_bf16_equals_the_run_of_one_process(data, in_bf16, tmp_path, way):
    """Only matrices are sent in bf16, to which autocast would round them;
    gates and gains stay in float32.
    """
    world, changes = WAYS[way]
    logs = tmp_path / "logs"
    keys_of_run = keys(data, tmp_path / "run", "sgd", {**changes, **BF16})
    team_run.train(world, ["run", "tiny", *keys_of_run], logs, run_and_count_bytes)
    distance, allowed = in_bf16
    assert not above(distance(tmp_path / "run"), allowed)
    gathered = json.loads((logs / "rank-0.json").read_text())
    if "fsdp" in way or "zero1" in way:
        assert gathered["torch.bfloat16"] > 0, "the blocks' matrices are sent in bf16"


def test_gates_and_gains_that_each_process_moves_by_its_own_gradients_are_seen(
    data, in_bf16, tmp_path
):
    keys_of_run = keys(data, tmp_path / "run", "sgd", {**WAYS["fsdp-2"][1], **BF16})
    team_run.train(
        2, ["run", "tiny", *keys_of_run], tmp_path / "logs", run_with_gradients_of_its_own
    )
    distance, allowed = in_bf16
    assert above(
        distance(tmp_path / "run"), {name: 4 * x for name, x in allowed.items()}
    ).keys() == {"a parameter"}


def run_with_gradients_of_its_own(arguments: list[str], log: str) -> None:
    PyTorchSharding._average_gradients = lambda self: None
    tiny_run.run_and_exit(arguments, log)


@pytest.mark.slow
def test_fsdp_gathers_half_the_bytes_of_matrices_in_bf16(data, tmp_path):
    counts = {}
    for precision in ("float32", "bf16"):
        changes = {**WAYS["fsdp-2"][1], "precision": precision, "steps": 2}
        logs = tmp_path / precision
        arguments = ["run", "tiny", *keys(data, tmp_path / f"run-{precision}", "sgd", changes)]
        team_run.train(2, arguments, logs, run_and_count_bytes)
        counts[precision] = json.loads((logs / "rank-0.json").read_text())
    assert counts["float32"].keys() == {"torch.float32"}
    embedding = counts["bf16"]["torch.float32"]  # read by its rows, and so never rounded
    matrices = counts["float32"]["torch.float32"] - embedding
    assert 0.4 * matrices < counts["bf16"]["torch.bfloat16"] <= 0.5 * matrices


def run_and_count_bytes(arguments: list[str], log: str) -> None:
    """Runs training on one rank, and writes down how many bytes FSDP gathered by dtype."""
    # torch 2.9 has the second name, 2.13 the first
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, counts = getattr(dist, name), dict[str, int]()

    def counted(*tensors: Tensor, **options: Any) -> Any:
        largest = max(
            (x for x in (*tensors, *options.values()) if isinstance(x, Tensor)), key=Tensor.numel
        )
        dtype = str(largest.dtype)
        counts[dtype] = counts.get(dtype, 0) + largest.numel() * largest.element_size()
        return gather(*tensors, **options)

    setattr(dist, name, counted)
    tiny_run.redirect_output(log)
    status = main(arguments)
    Path(f"{log}.json").write_text(json.dumps(counts))
    sys.stdout.flush()
    os._exit(status)


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
    def test_a_run_resumes_on_other_processes_in_another_mode(
        self, data, alone, begin, allowed, tmp_path, first, second
    ):
        out = tmp_path / "run"
        world, changes = WAYS[first]
        # this run ends at step 5, halfway down a cosine whose length is a key of its own
        half = {"checkpoint.every": 5, "schedule.decay_steps": STEPS, "steps": STEPS // 2}
        team_run.train(
            world, ["run", "tiny", *keys(data, out, "sgd", {**changes, **half})], tmp_path / "first"
        )
        world, changes = WAYS[second]
        reset = {"distribution.mode": "ddp", "distribution.tensor": 1, "distribution.context": 1}
        keys_of_second = [
            f"{k}={v}" for k, v in {**reset, **changes}.items() if k.startswith("distribution")
        ]
        team_run.train(
            world, ["resume", out, f"steps={STEPS}", *keys_of_second], tmp_path / "second"
        )
        assert not above(distances(out, alone("sgd"), begin), allowed("sgd"))


class TestDivides:
    @pytest.mark.parametrize(
        ("world", "changes", "complaint"),
        [
            (3, {}, "batch.sequences=4 cannot be shared by 3"),
            (2, {"batch.micro": "4"}, None),
            (
                2,
                {"batch.sequences": "12", "batch.micro": "4"},
                "batch.micro=4 does not divide the 6",
            ),
            (2, {"log.probes": "true"}, "looks into the model of one process, and this run has 2"),
            (2, {"distribution.tensor": "4"}, "start a multiple of 4"),
            (4, {"distribution.tensor": "4"}, "does not divide model.heads=2"),
            (
                2,
                {"distribution.context": "2", "batch.length": "33"},
                "does not divide batch.length=33",
            ),
            (2, {"distribution.context": "2", "batch.length": "4"}, "leaves 2 tokens"),
            (2, {"distribution.context": "2", "model.attention_layers": "1"}, "softmax attention"),
        ],
    )
    def test_an_impossible_division_among_processes_is_refused(self, world, changes, complaint):
        config = apply(recipe("tiny"), changes)
        if complaint is None:
            require_divisible(config, world)
            return
        with pytest.raises(ConfigError, match=complaint):
            require_divisible(config, world)

    @pytest.mark.parametrize("mode", ["ddp", "zero1"])
    def test_replicas_of_divided_heads_need_fsdp(self, mode):
        mesh: Any = {"replica": SimpleNamespace(size=lambda: 2)}
        with pytest.raises(
            ConfigError, match=f"mode={mode} does not go .* use distribution.mode=fsdp"
        ):
            PyTorchSharding(
                torch.nn.Module(),  # type: ignore[arg-type]
                DistributionSection(mode=mode, tensor=2),  # type: ignore[arg-type]
                Team(world=4, mesh=mesh),
            )

    def test_one_process_can_run_any_division(self):
        require_divisible(recipe("tiny"), 1)


def test_channels_reordered_for_heads_can_be_put_back_in_order():
    order = channels((8, 8, 16), 2)
    assert order.tolist()[:16] == [0, 1, 2, 3, 8, 9, 10, 11, *range(16, 24)]
    whole = torch.arange(32)
    assert torch.equal(whole[order][order.argsort()], whole)
