"""delta-trn generate RUN_DIR --prompt TEXT [key=value ...]"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from delta_trn.train.settings.errors import UsageError
from delta_trn.train.settings.overrides import change, parse, read_arguments
from delta_trn.train.settings.schema import RunConfig, SampleSection

# What is drawn unless keys say otherwise, and the keys that have an effect here.
START = RunConfig(seed=0, sample=SampleSection(tokens=200, top_k=None))
KEYS = ("sample.tokens", "sample.temperature", "sample.top_k", "sample.top_p", "seed", "device")
EPILOG = """keys
  sample.tokens=200         at most so many
  sample.temperature=0.8    0: the most probable token each time
  sample.top_k=none         draw from the k most probable tokens
  sample.top_p=none         draw from the most probable tokens of this total probability
  seed=0                    the same seed, the same text
  device=auto               auto: a GPU if there is one, else the CPU; or a name
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn generate",
        description="Continue a text with a trained model. The text appears as it is made.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="the folder that `run` printed"
    )
    parser.add_argument(
        "changes", nargs="*", metavar="key=value", help="keys to change, those below"
    )
    parser.add_argument(
        "--prompt",
        required=True,
        help="text to continue; may be empty; best without a space at its end",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="above 1: avoid tokens already there (%(default)s)",
    )
    parser.add_argument("--checkpoint", default="last", help="best, last, or a step (%(default)s)")
    options = read_arguments(parser, arguments, section="sample")
    changes = parse(options.changes)
    asked = change(START, changes)
    for key in changes:
        if key not in KEYS:
            raise UsageError(
                f"{key} changes nothing in `generate`, whose keys are {', '.join(KEYS)}"
            )
    for name, value in (
        ("sample.tokens", asked.sample.tokens),
        ("--repetition-penalty", options.repetition_penalty),
    ):
        if not 0 < value < float("inf"):
            raise UsageError(f"{name}={value}: expected more than 0")

    from delta_trn.backends.machine import make_current, platforms
    from delta_trn.train.checkpoints.run_folder import RunFolder
    from delta_trn.train.run.model import pick_device
    from delta_trn.train.run.sample import continue_text, load_for_generation, read_checkpoint

    folder = RunFolder(options.run_dir)
    folder.read()  # it raises where the folder is no run's
    # one token after the other in growing shapes is what XLA devices are slowest at
    automatic = "cuda" if "cuda" in platforms() else "cpu"
    device = pick_device(automatic if asked.device == "auto" else asked.device)
    make_current(device)
    model, tokenizer = read_checkpoint(
        folder, options.checkpoint, lambda path: load_for_generation(path, device)
    )
    _write(options.prompt)
    how = {"seed": asked.seed, "repetition_penalty": options.repetition_penalty, "stream": _write}
    continue_text(model, tokenizer, options.prompt, asked.sample, **how)
    print()
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
