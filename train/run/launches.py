"""What a run or a model launches on a GPU: its own code, within a stand-in of that GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from delta_trn.models import DeltaConfig
from delta_trn.models.ecosystem.patching import patch_transformers
from delta_trn.train.data.loader import Batch
from delta_trn.train.neuron.compiling import compile_all
from delta_trn.train.parallel.layout import layout_of, require_divisible
from delta_trn.train.run.evaluate import evaluate, held_out_crops
from delta_trn.train.run.loop import Probe
from delta_trn.train.run.setup import Run, start
from delta_trn.train.run.step import loss_function
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import DistributionSection, RunConfig

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def require_recordable(config: RunConfig, world: int) -> None:
    """Raises ConfigError for a run whose launches one process cannot tell before it runs: one that
    divides layers or weights among processes, or that torch.compile makes kernels of.
    """
    require_divisible(config, world)
    if config.compile:
        raise ConfigError(
            "compile=true: PyTorch makes kernels of the whole step, and which they are is known "
            "only on the GPU; warm up with compile=false for those of ours, and let the run "
            "compile PyTorch's when it starts"
        )
    parts = config.distribution
    if world > 1 and (parts.mode == "fsdp" or parts.tensor * parts.context > 1):
        raise ConfigError(
            f"distribution.mode={parts.mode} distribution.tensor={parts.tensor} "
            f"distribution.context={parts.context} on {world} processes: what they launch is known "
            "only while they run; start the run, in which they compile each kernel once"
        )


def launch_run(
    config: RunConfig, world: int, probe_of: Callable[[Run], Probe | None] = lambda run: None
) -> None:
    """Does what one of `world` processes of a run does, on the device "cuda" of a stand-in.

    Steps, evaluations, a sample; on rows of one document and of several.
    """
    require_recordable(config, world)
    layout = layout_of(config, world)
    batch = config.batch.model_copy(update={"sequences": layout.sequences, "micro": layout.micro})
    own: dict[str, Any] = {"batch": batch, "device": "cuda"}
    own["distribution"] = DistributionSection()
    alone = {name: x for name, x in os.environ.items() if name not in TORCHRUN}
    with (
        tempfile.TemporaryDirectory(prefix="delta-trn-warmup-") as folder,
        mock.patch.dict(os.environ, alone, clear=True),
        start(config.model_copy(update={**own, "out": str(Path(folder) / "run")})) as run,
    ):
        compile_all(run, lambda told: None, probe_of(run))
        _launch_documents(run)
        if config.sample.tokens:
            prompt = run.dataset.tokenizer.encode(config.sample.prompt)
            _serve(run.model, torch.tensor([prompt], device="cuda"))


def _launch_documents(run: Run) -> None:
    """Trains and evaluates on rows of one document, and of two: a batch may have either."""
    loss = loss_function(run.sharding, run.config, run.device)
    for training in (True, False):
        run.model.train(training)
        (crop,) = held_out_crops(run.config, run.dataset, run.layout, at_most=1)
        batch = run.batches.next_batch() if training else crop
        for batch_of in _documents(batch.split(run.layout.micro)[0] if training else batch):
            if training:
                loss(*batch_of.each(lambda x: x.to(run.device))).backward()
            else:
                evaluate(loss, [batch_of], run.device, run.team)


def _documents(batch: Batch) -> Iterator[Batch]:
    """Yields a batch with one document in each row, and with two."""
    if batch.position_ids is None:
        return
    place = torch.arange(batch.inputs.shape[1], dtype=batch.position_ids.dtype)
    for length in (len(place), len(place) // 2 + 1):
        yield batch._replace(position_ids=(place % length).expand_as(batch.position_ids))


def require_model(folder: str) -> None:
    """Raises ConfigError unless a folder has a model's config.json."""
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"--model {folder}: no config.json there; name the folder of a model")


def launch_model(folder: str, rows: int, length: int) -> None:
    """Does what users of a model do, on the device "cuda" of a stand-in: training, prefill, a token.

    The model is that of a folder's config.json, with patched layers where it is one of
    transformers' own; its weights are not read. rows sequences of `length` tokens are given to it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).to("cuda")
    if not isinstance(config, DeltaConfig):
        patch_transformers(model)
    ids: Tensor = torch.zeros((rows, length), dtype=torch.int64, device="cuda")
    model.train()
    model(ids, labels=ids).loss.backward()
    _serve(model, ids)


def _serve(model: Any, ids: Tensor) -> None:
    """Reads a prompt, and two tokens after it, as `generate` does."""
    model.eval()
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
        for _ in range(2):
            past = model(ids[:, :1], past_key_values=past, use_cache=True).past_key_values
