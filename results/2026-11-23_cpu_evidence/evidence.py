"""Runs the sweeps of this folder again, in the order of what they say.

    python evidence.py [STAGE ...] [key=value ...]

Each is a sweep in runs/evidence/STAGE that stops when its hours are over; the same command continues it. The
parametrizations with gates from 1/m and with rate 1 for scalars, which some stages had, are no more; nor are
the settings of the skip, the bound and the larger epsilon, which commit 50ffe7c has.
"""

import json
import subprocess
import sys
from pathlib import Path

HALF = ":1.4142135623730951"  # rates half an octave apart
ADAMW = {"optimizers": "adamw", "parametrizations": "mup", "model.mixer_output_init": "0"}
SGD = {
    "optimizers": "sgd", "parametrizations": "mup", "steps": "150", "schedule.warmup": "30",
    "widths": "64,256", "lrs": "2**-4..1", "optimizer.momentum": "0.9", "model.mixer_output_init": "0",
}  # fmt: skip
WALL = {
    "as it is": {}, "clipping norm": {"optimizer.clip_norm": "width"},
}  # fmt: skip
DEPTH = {f"{n} layers": {"model.layers": str(n)} for n in (2, 4, 8)} | {
    f"CompleteP, {n} layers": {"model.layers": str(n), "model.base_layers": "2"} for n in (4, 8)
}
HORIZON = {f"{n} steps": {"steps": str(n), "schedule.warmup": str(n // 10)} for n in (300, 1200)}
BATCH = {
    f"{n} sequences": {
        "batch.sequences": str(n), "steps": str(2400 // n), "schedule.warmup": str(240 // n),
    } for n in (4, 8, 16)
}  # fmt: skip
# stage: what it is for, after how many hours it stops, the arms that it compares, its axes and keys
STAGES = {
    "widths": ("AdamW, muP, 4 paired seeds", 2.0, {}, ADAMW | {
        "widths": "64,128,256", "lrs": f"2**-9..2**-5{HALF}", "seeds": "0,1,2,3"}),
    # its best rate, flank and wall were predicted (prediction.json) and committed before it was run
    "width_512": ("width 512", 1.6, {}, ADAMW | {
        "widths": "512", "lrs": f"2**-9..2**-5{HALF}", "seeds": "0,1"}),
    "standard": ("the standard parametrization", 1.0, {}, ADAMW | {
        "parametrizations": "sp", "widths": "64,128,256", "lrs": f"2**-10..2**-5{HALF}", "seeds": "0,1"}),
    "muon": ("Muon for hidden matrices", 0.8, {}, ADAMW | {
        "optimizers": "muon", "optimizer.momentum": "0.95", "widths": "64,256", "seeds": "0,1",
        "lrs": f"2**-8.5..2**-4{HALF}"}),
    "sgd": ("SGD with momentum 0.9", 0.8, {}, SGD | {"parametrizations": "mup,mup_authors", "seeds": "0,1"}),
    "depth": ("depth, without a rule and with CompleteP", 1.0, DEPTH, ADAMW | {
        "widths": "64", "lrs": "2**-9..2**-5", "seeds": "0,1"}),
    "horizon": ("300 and 1200 steps", 1.0, HORIZON, ADAMW | {
        "widths": "64,128", "lrs": "2**-9..2**-5", "seeds": "0,1"}),
    "batch": ("batches at one number of tokens", 1.0, BATCH, ADAMW | {
        "widths": "64,128", "lrs": "2**-9..2**-5", "seeds": "0,1"}),
    "wall": ("what stops the wall under AdamW", 1.5, WALL, ADAMW | {
        "widths": "64,256", "lrs": "2**-8..2**-5", "seeds": "0,1"}),
    "wall_sgd": ("what stops the wall under SGD", 1.5, WALL, SGD | {"lrs": "2**-3..1", "seeds": "0,1"}),
    "decay": ("weight decay that can be seen", 2.0, {
        name: {"optimizer.independent_weight_decay": name} for name in ("false", "true")
    }, ADAMW | {
        "optimizer.weight_decay": "1", "steps": "1200", "schedule.warmup": "120", "widths": "64,256",
        "seeds": "0,1", "lrs": "2**-8..2**-6"}),
    "start": ("mixers from 0 and at full size, 4 million tokens", 2.5, {
        name: {"model.mixer_output_init": name} for name in ("1", "0")
    }, {
        "optimizers": "adamw", "parametrizations": "mup", "steps": "4000", "schedule.warmup": "400",
        "widths": "128", "seeds": "0,1,2", "lrs": "2**-8..2**-7", "data.source": "site-packages",
        "data.max_tokens": "20000000"}),
    "ddl": ("Deep Delta Learning", 1.5, {}, {
        "optimizers": "adamw", "parametrizations": "mup,sp", "model.residual": "ddl", "widths": "64,256",
        "model.ddl_value_channels": "4", "model.ddl_compressor": "token", "seeds": "0,1",
        "lrs": "2**-9..2**-5"}),
}  # fmt: skip


def main(words: list[str]) -> int:
    changes = dict(word.split("=", 1) for word in words if "=" in word)
    for name in [word for word in words if "=" not in word] or STAGES:
        purpose, hours, arms, keys = STAGES[name]
        folder = Path("runs/evidence") / name
        print(f"{name}: {purpose}; stops after {hours:g} h", flush=True)
        options = {
            **keys,
            **changes,
            "out": str(folder),
            "threads": "1",
            "max_minutes": str(60 * hours),
        }
        if arms:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "arms.json").write_text(json.dumps(arms))
            options["arms"] = str(folder / "arms.json")
        command = [
            "delta-trn",
            "sweep",
            "transfer",
            *(f"{key}={value}" for key, value in options.items()),
        ]
        if status := subprocess.run(command, check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
