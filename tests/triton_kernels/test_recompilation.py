"""No kernel is compiled again for another length: what a launch is compiled for is asked,
not compiled.
"""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from delta_trn.backends.delta_residual import triton_adapter as residual
from delta_trn.backends.delta_residual.contract import Residual
from delta_trn.backends.gated_delta_rule import triton_adapter, triton_time_adapter
from delta_trn.backends.gated_delta_rule.contract import Rule, Step
from delta_trn.backends.kimi_delta_attention import triton_adapter as channels
from delta_trn.backends.layers import triton_adapter as layers
from delta_trn.backends.layers.contract import Convolution, GatedNorm, Readout, SumNorm
from delta_trn.triton_kernels.compile_only import SIZES
from delta_trn.triton_kernels.hopper import prepare as hopper_prepare
from delta_trn.triton_kernels.kimi_delta_attention import gradients_hopper, prepare_hopper

LENGTHS = (1, 2, 15, 16, 17, 64, 65, 96, 128, 300, 1024, 1030)
BACKEND = make_backend(GPUTarget("cuda", 90, 32))
HOPPERS = (hopper_prepare, prepare_hopper, gradients_hopper)
KERNELS = {
    (module, name): getattr(module, name)
    for modules in (HOPPERS, *(modules for modules, *_ in SIZES))
    for module in modules
    for name in vars(module)
    if name.endswith("_kernel")
}


class Recorder:
    """Stands for a kernel. Notes what launches would be compiled for,
    by absent tensors and switches.
    """

    def __init__(self, kernel, keys):
        options = ("do_not_specialize", "do_not_specialize_on_alignment")
        given = {
            name: (getattr(kernel, "kwargs", None) or vars(kernel)).get(name) for name in options
        }
        function = JITFunction(kernel.fn, **given)
        self.bind = create_function_from_signature(function.signature, function.params, BACKEND)
        self.keys = keys

    def __getitem__(self, grid):
        def note(*arguments, **named):
            values, specialization, options = self.bind(*arguments, **named)
            form = tuple(
                (name, x)
                for name, x in values.items()
                if x is None or isinstance(x, bool | str) or name in ("K", "V")
            )
            self.keys[form].add(str((specialization, sorted(options.items()))))

        return note


@pytest.fixture
def compiled_for(monkeypatch):
    """Gives module and kernel -> absent tensors and switches -> what launches were compiled for."""
    keys = {place: defaultdict(set) for place in KERNELS}
    for (module, name), kernel in KERNELS.items():
        monkeypatch.setattr(module, name, Recorder(kernel, keys[module, name]))
    return keys


def normal(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def call_rule(T, *, packed=False, parts=False, H=1, HV=2, K=16):
    q, v, g = normal(1, T, H, K), normal(1, T, HV, K), normal(1, T, HV, dtype=torch.float32)
    k = q
    if parts:  # as a layer cuts them
        q, k, v = normal(1, T, 4 * K).split((K, K, HV * K), -1)
        q, k, v = q[:, :, None], k[:, :, None], v.unflatten(2, (HV, K))
    cuts = torch.tensor([0, T // 3, T]) if packed else None
    state = normal(2 if packed else 1, HV, K, K, dtype=torch.float32)
    call = Rule(
        q, k, v, g, g, initial_state=state, cu_seqlens=cuts, l2norm=True, output_final_state=True
    )
    *_, saved = triton_adapter.forward(call, save=True)
    triton_adapter.backward(v, state, call, saved)
    own, kept = torch.zeros(1, T).int(), torch.ones(1).int()
    triton_adapter.step(Step(q[0], k[0], v[0], g[0], g[0], state, indices=own, accepted=kept))


def call_channels(T, *, packed=False, lower_bound=None, H=1, HV=2, K=16):
    x, v, state = normal(1, T, H, K), normal(1, T, HV, K), normal(1, HV, K, K, dtype=torch.float32)
    g, beta = normal(1, T, HV, K, dtype=torch.float32), normal(1, T, HV, dtype=torch.float32)
    cuts = torch.tensor([0, T]) if packed else None
    call = Rule(
        x, x, v, g, beta, initial_state=state, cu_seqlens=cuts, l2norm=True,
        output_final_state=True, A_log=None if lower_bound is None else beta.new_zeros(HV),
        lower_bound=lower_bound,
    )  # fmt: skip
    *_, saved = channels.forward(call, save=True)
    channels.backward(v, state, call, saved)
    channels.step(Step(x[:, 0], x[:, 0], v[:, 0], g[:, 0], beta[:, 0], state))
    channels.step(Step(x[0], x[0], v[0], g[0], beta[0], state, indices=torch.zeros(1, T).int()))


def call_layers(T):
    C, N = 48, 512
    x, weight = normal(1, T, C), normal(C, 4)
    position = torch.arange(T)
    for call in (Convolution(x, weight), Convolution(x, weight, position=position)):
        layers.short_convolution_forward(call, save=True)
        layers.short_convolution_backward(x, call, [])
    rows, w = normal(T, N), normal(N)
    layers.gated_rms_norm_forward(GatedNorm(rows, rows, w), save=True)
    layers.gated_rms_norm_backward(rows, GatedNorm(rows, rows, w), [])
    layers.add_rms_norm_forward(SumNorm(rows, rows, w), save=True)
    layers.add_rms_norm_backward(rows, rows, SumNorm(rows, rows, w), [rows])
    layers.linear_cross_entropy_forward(
        Readout(rows, normal(33, N), torch.zeros(T).long()), save=True
    )
    stream = Residual(normal(T, 64, 2), normal(T, 64), normal(T, 2), normal(T))
    residual.forward(stream, save=True)
    residual.backward(stream.x, stream, [])


@pytest.mark.parametrize("parts", [False, True], ids=["copies", "parts of a tensor"])
def test_no_kernel_is_compiled_again_for_another_length(parts, compiled_for, monkeypatch):
    """One token alone is read as a copy."""
    for T in LENGTHS[parts:]:
        call_layers(T)
        call_channels(T)
        call_channels(T, packed=True)
        for segment in (None, 1):
            monkeypatch.setattr(triton_time_adapter, "SEGMENT", segment)
            call_rule(T, parts=parts)
            call_rule(T, packed=True, parts=parts)
            with triton_adapter.adjust(lambda row: replace(row, dot="tf32")):  # as compiled
                call_rule(T, parts=parts)
                call_rule(T, parts=parts, K=128)
                call_channels(T, lower_bound=-5.0)
                call_channels(T, lower_bound=-5.0, packed=True)
            with triton_adapter.adjust(
                lambda row: replace(row, prepare=replace(row.prepare, gluon=False))
            ):
                call_rule(T, parts=parts)
    for (module, name), keys in compiled_for.items():
        assert keys or parts, f"{module.__name__}.{name} is launched by nothing here"
        for form, found in keys.items():
            assert len(found) == 1, f"{module.__name__}.{name} with {form} was compiled for {found}"
            told = next(iter(found))  # no release's default decides how a kernel rounds
            assert "('enable_fp_fusion', True)" in told, f"{module.__name__}.{name}: {told}"
