"""delta-trn export RUN_DIR --to DIR"""

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn export",
        description="Write a run's model as a folder that transformers opens: weights, configuration, "
        "tokenizer and a model card, without what only training needs.",
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="the folder that `run` printed"
    )
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="folder to make")
    parser.add_argument("--checkpoint", default="best", help="best, last, or a step (%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights (as they are: float32)",
    )
    parser.add_argument(
        "--license", metavar="NAME", help="the weights' license, for the card, as the Hub names it"
    )
    parser.add_argument(
        "--remote-code",
        action="store_true",
        help=(
            "add code: from_pretrained(DIR, trust_remote_code=True) then needs torch and "
            "transformers only"
        ),
    )
    options = parser.parse_args(arguments)

    from delta_trn.train.run.export import export

    files = export(
        options.run_dir,
        options.checkpoint,
        options.to,
        remote_code=options.remote_code,
        dtype=options.dtype,
        license=options.license,
    )
    code = [path for path in files if path.suffix == ".py"]
    for path in files:
        if path not in code:
            print(f"{path.stat().st_size:>13,}  {path.name}")
    if code:
        print(f"{sum(path.stat().st_size for path in code):>13,}  {len(code)} files of code, *.py")
    print(f"exported to {options.to}; its README.md says how to load it")
    return 0
