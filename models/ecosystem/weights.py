"""Opens a folder of weights, whoever wrote it, and writes one that others can open."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from delta_trn.models.config import DeltaConfig
from delta_trn.models.ecosystem import flash_linear_attention
from delta_trn.models.ecosystem.files import write_text
from delta_trn.models.ecosystem.flash_linear_attention import State
from delta_trn.models.ecosystem.heads import check_weights, keep_float32
from delta_trn.models.ecosystem.untouched import (
    FILES,
    cast_weights,
    check_dtype,
    complete_weights,
    describe,
    untouched,
)
from delta_trn.models.head_numbers import head_layers
from delta_trn.models.language_model import DeltaForCausalLM


def load_model(folder: str | Path, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """Returns the model that a folder with config.json and weights holds, ready to use.

        folder      our model; a Gated DeltaNet model of transformers (Qwen3-Next, Qwen3.5,
                    OLMo-Hybrid, ...); or one of flash-linear-attention, which becomes ours
        dtype       of the weights; None: as they are stored. A_log and dt_bias are always float32

    Warns of dead heads by layer and head, and of tensors that the model leaves out, such as a
    vision tower: `save_model` and `complete_weights` carry them over. Raises ValueError for a
    folder without a model, and for a model that has no equivalent here, or whose code lies in the
    folder, naming what it is.
    """
    try:
        return _load(Path(folder), dtype)
    except UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{folder} has a PyTorch file with more than tensors in it "
            f"({found[1] if found else 'damaged'}), which could run code, so it is not opened; get "
            "the weights as safetensors"
        ) from None


def _load(folder: Path, dtype: torch.dtype | str | None) -> PreTrainedModel:
    theirs = _read_config(folder)
    if theirs["model_type"] in flash_linear_attention.FAMILIES:
        config = flash_linear_attention.to_config(theirs)
        state = flash_linear_attention.to_state(_read_weights(folder), theirs, config)
        _require_all(state, config)
        dtype = state["model.embed.weight"].dtype if dtype in (None, "auto") else dtype
        model = DeltaForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    else:
        classes: Any = AutoModelForCausalLM._model_mapping
        code = theirs.get("auto_map")
        if code and theirs["model_type"] not in CONFIG_MAPPING:
            raise ValueError(
                f"{folder} is a {theirs['model_type']}, whose code lies in the folder and is not "
                f"run: {', '.join(map(str, code.values()))}; look at it, and open it with "
                "AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)"
            )
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if type(config) not in classes:
            raise ValueError(
                f"{folder} holds a {config.model_type}, which is no causal language model"
            )
        undo = keep_float32(classes[type(config)])
        try:
            opener: Any = AutoModelForCausalLM
            model, report = opener.from_pretrained(
                folder, dtype=dtype or "auto", output_loading_info=True, trust_remote_code=False
            )
        finally:
            undo()
        # transformers fills them with random numbers, and warns
        if absent := sorted(report["missing_keys"]):
            raise ValueError(
                f"{folder} has no weights for {', '.join(absent[:8])}; {len(absent)} are missing"
            )
        if rest := untouched(folder):
            warnings.warn(
                f"{type(model).__name__} has no use for {len(rest)} tensors of {folder}: "
                f"{describe(rest)}. save_model(model, ...) and complete_weights(..., source) write "
                "them as they are",
                stacklevel=3,
            )
    if any(head_layers(model)) and not (dead := check_weights(model)):
        warnings.warn(str(dead), stacklevel=3)
    return model


def save_model(
    model: PreTrainedModel,
    folder: str | Path,
    format: Literal["delta", "fla"] = "delta",
    max_shard_size: str = "5GB",
    dtype: torch.dtype | str | None = None,
) -> None:
    """Writes config.json and safetensors that load_model, and the code that `format` names, can
    open.

        format      "delta": as save_pretrained does, and with the tensors of the folder that the
                    model was opened from and does not use (`complete_weights`); "fla":
                    flash-linear-attention 0.5.2's GatedDeltaNetForCausalLM, or 0.6.0's
                    KDAForCausalLM for Kimi Delta Attention
        dtype       of the weights; None: as in the folder that the model was opened from, or else
                    as they are

    Raises ValueError for a model that the other code cannot be, naming what it lacks, and for
    adapters.
    """
    folder = Path(folder)
    check_dtype(dtype)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is no whole model; merge_and_unload() of PEFT returns it"
        )
    source = Path(getattr(model.config, "_name_or_path", None) or "")
    if format == "delta":
        is_its_own = folder.resolve() == source.resolve()
        if is_its_own and untouched(source):
            raise ValueError(
                f"{folder} has tensors that this model does not use; save to another folder"
            )
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if not is_its_own and (source / "config.json").is_file() and any(source.glob(FILES)):
            complete_weights(folder, source, dtype)
        elif dtype is not None:
            cast_weights(folder, dtype)
        return
    if not isinstance(model, DeltaForCausalLM):
        raise ValueError(
            f"a {type(model).__name__} cannot be written as {format!r}; only our own models can"
        )
    theirs = flash_linear_attention.from_config(model.config)
    theirs["dtype"] = str(model.dtype).removeprefix("torch.")
    state = flash_linear_attention.from_state(model.state_dict(), model.config)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(
        {name: tensor.contiguous() for name, tensor in state.items()},
        folder,
        max_shard_size=max_shard_size,
    )
    write_text(folder / "config.json", json.dumps(theirs, indent=2) + "\n")
    if dtype is not None:
        cast_weights(folder, dtype)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; give a folder with config.json and weights")
    config = json.loads(path.read_text())
    if "model_type" not in config:
        raise ValueError(
            f"{path} names no model_type; of a run, give one of the folders in checkpoints/"
        )
    return config


def _read_weights(folder: Path) -> State:
    """Returns the tensors of a folder: safetensors, or else PyTorch's files, whole or sharded."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ValueError(
            f"{folder} has config.json and no weights: neither safetensors nor pytorch_model.bin"
        )
    pickled = partial(torch.load, map_location="cpu", weights_only=True)
    load = load_file if files[0].suffix == ".safetensors" else pickled
    return {name: tensor for file in files for name, tensor in load(file).items()}


def _require_all(state: State, config: DeltaConfig) -> None:
    """Raises ValueError that names weights which the model lacks, or has not,
    or has in another shape.
    """
    with torch.device("meta"):
        model = DeltaForCausalLM(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = [
        f"{name}: {found.get(name, 'missing')}, expected {expected.get(name, 'none')}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(
            f"weights do not fit config.json, under our names: {'; '.join(wrong[:8])}{more}"
        )
