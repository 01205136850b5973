"""Carries past training what a language model does not load: a vision tower, layers for further
tokens.

    model.visual.*     the vision tower of Qwen3.5, whose language model is then
                       model.language_model.*
    mtp.*              layers that predict a second token (MTP), of Qwen3.5 and Qwen3-Next

transformers drops both without a word where it opens such a folder as a language model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import metadata_load, metadata_save
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from delta_trn.models.ecosystem.files import replaced, write_text
from delta_trn.models.ecosystem.heads import NUMBERS

FILES = "model*.safetensors"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def untouched(folder: Path) -> dict[str, Path]:
    """Returns the tensors that the language model of a folder drops without a word:
    name -> file.
    """
    classes: Any = AutoModelForCausalLM._model_mapping
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    patterns = (
        getattr(classes.get(type(config), None), "_keys_to_ignore_on_load_unexpected", None) or ()
    )
    files = {name: file for file in sorted(folder.glob(FILES)) for name in _dtypes(file)}
    return {name: file for name, file in files.items() if any(re.search(p, name) for p in patterns)}


def describe(names: dict[str, Path]) -> str:
    """Returns how many tensors there are under each prefix, "model.visual (153), mtp (15)"."""
    parts = [name.split(".")[: 2 if name.startswith("model.") else 1] for name in sorted(names)]
    return ", ".join(
        f"{name} ({n})" for name, n in Counter(".".join(part) for part in parts).items()
    )


def complete_weights(
    folder: str | Path, source: str | Path, dtype: torch.dtype | str | None = None
) -> list[str]:
    """Makes a folder of trained weights what its source was: with all of its tensors, and in its
    dtype.

        folder      what `save_pretrained` or a Trainer wrote of a whole model, its adapters merged
        source      the folder that the model was opened from
        dtype       of the trained weights; None: each tensor's in the source. A_log and dt_bias
                    stay float32
        returns     the names of the tensors that were added, which are as in the source, bit for
                    bit

    config.json becomes the source's, with what training changed, so that a vision-language model
    opens as one again; settings of its image processor are copied. README.md names the source as
    base_model, and its license, where it does not name them yet. Raises ValueError where there are
    no weights.
    """
    folder, source = Path(folder), Path(source)
    if folder.resolve() == source.resolve():
        raise ValueError(
            f"{folder} is its own source: its weights were overwritten; write to another folder"
        )
    stored = {
        name: kind for file in sorted(source.glob(FILES)) for name, kind in _dtypes(file).items()
    }
    trained = sorted(folder.glob(FILES))
    for place, found in ((folder, trained), (source, stored)):
        if not found:
            raise ValueError(
                f"{place} has no {FILES}: merge adapters into their model (merge_and_unload), and "
                "save that"
            )
    here, carried = {name for file in trained for name in _dtypes(file)}, untouched(source)
    rest = {name: file for name, file in carried.items() if name not in here}
    given = check_dtype(dtype)
    for file in trained:
        _cast(file, {name: given or stored.get(name) for name in here - carried.keys()})
    if rest:
        _add(folder, trained, _read(rest))
        for file in source.glob("*processor_config.json"):
            if not (folder / file.name).exists():
                with replaced(folder / file.name) as copy:
                    shutil.copy(file, copy)
    _write_config(folder, source, given)
    _write_card(folder / "README.md", source)
    return sorted(rest)


def cast_weights(folder: Path, dtype: torch.dtype | str) -> None:
    """Writes the weights of a folder in another dtype, but for A_log and dt_bias."""
    given = check_dtype(dtype)
    for file in sorted(folder.glob(FILES)):
        _cast(file, dict.fromkeys(_dtypes(file), given))
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(given).removeprefix("torch.")
    _write(folder / "config.json", config)


def check_dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    """Returns the dtype of that name. Raises ValueError for one
    that weights cannot be written in.
    """
    if name is None:
        return None
    found = getattr(torch, name, None) if isinstance(name, str) else name
    if found not in _DTYPES.values():
        known = ", ".join(str(kind).removeprefix("torch.") for kind in _DTYPES.values())
        raise ValueError(
            f"dtype={name!r} is none that weights are written in; choose one of {known}"
        )
    return found


def _dtypes(file: Path) -> dict[str, torch.dtype | None]:
    """Returns the names of a file's tensors, each with its dtype; None:
    none of floating-point numbers.
    """
    with safe_open(file, "pt") as tensors:
        return {name: _DTYPES.get(tensors.get_slice(name).get_dtype()) for name in tensors.keys()}  # noqa: SIM118


def _read(files: dict[str, Path]) -> dict[str, Tensor]:
    found = {}
    for file in sorted(set(files.values())):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in files if files[name] == file}
    return found


def _cast(file: Path, dtypes: dict[str, torch.dtype | None]) -> None:
    """Writes a file again with each tensor in its dtype, where that differs from what it has."""
    wanted = {
        name: dtypes.get(name) or kind
        for name, kind in _dtypes(file).items()
        if kind is not None and not name.endswith(NUMBERS)
    }
    if wanted != {name: kind for name, kind in _dtypes(file).items() if name in wanted}:
        tensors = {name: tensor.to(wanted.get(name)) for name, tensor in load_file(file).items()}
        with replaced(file) as beside:
            save_file(tensors, beside, metadata={"format": "pt"})


def _add(folder: Path, trained: list[Path], rest: dict[str, Tensor]) -> None:
    """Adds a file of weights to those of a folder, and writes which tensor is in which."""
    added = folder / "model-rest.safetensors"
    with replaced(added) as beside:
        save_file(rest, beside, metadata={"format": "pt"})
    files = [*trained, added]
    where, total = {}, 0
    for i, file in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        where |= dict.fromkeys(_dtypes(file), name)
        total += file.stat().st_size
        os.replace(file, folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    _write(folder / "model.safetensors.index.json", index)


def _write_config(folder: Path, source: Path, dtype: torch.dtype | None) -> None:
    """Writes config.json: the source's, with the language model's settings
    as training left them.
    """
    ours, theirs = (json.loads((place / "config.json").read_text()) for place in (folder, source))
    kind = theirs.get("dtype", theirs.get("torch_dtype"))
    kind = kind if dtype is None else str(dtype).removeprefix("torch.")
    if "text_config" in theirs and "text_config" not in ours:
        text = {
            name: ours[name]
            for name in ours.keys() - {"architectures", "dtype", "transformers_version"}
        }
        if "dtype" in theirs["text_config"]:
            text["dtype"] = kind
        ours = {**theirs, "text_config": text, "transformers_version": ours["transformers_version"]}
        ours.pop("torch_dtype", None)
    _write(folder / "config.json", ours | ({} if kind is None else {"dtype": kind}))


def _write_card(card: Path, source: Path) -> None:
    """Writes into a model card which model the weights come from:
    its name on the Hub, or its folder's.
    """
    cached = re.search(r"models--([^/]+)/snapshots/", f"{source.resolve()}/")
    base = cached[1].replace("--", "/") if cached else source.resolve().name
    written, theirs = (
        metadata_load(x) or {} if x.is_file() else {} for x in (card, source / "README.md")
    )
    license = {name: value for name, value in theirs.items() if name.startswith("license")}
    text = f"# {card.parent.resolve().name}\n\nTrained from {base}.\n"
    if card.is_file():
        text = card.read_text(encoding="utf-8")
    facts = {"library_name": "transformers", **license, "base_model": base, **written}
    with replaced(card) as beside:
        beside.write_text(text, encoding="utf-8")
        metadata_save(beside, facts)


def _write(path: Path, tree: dict[str, Any]) -> None:
    write_text(path, json.dumps(tree, indent=2, sort_keys=True) + "\n")
