"""Writes the run that test_stored_run.py reads, beside this file. It replaces what was there.

    python -m tests.train.stored_run.record

A run of six steps with a layer of each kind, of which the checkpoint of step 3 stays, and the
logits that its model computes.
"""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.support import tiny_run

HERE = Path(__file__).parent
MADE = Path("/tmp/stored-run")  # a run stores where its data lay: nobody's folder
CHECKPOINT = HERE / "run" / "checkpoints" / "step-00000003"
PROMPT, WORDS = (
    slice(65, 75),
    slice(65, 69),
)  # the bytes of a prompt, and those whose logits are kept


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Returns some of the logits after the prompt."""
    with torch.no_grad():
        ids = torch.arange(PROMPT.start, PROMPT.stop)[None]
        return model.eval()(ids).logits[0, -1, WORDS]


def main() -> None:
    import delta_trn  # noqa: F401  registers the architecture

    shutil.rmtree(MADE, ignore_errors=True)
    MADE.mkdir()
    source = MADE / "sums.txt"
    source.write_text(tiny_run.make_text()[:6000])
    tiny_run.prepare_text(source, MADE / "data", val_fraction=0.1)
    changes = {
        "model.width": 8,
        "model.base_width": 4,
        "model.heads": 2,
        "model.layers": 2,
        "model.attention_layers": [1],
        "model.tie_word_embeddings": False,
        "batch.sequences": 4,
        "checkpoint.every": 3,
        "evaluation.final_tokens": 0,
        "sample.tokens": 0,
        "steps": 6,
    }
    tiny_run.train("run", "tiny", *tiny_run.keys(MADE / "data", MADE / "run", **changes))
    for folder in ("data", "run"):
        shutil.rmtree(HERE / folder, ignore_errors=True)
        shutil.copytree(MADE / folder, HERE / folder, symlinks=True)
    shutil.rmtree(MADE)
    kept = {"config.json", "metrics.jsonl", "checkpoints"}
    for path in (HERE / "run").iterdir():
        if path.name not in kept:
            path.unlink()
    for path in CHECKPOINT.parent.iterdir():
        if path != CHECKPOINT:
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
    found = logits(AutoModelForCausalLM.from_pretrained(CHECKPOINT))
    (HERE / "logits.json").write_text(json.dumps(found.tolist()) + "\n")


if __name__ == "__main__":
    main()
