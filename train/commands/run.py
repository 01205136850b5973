"""delta-trn run RECIPE [key=value ...]"""

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from delta_trn.train.recipes import RECIPES, recipe, summary, variables
from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.overrides import apply, parse, read_arguments
from delta_trn.train.settings.schema import RunConfig, declaration, flatten
from delta_trn.train.watch.display import WIDTH_IN_A_FILE

if TYPE_CHECKING:
    from delta_trn.train.run.setup import Run

KEY_WIDTH = 36  # of the column of keys
# What most runs need; `--keys` shows these and what differs from the defaults, `--all-keys` the
# rest, too.
USUAL = frozenset(
    (
        *(
            "out",
            "steps",
            "epochs",
            "seed",
            "device",
            "backend",
            "precision",
            "parametrization",
            "compile",
        ),
        *(
            "gradient_checkpointing",
            "max_minutes",
            "model.width",
            "model.base_width",
            "model.layers",
        ),
        *(
            "model.heads",
            "model.v_heads",
            "model.head_dim_k",
            "model.attention_layers",
            "model.residual",
        ),
        *(
            "optimizer.name",
            "optimizer.lr",
            "optimizer.weight_decay",
            "optimizer.clip",
            "schedule.warmup",
        ),
        *("schedule.min_lr", "batch.sequences", "batch.length", "batch.micro", "data.source"),
        *("data.tokenizer", "data.vocab_size", "data.validation", "data.text_field", "data.loader"),
        *("evaluation.every", "evaluation.final_tokens", "sample.tokens", "sample.prompt"),
        *(
            "checkpoint.every",
            "checkpoint.keep_last",
            "log.every",
            "log.wandb",
            "distribution.mode",
        ),
    )
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="delta-trn run", description="Train from the start.")
    parser.add_argument("recipe", metavar="RECIPE", help=f"a named run: {', '.join(RECIPES)}")
    parser.add_argument(
        "changes", nargs="*", metavar="key=value", help="keys to change, such as steps=100"
    )
    parser.add_argument(
        "--keys",
        action="store_true",
        help="print the usual keys with their values and meanings, and stop",
    )
    parser.add_argument("--all-keys", action="store_true", help="the same of every key there is")
    parser.add_argument(
        "--or-resume",
        action="store_true",
        help="continue the run in out=DIR if there is one already, as after a restart by torchrun",
    )
    options = read_arguments(parser, arguments)
    changes = parse(options.changes)
    config = apply(recipe(options.recipe), changes)
    if options.keys or options.all_keys:
        print(keys(config, every=options.all_keys))
        return 0

    from delta_trn.train.watch.display import console, leads

    out = console(quiet=not leads())
    # at once: loading torch and transformers takes seconds, in which nothing else could be said
    line = f"recipe     {options.recipe}: {summary(options.recipe)}"
    out.print(_wrap(line, out.width))
    if names := variables(options.recipe):
        out.print(f"variables  {' '.join(names)} from the environment")

    from delta_trn.train.checkpoints.run_folder import RunFolder
    from delta_trn.train.parallel.team import ask_leader
    from delta_trn.train.run.setup import resume, start

    if options.or_resume:
        if config.out is None:
            raise ConfigError("--or-resume needs out=DIR: without it every run gets a new folder")
        folder = RunFolder(Path(config.out).expanduser())
        question, minutes = "whether there is a run to resume", config.distribution.timeout_minutes
        if ask_leader(question, folder.config_path.exists, minutes):
            # auto, and where the run is, are what they were when it began
            words = {
                key: value for key, value in changes.items() if key != "out" and value != "auto"
            }
            words["name"] = config.name  # another recipe's run is refused
            with resume(folder.path, words, None, out.print) as run:
                return drive(run, words.get("backend"))
    with start(config) as run:
        return drive(run, config.backend)


def drive(run: "Run", asked_backend: str | None) -> int:
    """Trains a run, and prints what belongs before and after it. Returns the exit status.

    asked_backend is what was asked for now: a name, or auto; None: a resumed run keeps its own.
    """
    from delta_trn.train.run.loop import train
    from delta_trn.train.run.setup import write_baselines
    from delta_trn.train.studies.probes import probe_of
    from delta_trn.train.watch.display import Display, attempt, console
    from delta_trn.train.watch.loss_plot import plot_loss
    from delta_trn.train.watch.summary import closing, measure, opening, peak_tokens_per_s

    leads, folder = run.team.leads, run.folder
    out = console(quiet=not leads)
    tell = out.print
    for line in opening(run, asked_backend):
        tell(_wrap(line, out.width))
    if (known := run.team.leader_does(folder.read_summary)) is not None:
        tell(
            f"finished   all {run.config.steps:,} steps were trained before; this was measured then"
        )
        closing(run, out, known)
        return 0
    with out.status("measuring what zlib and lzma make of the held-out text"):
        costs = attempt("baselines", lambda: write_baselines(run), tell) or {}
    peak = attempt("peak", lambda: peak_tokens_per_s(run), tell) if leads else None
    with Display(run.config.steps, run.state.step, show=leads, peak=peak) as display:
        outcome = train(run, display, probe_of(run))
    if outcome.stopped:
        tell(f"stopped by {outcome.stopped} after step {outcome.step}; its checkpoint is written")
    with out.status("measuring the held-out text"):
        found = measure(run)
    if leads:
        # the run is done and saved: what cannot be written or drawn must not make it look failed
        if found is not None:
            found["baselines"] = costs
            attempt("summary.json", lambda: folder.write_summary(found), tell)
        attempt("picture", lambda: plot_loss(folder), tell)
        attempt("last page", lambda: closing(run, out, found, peak), tell)
    return 128 + outcome.signal if outcome.signal is not None else 0


def _wrap(line: str, width: int) -> str:
    """Returns a line of `opening` in lines of at most `width`,
    under each other where its text begins.
    """
    return textwrap.fill(
        line, width, subsequent_indent=" " * 11, break_on_hyphens=False, break_long_words=False
    )


def keys(config: RunConfig, *, every: bool) -> str:
    """Returns keys with their values, choices and meanings, by sections; * marks what is no
    default.

    every   all keys; else those of USUAL, and what differs from the defaults
    """
    usual = dict(flatten(RunConfig()))
    columns = shutil.get_terminal_size((WIDTH_IN_A_FILE, 24)).columns
    # where less than half of a line would be left, a meaning stands below its key
    indent = KEY_WIDTH if columns >= 2 * KEY_WIDTH else 6
    lines, section = ["* differs from the default, which is in brackets"], None
    for key, value in flatten(config):
        changed = value != usual[key]
        if not (every or changed or key in USUAL):
            continue
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            lines += ["", section or "run"]
        kind, text = declaration(key).annotation, declaration(key).description
        if get_origin(kind) is Literal:
            text = f"{' | '.join(get_args(kind))}: {text}"
        text += f" [{_show(usual[key])}]" if changed else ""
        left = f"{'*' if changed else ' '} {key}={_show(value)}"
        if len(left) > indent - 2:
            lines.append(left)
            left = ""
        lines += textwrap.wrap(
            text, columns, initial_indent=f"{left:{indent}}", subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )  # fmt: skip
    if not every:
        lines += ["", "`--all-keys` prints every key there is"]
    return "\n".join(lines)


def _show(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(value)
