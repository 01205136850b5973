"""Published signatures of the functions of AWS and torch_xla that training calls, and a check against them.

The stand-ins in tests/shims are held to this table; where torch_xla is installed, so is the table itself.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

XLA = "torch_xla 2.9.0, which torch-neuronx 2.9 (Neuron SDK 2.28.1) takes"
NXD = "github.com/aws-neuron/neuronx-distributed at v2.28.0 (0.17.0), src/neuronx_distributed/"

# The keyword arguments of MpDeviceLoader go to ParallelLoader.
PUBLISHED: dict[str, dict[str, str]] = {
    XLA: {
        "torch_xla:sync": "(wait=False, reset_scope=True)",
        "torch_xla.runtime:world_size": "()",
        "torch_xla.runtime:global_ordinal": "()",
        "torch_xla.core.xla_model:all_reduce": (
            "(reduce_type, inputs, scale=1.0, groups=None, pin_layout=True)"
        ),
        "torch_xla.core.xla_model:collective_broadcast": (
            "(tensors, root_ordinal=0, groups=None, pin_layout=True)"
        ),
        "torch_xla.distributed.parallel_loader:MpDeviceLoader": "(loader, device, **kwargs)",
        "torch_xla.distributed.parallel_loader:ParallelLoader": (
            "(cpu_loader, devices, batchdim=0, batches_per_execution=1, loader_prefetch_size=16, "
            "device_prefetch_size=8, host_to_device_transfer_threads=1, input_sharding=None)"
        ),
    },
    NXD: {
        # its arguments are those of torch_xla's ZeroRedundancyOptimizer
        "neuronx_distributed.optimizer:NeuronZero1Optimizer": (
            "(params, optimizer_class, optimizer_dtype=None, grad_clipping=True, max_norm=None, "
            "pin_layout=True, sharding_groups=None, grad_norm_groups=None, lazy_init=False, "
            "bucket_cap_mb_all_gather=0, bucket_cap_mb_reduce_scatter=0, use_grad_acc_hook=False, "
            "save_master_weights=False, higher_cc_precision=False, **defaults)"
        ),
        "neuronx_distributed.parallel_layers.grads:get_grad_norm": (
            "(parameters, norm_type=2, zero1_optimizer=False, zero1_optimizer_groups=None, force_spmd=True)"
        ),
        "neuronx_distributed.parallel_layers.mappings:copy_to_tensor_model_parallel_region": (
            "(input_, process_group=None)"
        ),
        "neuronx_distributed.parallel_layers.mappings:reduce_from_tensor_model_parallel_region": (
            "(input_, process_group=None)"
        ),
        "neuronx_distributed.parallel_layers.parallel_state:initialize_model_parallel": (
            "(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1, "
            "expert_model_parallel_size=1, skip_collective_init=False, lnc_size=1, mesh_only=False)"
        ),
        "neuronx_distributed.parallel_layers.parallel_state:model_parallel_is_initialized": "()",
        "neuronx_distributed.parallel_layers.parallel_state:get_tensor_model_parallel_group": (
            "(as_list=False)"
        ),
        "neuronx_distributed.parallel_layers.parallel_state:get_tensor_model_parallel_rank": "()",
        "neuronx_distributed.parallel_layers.parallel_state:get_tensor_model_parallel_size": "()",
        "neuronx_distributed.parallel_layers.parallel_state:get_data_parallel_group": "(as_list=False)",
        "neuronx_distributed.parallel_layers.parallel_state:get_data_parallel_rank": "()",
        "neuronx_distributed.parallel_layers.parallel_state:get_data_parallel_size": "()",
        "neuronx_distributed.parallel_layers.utils:set_tensor_model_parallel_attributes": (
            "(tensor, is_parallel, dim, stride, num_partitions=-1, rank_ordering=None)"
        ),
    },
}


def signature(function: Callable[..., Any]) -> str:
    """Returns names, kinds and defaults of a function's parameters, or those of a class; no types.

    >>> signature(lambda a, *, b=1: a)
    '(a, *, b=1)'
    """
    kept = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in kept.parameters.values()]
    return str(kept.replace(parameters=parameters, return_annotation=kept.empty))


def differences(source: str) -> list[str]:
    """Returns each name of a source that can be imported here under another signature than the published."""
    lines = []
    for name, expected in PUBLISHED[source].items():
        module, _, function = name.partition(":")
        found = signature(getattr(import_module(module), function))
        if found != expected:
            lines.append(f"{name} has {found}; published by {source}: {expected}")
    return lines
