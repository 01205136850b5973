"""The path to TorchNeuron's tensors (Trn2, Trn3). No such machine was at hand: what is tested is
what reaches the kernels, with a stand-in for torch_neuronx that registers a plain PyTorch operator.
"""

import importlib
import inspect
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from delta_trn.backends import BackendRefusal, delta_residual, dispatch, nki_runtime_adapter
from delta_trn.backends.delta_residual import nki_adapter as residual_adapter
from delta_trn.backends.dispatch import Call, choose
from delta_trn.backends.gated_delta_rule import nki_adapter as rule_adapter
from delta_trn.backends.parity.rule import outcome
from delta_trn.backends.parity.rule_cases import BY_NAME, inputs

ADAPTERS = (rule_adapter, residual_adapter)
simulated = nki_runtime_adapter.run


@pytest.fixture(scope="module")
def registered():
    """nki_op as documented: a name, what is written in place,
    and a function whose types are the schema.
    """
    known = {}

    def nki_op(name, mutates_args):
        def register(function):
            if name not in known:
                known[name] = torch.library.custom_op(name, function, mutates_args=mutates_args)
            return known[name]

        return register

    package = ModuleType("torch_neuronx")
    package.nki_op = nki_op
    return package


@pytest.fixture
def neuron(registered, monkeypatch):
    """CPU tensors take the path of "neuron" ones; at its end kernels are simulated.
    Yields what ran.
    """
    ran = []
    monkeypatch.setitem(sys.modules, "torch_neuronx", registered)
    for adapter in ADAPTERS:
        monkeypatch.setattr(
            adapter, "run", lambda kernel, *args: nki_runtime_adapter.launch(kernel, args)
        )

    def call(kernel, args):
        ran.append(kernel.__name__)
        outputs = simulated(kernel, *args)
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    monkeypatch.setattr(nki_runtime_adapter, "call", call)
    nki_runtime_adapter._operators.cache_clear()
    yield ran
    nki_runtime_adapter._operators.cache_clear()


@pytest.mark.parametrize("name", ["carry", "ragged", "packed_empty", "final_only"])
def test_the_rule_computes_the_same_through_torchneuron_operators(name, neuron, monkeypatch):
    call = inputs(BY_NAME[name], torch.float32)
    through = outcome(call, "nki-simulator")
    assert {"gated_delta_rule_fwd", "gated_delta_rule_bwd"} <= set(neuron)
    monkeypatch.setattr(rule_adapter, "run", simulated)
    direct = outcome(call, "nki-simulator")
    assert all(torch.equal(through[key], x) for key, x in direct.items())


def test_the_residual_computes_the_same_through_torchneuron_operators(neuron, monkeypatch):
    x, k, v, beta = torch.randn(5, 8, 2), torch.randn(5, 8), torch.randn(5, 2), torch.rand(5)
    leaves = [y.requires_grad_() for y in (x, k, v, beta)]

    def grads():
        out = delta_residual(*leaves, k_eps=1e-5, backend="nki-simulator")
        return out, *torch.autograd.grad(out.sum(), leaves)

    through = grads()
    assert neuron == ["delta_residual_fwd", "delta_residual_bwd"]
    monkeypatch.setattr(residual_adapter, "run", simulated)
    assert all(torch.equal(a, b) for a, b in zip(through, grads(), strict=True))


def test_an_unknown_kernel_is_refused(neuron):
    with pytest.raises(LookupError, match="has no launcher; add one to"):
        nki_runtime_adapter.launch(len, (torch.ones(1),))


@pytest.mark.parametrize("entry", nki_runtime_adapter.KERNELS, ids=lambda entry: entry[0].__name__)
def test_a_launcher_takes_and_hands_on_what_its_kernel_takes(entry, monkeypatch):
    """Its types are those of the arguments of the kernel's own example."""
    kernel, names = entry
    assert list(inspect.signature(kernel.function).parameters) == names.split()
    module = importlib.import_module(kernel.function.__module__)
    backward = {"backward": 1} if kernel.__name__.endswith("bwd") else {"backward": 0}
    takes = inspect.signature(module.example).parameters
    example, given = module.example(**(backward if "backward" in takes else {}))
    assert example is kernel
    launcher = nki_runtime_adapter.make_launcher(*entry)
    types = [p.annotation for p in inspect.signature(launcher).parameters.values()]
    assert types == [torch.Tensor if isinstance(x, np.ndarray) else type(x) for x in given]
    monkeypatch.setattr(nki_runtime_adapter, "call", lambda *given: given)
    assert launcher(1, 2) == (kernel, (1, 2))


