"""Times what the host of a Trn1 does for a micro-batch: it records the graph of forward and
backward.

    python -m tools.host_time gdn_mup_adamw model.width=512 --micro 1 3 5

Runs on torch_xla's CPU device (`make .venv-xla/.ready` makes an environment that has it). The NKI
kernels are stubs, which return tensors of the right shapes at once: what NKI itself does for a call
comes on top. For each size of a micro-batch a line says:

    ms, ms per sequence     CPU time of recording, the median of `--repeat` times, and the least, of
                            which a busy machine takes the least; nothing is compiled or run
    step_ms                 the same of a step of one micro-batch, which besides casts the weights
                            of products and cuts the sums of their gradients, once a step
    ATen operations         that autograd and the model call, and how many of these are views
    NKI calls               of the kernels
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from delta_trn.backends import dispatch, machine
from delta_trn.models.layers import micro_batches
from delta_trn.train.recipes import recipe
from delta_trn.train.run.model import make_model, model_config, vocabulary
from delta_trn.train.run.step import loss_function
from delta_trn.train.settings.overrides import apply, parse
from nki_simulator.kernel import Kernel

F32 = torch.float32
Shapes = list[tuple[tuple[int, ...], torch.dtype]]
calls: list[Shapes] = []  # of a micro-batch, what each returns
ready: list[list[Tensor]] = []  # outputs of the calls to come


def shapes_of(name: str, a: tuple[Any, ...]) -> Shapes:
    """Returns the shapes and dtypes of the outputs of a kernel that was called with `a`."""
    if name == "gated_delta_layer_fwd":
        x, z, K, save, C = a[0], a[4], a[12], a[15], a[16]
        (N, T, HV, V), channels, dtype = z.shape, x.shape[2], x.dtype
        value, key = ((N, T, HV, V), dtype), ((N, T, (channels - HV * V) // (2 * K), K), dtype)
        outputs = [value, ((N, HV, K, V), F32)]
        if save:
            states = ((N, -(-T // C) - 1, K, HV, V), F32)
            outputs += [
                key,
                key,
                value,
                value,
                ((N, channels, T), F32),
                *([states] if T > C else []),
            ]
        return outputs
    if name == "gated_delta_layer_bwd":
        x, weight_t, q, beta, z = a[1], a[2], a[3], a[9], a[10]
        (N, T, channels), (HV, V), W, K = x.shape, z.shape[2:], weight_t.shape[0], q.shape[3]
        g = (beta.shape, beta.dtype)
        sums: Shapes = [((N, W, channels), F32), g, g, (z.shape, z.dtype), ((N, HV * V), F32)]
        return [(x.shape, x.dtype), *sums, ((N, HV, K, V), F32)]
    if name == "gated_rms_norm_fwd":
        return [(a[0].shape, a[0].dtype)]
    if name == "gated_rms_norm_bwd":
        x, z, gated = (a[1].shape, a[1].dtype), (a[2].shape, a[2].dtype), a[5]
        return [x, *([z] if gated else []), (a[3].shape, a[3].dtype)]
    if name == "cross_entropy_bwd":
        x, w = a[1], a[3]
        return [((x.shape[0], 1), F32), (x.shape, x.dtype), (w.shape, F32)]
    raise SystemExit(f"kernel {name} has no stub; add its outputs to tools/host_time.py")


def stub(kernel: Kernel, *arguments: Any) -> Any:
    """Returns what a kernel would, with nothing in it."""
    name = kernel.function.__name__
    shapes = shapes_of(name, arguments)
    device = arguments[0].device
    outputs = ready.pop(0) if ready else make(shapes, device)
    calls.append(shapes)
    assert all((x.shape, x.dtype) == shape for x, shape in zip(outputs, shapes, strict=True)), name
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def make(shapes: Shapes, device: torch.device) -> list[Tensor]:
    """Makes the outputs of a call, which takes the host time that is not to be counted."""
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]


class Operations(TorchDispatchMode):
    """Says for each ATen operation whether it is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [x.alias_info for x in func._schema.returns]
        self.views.append(any(x is not None and not x.is_write for x in aliases))
        return func(*args, **(kwargs or {}))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("changes", nargs="*", help="settings as in `delta-trn run`")
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args(argv)
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("XLA_DISABLE_FUNCTIONALIZATION", "1")  # as torch-neuronx sets it
    # before the first backward pass, at which autograd counts the devices
    device = machine.pick("xla")
    config = apply(recipe(options.recipe), parse(options.changes))
    backends = {
        **dispatch.BACKENDS,
        "nki": replace(dispatch.BACKENDS["nki"], unavailable=lambda _: None),
    }
    with patch.object(Kernel, "__call__", stub), patch.dict(dispatch.BACKENDS, backends):
        for micro in options.micro:
            line = {"recipe": options.recipe, "changes": options.changes, "micro": micro}
            with micro_batches():
                line |= measure(config, device, micro, options.repeat)
            print(json.dumps(line), flush=True)


def measure(config: Any, device: torch.device, micro: int, repeat: int) -> dict[str, Any]:
    """Returns what one micro-batch takes to record,
    after a first one that loads what is loaded once.
    """
    model = make_model(model_config(config, rows=vocabulary(config)), seed=0, device=device).train()
    tokens = torch.zeros((micro, config.batch.length), dtype=torch.int64).to(device)
    loss = loss_function(model, config, device)
    operations = Operations()
    calls.clear()
    for p in model.parameters():  # as in all micro-batches but the first
        p.grad = torch.zeros_like(p)
    machine.synchronize(device)
    time.sleep(1)  # threads that move data to the device would count
    machine.spare_host(device)  # as a run does

    def record(scope: Any) -> float:
        """Returns the CPU seconds of one micro-batch within a scope, the scope's end included."""
        ready[:] = [make(shapes, device) for shapes in calls]
        calls.clear()
        began = time.process_time()
        with scope:
            (loss(tokens, tokens) / 2).backward()
        taken = time.process_time() - began
        import_module("torch_xla")._XLAC._clear_pending_irs(str(device))
        return taken

    record(nullcontext())  # loads what is loaded once
    ready[:] = [make(shapes, device) for shapes in calls]
    calls.clear()
    with torch.autograd.set_multithreading_enabled(False), operations:
        loss(tokens, tokens).backward()
    import_module("torch_xla")._XLAC._clear_pending_irs(str(device))
    times = [record(nullcontext()) for _ in range(repeat)]
    steps = [record(micro_batches()) for _ in range(repeat)]
    ms = 1e3 * median(times)
    return {
        "ms": round(ms, 2), "ms_per_sequence": round(ms / micro, 2),
        "least_ms_per_sequence": round(1e3 * min(times) / micro, 2),
        "step_ms": round(1e3 * median(steps), 2), "aten": len(operations.views),
        "views": sum(operations.views), "nki_calls": len(calls),
    }  # fmt: skip


if __name__ == "__main__":
    main()
