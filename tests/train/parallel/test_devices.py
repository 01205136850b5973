"""Each process works on its own GPU: a mock of torch.cuda shows the calls,
and two GPUs show the effect.
"""

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from delta_trn.backends import machine
from delta_trn.train.__main__ import main
from delta_trn.train.checkpoints.contents import random_states, set_random_states
from delta_trn.train.parallel import rendezvous
from delta_trn.train.recipes import recipe
from delta_trn.train.run import setup
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.overrides import apply
from tests.support import team_run, tiny_run


@pytest.fixture
def calls(monkeypatch) -> Iterator[list[tuple[str, object]]]:
    """Returns the calls that reach a mock of torch.cuda with 4 devices, in this order."""
    recorded: list[tuple[str, object]] = []

    def record(name: str, result: object):
        def call(*arguments: object) -> object:
            recorded.append((name, *arguments))  # type: ignore[arg-type]
            return result

        return call

    monkeypatch.setattr(machine, "platforms", lambda: ("cuda", "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", record("set_device", None))
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", record("get_device_capability", (9, 0))
    )
    monkeypatch.setattr(torch.cuda, "get_rng_state", record("get_rng_state", torch.zeros(16)))
    monkeypatch.setattr(torch.cuda, "set_rng_state", record("set_rng_state", None))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", record("precision", None))
    monkeypatch.setattr(setup, "choose_backend", record("choose_backend", "triton"))
    machine.compute_capability.cache_clear()  # it asks once a process, and would remember the mock
    yield recorded
    machine.compute_capability.cache_clear()


@pytest.mark.parametrize(
    ("name", "rank", "device"),
    [("auto", "2", "cuda:2"), ("cuda", "1", "cuda:1"), ("cuda:3", "0", "cuda:3")],
)
def test_the_current_device_is_set_before_anything_else_touches_cuda(
    calls, monkeypatch, name, rank, device
):
    """`cuda:3` is how a sweep starts a trial on its fourth GPU."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    _, chosen = setup.set_up_process(apply(recipe("tiny"), {"device": name, "precision": "auto"}))
    assert chosen == torch.device(device)
    names = [call[0] for call in calls]
    assert calls[0] == ("set_device", torch.device(device)) and names.count("set_device") == 1
    assert "get_device_capability" in names and "choose_backend" in names


def test_a_cpu_has_no_current_device_to_set(calls):
    setup.set_up_process(apply(recipe("tiny"), {"device": "cpu"}))
    assert "set_device" not in [call[0] for call in calls]


def test_generator_states_are_those_of_the_process_s_own_device(calls):
    device = torch.device("cuda", 3)
    states = random_states(device)
    set_random_states(states, device)
    assert states.keys() == {"cpu", "cuda"}
    assert calls == [("get_rng_state", device), ("set_rng_state", states["cuda"], device)]


def test_generator_states_of_a_run_on_a_gpu_can_be_restored_on_a_cpu(calls):
    cpu = torch.device("cpu")
    set_random_states({**random_states(cpu), "cuda": torch.zeros(16)}, cpu)
    assert calls == []


def test_restored_generators_draw_the_same_numbers_again():
    cpu = torch.device("cpu")
    states = random_states(cpu)
    first = torch.rand(5)
    assert not torch.equal(torch.rand(5), first)
    set_random_states(states, cpu)
    assert torch.equal(torch.rand(5), first)


@pytest.mark.parametrize(("device", "bound"), [("cuda:1", True), ("cpu", False)])
def test_the_default_group_is_bound_to_the_process_s_own_gpu(monkeypatch, device, bound):
    received: dict[str, object] = {}
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "rendezvous", lambda *a, **o: iter([(store, 0, 1)]))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: received.update(options)
    )
    rendezvous.join("backend", timedelta(seconds=5), torch.device(device))
    assert received.get("device_id") == (torch.device(device) if bound else None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_no_process_touches_another_ones_gpu(data, tmp_path, mode):
    arguments = [
        "run",
        "tiny",
        *tiny_run.keys(data, tmp_path / "run", device="cuda", distribution__mode=mode),
    ]
    team_run.train(2, [*arguments, "sample.tokens=0"], tmp_path / "logs", _run_and_report)
    for rank in range(2):
        report = json.loads((tmp_path / "logs" / f"rank-{rank}.json").read_text())
        assert report == {"current": rank, "contexts": [index == rank for index in range(2)]}


def _run_and_report(arguments: list[str], log: str) -> None:
    """Runs training, and writes down which GPUs this process has touched."""
    tiny_run.redirect_output(log)
    status = main(arguments)
    contexts = [torch._C._cuda_hasPrimaryContext(index) for index in range(2)]
    Path(f"{log}.json").write_text(
        json.dumps({"current": torch.cuda.current_device(), "contexts": contexts})
    )
    sys.stdout.flush()
    os._exit(status)


@pytest.mark.parametrize(("amx", "chosen"), [(True, "bf16_products"), (False, "float32")])
def test_a_run_multiplies_in_bfloat16_where_the_cpu_does_so_faster(monkeypatch, amx, chosen):
    monkeypatch.setattr(machine, "multiplies_bfloat16_faster", lambda device: amx)
    config, _ = setup.set_up_process(apply(recipe("tiny"), {"device": "cpu", "precision": "auto"}))
    assert config.precision == chosen
    assert torch.get_float32_matmul_precision() == ("medium" if amx else "highest")


def test_bf16_products_are_refused_on_a_gpu(calls):
    with pytest.raises(
        ConfigError, match="bf16_products is for CPUs, and this run is on cuda:0; give prec"
    ):
        setup.set_up_process(
            apply(recipe("tiny"), {"device": "cuda", "precision": "bf16_products"})
        )