def test_the_refusal_on_neuron_tensors_names_the_missing_packages(monkeypatch):
    call = Call("gated_delta_rule", "neuron", torch.float32)
    monkeypatch.setitem(sys.modules, "torch_neuronx", ModuleType("torch_neuronx"))
    with pytest.raises(
        BackendRefusal, match=r"needs torch_neuronx 2\.14 .*: this one has no nki_op"
    ):
        choose(call)
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)
    with pytest.raises(
        BackendRefusal, match=r"needs torch_neuronx 2\.14 and nki, from AWS Neuron's package"
    ):
        choose(call)


def test_nki_is_the_default_on_neuron_tensors_where_it_runs(registered, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_neuronx", registered)
    call = Call("gated_delta_rule", "neuron", torch.bfloat16, gradients=True)
    assert choose(call).name == "nki"


THIRD_WAY = """
import numpy as np
from delta_trn.backends.dispatch import Call, choose
from delta_trn.backends.parity.rule_cases import BY_NAME
from delta_trn.backends.parity.rule import verdicts
from delta_trn.nki_kernels.language import RUNTIME
import nki, torch
assert RUNTIME == "neuron"
judged = verdicts(BY_NAME["ragged"], torch.float32, "nki-simulator")
assert all(verdict.passed for verdict in judged)
print(len(judged), sorted(set(nki.targets)))
"""

STAND_IN = """
import os
from nki_simulator import nki as ours

targets = []
jit = ours.jit

def simulate(kernel):
    targets.append(os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"])
    return ours.simulate(kernel)
"""


@pytest.mark.skipif(find_spec("nki") is not None, reason="the real nki is installed here")
def test_parity_holds_on_the_simulator_of_an_installed_nki(tmp_path):
    """In a process where a package `nki` is installed: ours under its name."""
    package, record = tmp_path / "nki", tmp_path / "nki-0.3.0.dist-info"
    package.mkdir()
    record.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    for module in ("isa", "language"):
        (package / f"{module}.py").write_text(f"from nki_simulator.{module} import *\n")
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: nki\nVersion: 0.3.0\n")
    process = subprocess.run(
        [sys.executable, "-c", THIRD_WAY],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "DELTA_TRN_NKI": "0.3.0"},
        timeout=250,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["7", "['trn1']"]


def test_an_nki_without_a_simulator_is_refused(monkeypatch, version_of):
    call = Call("gated_delta_rule", "cpu", torch.float32)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(dispatch, "_placeholder", lambda: None)
    version_of("0.2.0+1")
    with pytest.raises(
        BackendRefusal, match=r"nki 0\.2\.0\+1 has no simulator: install 0\.3 or newer, or none"
    ):
        choose(call, "nki-simulator")
    version_of("0.10rc1")
    assert choose(call, "nki-simulator").name == "nki-simulator"


@pytest.mark.skipif(find_spec("nki") is not None, reason="the real nki is installed here")
@pytest.mark.parametrize("backend", ["nki", "nki-simulator"])
def test_the_placeholder_of_the_public_index_is_refused_by_name(backend, tmp_path, monkeypatch):
    """That package is one file, which raises; AWS's has nki.isa."""
    package = tmp_path / "nki"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("WRONG PACKAGE")\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        dispatch, "find_spec", lambda name: find_spec("torch" if name == "torch_xla" else name)
    )
    call = Call("gated_delta_rule", "cpu" if backend == "nki-simulator" else "xla", torch.float32)
    with pytest.raises(
        BackendRefusal, match=r"nki that is installed is a placeholder .*: pip uninstall nki"
    ):
        choose(call, backend)
    (package / "isa.py").write_text("")
    monkeypatch.setattr(dispatch.metadata, "version", lambda name: "0.7.0")
    assert choose(call, backend).name == backend
