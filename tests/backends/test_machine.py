"""machine reads every fact about the machine,
and refuses devices that the machine does not have.
"""

import os
import platform
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from delta_trn import backends
from delta_trn.backends import machine
from delta_trn.backends.machine import facts

CPU = torch.device("cpu")


def test_pick_takes_the_preferred_device_or_the_one_named(monkeypatch):
    assert machine.pick("cpu") == CPU
    assert machine.pick().type == machine.pick("auto").type == machine.platforms()[0]
    monkeypatch.setattr(machine, "platforms", lambda: ("cpu",))
    with pytest.raises(ValueError, match="device cuda is not on this machine, which has: cpu"):
        machine.pick("cuda")
    with pytest.raises(ValueError, match="device xla is not on this machine"):
        machine.pick("xla")


def test_each_local_rank_has_its_own_cuda_device(monkeypatch):
    monkeypatch.setattr(machine, "platforms", lambda: ("cuda", "cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert machine.pick("cuda") == torch.device("cuda", 3)
    assert machine.pick("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="device cuda:7 is not here; CUDA devices are 0 to 3"):
        machine.pick("cuda:7")


def test_a_gpu_multiplies_in_bfloat16_from_capability_8_on(monkeypatch):
    for capability, supports in (((7, 5), False), ((8, 0), True), ((9, 0), True), (None, False)):
        monkeypatch.setattr(machine, "compute_capability", lambda *place, x=capability: x)
        assert machine.supports_bfloat16(torch.device("cuda", 0)) is supports


def test_xla_without_torch_xla_says_what_to_do(monkeypatch):
    monkeypatch.setattr(machine, "platforms", lambda: ("xla", "cpu"))
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="device xla needs torch_xla, which is not installed"):
        machine.pick("xla")


def test_xlas_cpu_device_is_refused_to_several_processes(monkeypatch):
    """torch_xla 2.9 reduces over one process there and raises no error,
    so replicas would drift apart.
    """
    monkeypatch.setattr(machine, "platforms", lambda: ("xla", "cpu"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(ValueError, match="knows no other processes"):
        machine.pick("xla")


def test_neuron_is_recognized_by_the_accelerator_it_registers(monkeypatch):
    """Stands in for torch_neuronx 2.14, whose import registers "neuron"
    as PyTorch's accelerator.
    """
    synchronized = []
    neuron: Any = SimpleNamespace(type="neuron", index=None)
    installed = {"torch_neuronx"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(machine, "import_module", lambda name: installed.add("registered"))
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda **_: neuron if "registered" in installed else None,
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronized.append)
    machine.platforms.cache_clear()
    try:
        assert machine.platforms() == ("neuron", "cpu")
        installed.add("torch_xla")  # torch_neuronx 2.9 is torch_xla's plugin
        machine.platforms.cache_clear()
        assert machine.platforms() == ("xla", "cpu")
    finally:
        machine.platforms.cache_clear()
    machine.synchronize(neuron)
    machine.synchronize(neuron, wait=False)
    assert synchronized == [neuron] and machine.describe(neuron) == "NeuronCore"


def test_processes_are_read_from_torchruns_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert machine.processes() == machine.Processes(rank=0, world=1, local_rank=0)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert machine.processes() == machine.Processes(rank=5, world=8, local_rank=1)


def test_peak_memory_counts_bytes():
    machine.reset_peak_memory(CPU)
    before = machine.peak_memory(CPU)
    held = torch.ones(60_000_000)
    machine.synchronize(CPU)
    assert 10e6 < before < machine.peak_memory(CPU)
    assert held.sum() == 60_000_000
    assert machine.peak_memory(CPU) < 200e9


def test_facts_describe_the_machine_without_naming_the_host():
    row = facts(CPU)
    assert row["torch"] == torch.__version__
    assert row["threads"] == torch.get_num_threads() and row["device_type"] == "cpu"
    assert row["commit"] is None or len(row["commit"]) == 12
    text = " ".join(map(str, row.values()))
    for name in {socket.gethostname(), platform.node(), os.uname().nodename} - {"", "localhost"}:
        assert name not in text


@pytest.mark.skipif(not machine.multiplies_bfloat16_faster(CPU), reason="this CPU has no AMX")
def test_only_operations_that_round_multiply_in_bfloat16_where_a_run_allows_it():
    def results() -> list[torch.Tensor]:
        q, k, v = torch.randn(3, 1, 64, 2, 64, generator=torch.Generator().manual_seed(0))
        hidden, weight = q[0].flatten(1), v[0].flatten(1)
        rule, _ = backends.gated_delta_rule(q, k, v, -torch.ones(1, 64, 2), torch.ones(1, 64, 2))
        targets = torch.arange(64)
        return [rule, backends.linear_cross_entropy(hidden, weight, targets), hidden @ weight.T]

    exact = results()
    machine.set_products("medium")
    rounded = results()
    equal = [torch.equal(x, y) for x, y in zip(exact, rounded, strict=True)]
    assert equal == [True, False, False]
    for x, y in zip(exact, rounded, strict=True):
        assert (x - y).norm() <= 2**-7 * x.norm()
    assert torch.get_float32_matmul_precision() == "medium"  # and not what the rule set meanwhile
