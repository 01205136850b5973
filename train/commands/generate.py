"""delta-trn generate RUN_DIR --prompt TEXT"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)

    from delta_trn.train.checkpoints.run_folder import RunFolder
    from delta_trn.train.run.sample import Sampling, chosen_checkpoint, continue_text, load_for_generation

    sampling = Sampling(
        tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )
    folder = RunFolder(options.run_dir)
    config, _ = folder.read()
    path = chosen_checkpoint(folder, options.checkpoint)
    model, tokenizer = load_for_generation(path, _device(options.device), config.model.pretrained)
    _write(options.prompt + tokenizer.turn)
    continue_text(model, tokenizer, options.prompt, sampling, stream=_write)
    print()
    return 0


def _device(name: str) -> "torch.device":
    from delta_trn.backends.machine import make_current, platforms
    from delta_trn.train.run.model import pick_device

    # one token after the other in growing shapes is what XLA devices are slowest at
    automatic = "cuda" if "cuda" in platforms() else "cpu"
    device = pick_device(automatic if name == "auto" else name)
    make_current(device)
    return device


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="delta-trn generate",
        description="Continue a text with a trained model. The text appears as it is made.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder that `run` printed")
    parser.add_argument("--prompt", required=True, help="text to continue; may be empty")
    parser.add_argument("--tokens", type=int, default=200, help="at most so many (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: the most probable token each time (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, help="draw from the k most probable tokens")
    parser.add_argument(
        "--top-p", type=float, help="draw from the most probable tokens of this total probability"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="above 1: avoid tokens already there (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same text (%(default)s)")
    parser.add_argument("--checkpoint", default="last", help="best, last, or a step (%(default)s)")
    parser.add_argument(
        "--device", default="auto", help="auto: a GPU if there is one, else the CPU; or a name"
    )
    return parser
