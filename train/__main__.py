"""delta-trn COMMAND ...        lists the commands where none is given"""

import errno
import io
import os
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version

from delta_trn.train.settings.errors import TrainError

# The first torch whose writer of Hugging Face checkpoints lets each process write its parts as
# tested here.
OLDEST_TORCH = (2, 9)
# Usage, and what it does in one line. The module is the one of that name in train/commands, unless
# a third entry names another.
Command = tuple[str, ...]
COMMANDS: dict[str, Command] = {
    "run": ("RECIPE [key=value ...]", "train from the start"),
    "resume": ("RUN_DIR [key=value ...]", "continue from the newest whole checkpoint"),
    "generate": ("RUN_DIR --prompt TEXT", "continue a text"),
    "export": (
        "RUN_DIR --to DIR [--remote-code]",
        "write a model for transformers: weights, tokenizer, model card, code",
    ),
    "plot": ("RUN_DIR ...", "draw a run's pictures again, also while it goes on"),
    "parameters": ("RECIPE [key=value ...]", "what every parameter gets from the muP table"),
    "sweep": (
        "RECIPE widths=... lrs=... [key=value ...]",
        "the best learning rate of every width, and how far it moves",
    ),
    "coord-check": (
        "RECIPE|--module PKG:F [widths=64,128,...]",
        "whether what a model computes and learns depends on its width",
    ),
    "throughput": (
        "RECIPE [--peer fla] [key=value ...]",
        "tokens/s and memory of a step, beside a peer's operator",
    ),
    "warmup": (
        "RECIPE|RUN_DIR|--bench|--model DIR [--capability X.Y]",
        "compile every kernel or graph of a run before it",
    ),
    "convert": (
        "FROM --to DIR [--format fla]",
        "weights of flash-linear-attention or of the paper's code to ours, and back",
    ),
    "data": ("prepare SOURCE | info DIR", "text to token shards"),
}

# How often a thread of OpenMP that waits looks before it sleeps: 1,000 times, for some 20 us, as
# long as many waits inside of a step. libgomp's 300,000 looks are milliseconds, which another
# process would have used.
WAITING = {"GOMP_SPINCOUNT": "1000"}
# What training on one's own text takes. `--help` lists these, `--help-all` the others, too.
USUAL = ("run", "resume", "generate", "export", "plot", "convert", "data", "backends")


def main(arguments: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS) -> int:
    """Runs one command. Returns 0: done; 2: refused, and stderr says why;
    128 + n: stopped by signal n.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="backslashreplace")  # a model may write any character
    try:
        if given[:1] == ["help"] and len(given) > 1:
            given = [*given[1:], "--help"]
        if not given or given[0] in ("-h", "--help", "help", "--help-all"):
            print(_overview(commands, every=given[:1] == ["--help-all"]))
            return 0
        if given[0] == "--version":
            print(f"delta-trn {version('delta-trn')}")
            return 0
        command, *rest = given
        if command not in commands:
            near = get_close_matches(command, commands, n=1)
            hint = f"did you mean {near[0]}? known" if near else "known"
            raise TrainError(f"unknown command {command!r}; {hint}: {', '.join(commands)}")
        set_waiting(os.environ)
        module = f"delta_trn.train.commands.{command.replace('-', '_')}"
        if command in COMMANDS:
            _require_torch()
        return import_module((*commands[command], module)[2]).main(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output has gone, as with `| head`; Python would complain once more on
        # exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if not _is_expected(error):
            raise
        lines = [line.strip() for line in str(error).splitlines()]
        if isinstance(error, OSError):
            lines.append("make room, or print to another place")
        print(f"error: {'; '.join(lines).replace(':;', ':')}", file=sys.stderr)
        return 2


def set_waiting(environment: MutableMapping[str, str]) -> None:
    """Sets how idle threads wait, unless the user does,
    or torch is loaded already and has read it.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in environment:
        for name, value in WAITING.items():
            environment.setdefault(name, value)


def _require_torch() -> None:
    """TrainError unless torch is one that checkpoints
    of several processes were tested with, or newer.
    """
    installed = version("torch")
    if tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) < OLDEST_TORCH:
        raise TrainError(
            f"torch {installed} is too old: training is tested with 2.9 and 2.13, and needs 2.9 or "
            "newer; install torch>=2.9"
        )


def _is_expected(error: Exception) -> bool:
    """Whether the message says all there is to say, so that a traceback would only hide it."""
    if isinstance(error, TrainError):
        return True
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True  # of the disk that what is printed goes to: a run's own files say more
    from delta_trn.backends import BackendRefusal

    return isinstance(error, BackendRefusal)


def _overview(commands: Mapping[str, Command], *, every: bool) -> str:
    from delta_trn.train.recipes import RECIPES, summary

    shown = {name: command for name, command in commands.items() if every or name in USUAL}
    usages = {name: f"{name} {usage}" for name, (usage, *_) in shown.items()}
    width = max(map(len, usages.values()))
    lines = ["delta-trn COMMAND ...", "", "commands"]
    lines += [f"  {usages[name]:{width}}  {line}" for name, (_, line, *_) in shown.items()]
    if rest := [name for name in commands if name not in shown]:
        lines += [f"  `--help-all` explains the others: {', '.join(rest)}"]
    lines += ["", "recipes"]
    width = max(map(len, RECIPES))
    lines += [f"  {name:{width}}  {summary(name)}" for name in RECIPES]
    lines += [
        "",
        "`delta-trn run RECIPE --keys` prints the usual key=value, `--all-keys` all; `COMMAND "
        "--help` more",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
