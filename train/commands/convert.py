"""delta-trn convert FROM --to DIR"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DESCRIPTION = """Write the weights of a language model of ours in our format, delta, or in that of
flash-linear-attention's GatedDeltaNetForCausalLM and KDAForCausalLM, fla. What FROM is in is seen from its
config.json. The model computes the same afterwards; what has no equivalent is refused."""
# what belongs to a text model besides config.json and weights
BESIDE = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "generation_config.json",
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="delta-trn convert", description=DESCRIPTION)
    parser.add_argument(
        "source", metavar="FROM", type=Path, help="a folder of weights, or one that `run` printed"
    )
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--format", choices=["delta", "fla"], default="delta", help="what to write (%(default)s)"
    )
    parser.add_argument(
        "--checkpoint", default="last", help="of a run: best, last, or a step (%(default)s)"
    )
    options = parser.parse_args(arguments)

    from delta_trn.models import DeltaForCausalLM
    from delta_trn.models.ecosystem import save_model
    from delta_trn.train.checkpoints.run_folder import RunFolder
    from delta_trn.train.run.sample import read_checkpoint
    from delta_trn.train.settings.errors import UsageError

    source, to = options.source, options.to
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"{to} exists and is not empty; give --to a new folder")
    try:
        if (source / "checkpoints").is_dir():
            model, beside = read_checkpoint(RunFolder(source), options.checkpoint, _read)
        else:
            model, beside = _read(source)
        if not isinstance(model, DeltaForCausalLM):
            raise UsageError(f"{source} is a {type(model).__name__}: load_model opens it as it is")
        save_model(model, to, options.format)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for name, content in beside.items():
        (to / name).write_bytes(content)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{to}: {count:,} parameters, {str(model.dtype).removeprefix('torch.')}, format "
        f"{options.format}"
    )
    return 0


def _read(source: Path) -> tuple[Any, dict[str, bytes]]:
    """Returns the model of a folder, and the files beside it that go along."""
    from delta_trn.models.ecosystem import load_model

    files = {file.name: file for pattern in BESIDE for file in sorted(source.glob(pattern))}
    return load_model(source), {name: file.read_bytes() for name, file in files.items()}
