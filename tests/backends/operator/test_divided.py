"""Delta rules of DTensors are computed on each process's part, or refused by name."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from delta_trn.backends import (
    BackendRefusal,
    gated_delta_rule,
    gated_delta_rule_step,
    kimi_delta_attention,
    kimi_delta_attention_step,
)
from delta_trn.backends.divided import HEADS, ROWS, SEQUENCES, TOKENS
from tests.support import team_run, tiny_run

B, T, H, HV, K, V = 4, 9, 2, 4, 6, 5


def arguments(channels: bool, step: bool) -> dict[str, torch.Tensor]:
    g, lead = torch.Generator().manual_seed(1), (B,) if step else (B, T)
    sizes = {
        "q": (*lead, H, K),
        "k": (*lead, H, K),
        "v": (*lead, HV, V),
        "g": (*lead, HV, K)[: len(lead) + 1 + channels],
        "beta": (*lead, HV),
        "state" if step else "initial_state": (B, HV, K, V),
        "A_log": (HV,),
        "dt_bias": (HV, K)[: 1 + channels],
    }
    return {name: torch.randn(size, generator=g) for name, size in sizes.items()}


def call(rule, tensors, step):
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    options |= {"use_gate_in_kernel": True} | ({} if step else {"output_final_state": True})
    return rule(**tensors, **options, backend="chunked")


def run(rule, tensors, step):
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    outputs = call(rule, leaves, step)
    loss = sum((y.float() * y.float().detach().cos()).sum() for y in outputs)
    return outputs, torch.autograd.grad(loss, [*leaves.values()])


def placed(tensors, mesh, kind, places):
    dims = {name: None if kind is None else places[name][kind] for name in tensors}
    return {
        name: distribute_tensor(x, mesh, [Replicate() if dims[name] is None else Shard(dims[name])])
        for name, x in tensors.items()
    }


RULES = {
    (False, False): gated_delta_rule,
    (True, False): kimi_delta_attention,
    (False, True): gated_delta_rule_step,
    (True, True): kimi_delta_attention_step,
}


def compare(words, log):
    tiny_run.redirect_output(log)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for (channels, step), rule in RULES.items():
        tensors, places = arguments(channels, step), TOKENS if step else SEQUENCES
        expected, expected_gradients = run(rule, tensors, step)
        for kind in (None, ROWS, HEADS):
            outputs, gradients = run(rule, placed(tensors, mesh, kind, places), step)
            for x, y in zip([*outputs, *gradients], [*expected, *expected_gradients], strict=True):
                assert isinstance(x, DTensor)
                torch.testing.assert_close(x.full_tensor(), y)
            assert outputs[0].to_local().numel() == expected[0].numel() // (
                1 if kind is None else mesh.size()
            )
        by_rows, by_heads = (placed(tensors, mesh, kind, places) for kind in (ROWS, HEADS))
        odd = {"q": tensors["q"][:1], "k": tensors["k"][:1]}
        for name, wrong in {
            "v": by_rows | {"v": by_heads["v"]},
            "beta": by_rows | {"beta": tensors["beta"]},
            "A_log": by_heads | {"A_log": by_rows["A_log"]},
            "q": by_rows | placed(odd, mesh, ROWS, places),
        }.items():
            with pytest.raises(BackendRefusal, match=rf"belong together: {name} \[.*redistribute"):
                call(rule, wrong, step)
    bounds = {"cu_seqlens": torch.tensor([0, T])}
    with pytest.raises(BackendRefusal, match="packed sequences lie in one row"):
        call(
            gated_delta_rule, placed(arguments(False, False), mesh, ROWS, SEQUENCES) | bounds, False
        )
    sys.stdout.flush()
    os._exit(0)


def test_a_call_on_two_processes_is_that_of_one(tmp_path):
    team_run.train(2, [], tmp_path, compare)
