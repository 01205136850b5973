"""Writes a trained model for others to load: weights, tokenizer and a model card,
and on request its code.
"""

import os
from pathlib import Path
from typing import Any

from delta_trn.train.checkpoints.contents import State, read_state
from delta_trn.train.checkpoints.run_folder import Origin, RunFolder
from delta_trn.train.checkpoints.store import describe
from delta_trn.train.files import disk_errors, make_fresh_folder, remove, sync
from delta_trn.train.run.sample import load_for_generation, read_checkpoint
from delta_trn.train.settings.errors import RunFolderError
from delta_trn.train.settings.schema import RunConfig

CARD = "README.md"


def export(
    run: Path,
    which: str,
    to: Path,
    *,
    remote_code: bool,
    dtype: str | None = None,
    license: str | None = None,
) -> list[Path]:
    """Writes one checkpoint of a run as a folder that stands alone. Returns its files.

    which           best, last or a step
    to              the folder to make; it appears when everything in it is written
    remote_code     adds code, so that transformers loads the model where this package is not
                    installed
    dtype           of the weights, but for A_log and dt_bias; None: as they are, which is float32
    license         what the card says of the weights' license, as the Hub names it; None: nothing

    Raises RunFolderError where `to` is taken, CheckpointError where a checkpoint is missing or
    damaged.
    """
    from torch import device
    from transformers.utils.logging import disable_progress_bar

    from delta_trn.models.ecosystem.weights import save_model

    to = to.expanduser().absolute()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunFolderError(
            f"{to} is there already, and not an empty folder; choose another --to DIR"
        )
    folder = RunFolder(run)
    config, origin = folder.read()
    (state, _), (model, tokenizer) = read_checkpoint(
        folder, which, lambda path: (read_state(path), load_for_generation(path, device("cpu")))
    )
    beside = to.with_name(f".{to.name}.tmp")
    with disk_errors(to):
        try:
            make_fresh_folder(beside)
            # nothing in the model limits it, and other tools ask for a limit
            if model.config.positions == "rope":
                model.config.max_position_embeddings = config.batch.length
            if remote_code:
                from delta_trn.models.ecosystem.remote_code import write_remote_code

                write_remote_code(beside, model.config)
            disable_progress_bar()
            save_model(model, beside, dtype=dtype)
            tokenizer.save(beside)
            summary = folder.read_summary()  # of the whole held-out text, if it is of this step
            in_order = summary is not None and summary["step"] == state.step
            measured = summary if in_order else folder.evaluation_after(state.step)
            card = model_card(config, origin, state, measured, model, remote_code, dtype, license)
            (beside / CARD).write_text(card, encoding="utf-8")
            describe(beside.iterdir())  # which also sets their modes, and waits for the disk
            os.rename(beside, to)
        except BaseException:
            remove(beside)
            raise
    sync(to.parent)
    return sorted(to.iterdir())


def model_card(
    config: RunConfig,
    origin: Origin,
    state: State,
    measured: dict[str, Any] | None,
    model: Any,
    remote_code: bool,
    dtype: str | None = None,
    license: str | None = None,
) -> str:
    """Returns the text of README.md, with figures of the run's own files."""
    m, o, b = config.model, config.optimizer, config.batch
    parameters, attention = sum(p.numel() for p in model.parameters()), len(m.attention_layers)
    kinds = {"Gated DeltaNet": m.layers - attention, "attention": attention}
    layers = " and ".join(f"{count} {kind}" for kind, count in kinds.items() if count) + " layers"
    layers += "" if m.residual == "additive" else f", {m.residual}"
    rows = {
        "model": f"{layers}, width {m.width}, {parameters:,} parameters",
        "text": f"{Path(config.data.source).name}, {config.data.tokenizer} tokenizer, "
        f"{m.vocab_size or 0:,} rows",
        "training": (
            f"{state.step:,} steps of {b.sequences} x {b.length} tokens, {state.tokens:,} tokens"
        ),
        "optimizer": (
            f"{o.name}, learning rate {o.lr:g} at width {m.base_width}, {config.parametrization}"
        ),
        "arithmetic": f"{config.precision}, delta rule by the backend {config.backend}",
        "software": ", ".join(f"{name} {version}" for name, version in origin.versions.items()),
    }
    if dtype is not None:
        rows["weights"] = f"{dtype}, trained in float32"
    if measured is not None:
        loss, perplexity, bits = (
            measured[name] for name in ("loss", "perplexity", "bits_per_byte")
        )
        tokens = f" on {measured['held_out']:,} tokens" if "held_out" in measured else ""
        rows["held-out loss"] = (
            f"{loss:.4f} nats per token{tokens}, perplexity {perplexity:.2f}"
            f"{'' if bits is None else f', {bits:.4f} bits per byte'}"
        )
    return _CARD.read_text(encoding="utf-8").format(
        name=config.name,
        table="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        needs=_NEEDS_NOTHING if remote_code else _NEEDS_PACKAGE,
        first=""
        if remote_code
        else "import delta_trn  # registers the architecture with transformers\n",
        license="" if license is None else f"license: {license}\n",
        trust=", trust_remote_code=True" if remote_code else "",
    )


_CARD = Path(__file__).with_name("card.md")
_NEEDS_PACKAGE = "It needs the package delta-trn."
_NEEDS_NOTHING = """\
It needs torch and transformers. The model's code is in this folder: look at it before you trust it. It
computes with PyTorch on every device; the package delta-trn has kernels. With that installed, write
`import delta_trn` first, and leave out `trust_remote_code`. The code is under the Apache License 2.0."""
