"""delta-trn warmup RECIPE|RUN_DIR [key=value ...] [--list] [--processes N] [--capability X.Y]
delta-trn warmup --bench | --model DIR [--rows N] [--row-length N] [--capability X.Y]

On a GPU, or for one that --capability names, kernels are compiled into Triton's cache by all cores:
what the run, the timed cases or the model would launch is noted on a stand-in of the GPU, so none
need be here. The cache (TRITON_CACHE_DIR, else ~/.triton/cache) may be copied to the machine that
has it, which needs the same Triton and the same kernels.

Start it as the run is started, under torchrun too: there one process of each node compiles. On
Neuron twice: inside of neuron_parallel_compile, which compiles all graphs at once, then again, to
see that every graph comes from the cache: train/launch/ does so.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from delta_trn.train.recipes import announce
from delta_trn.train.settings.errors import ConfigError, UsageError
from delta_trn.train.settings.overrides import apply, parse, read_arguments
from delta_trn.train.settings.schema import RunConfig

if TYPE_CHECKING:
    from delta_trn.train.neuron.compiling import Graph

# what neuron_parallel_compile sets for the processes whose graphs it collects; they compute nothing
COLLECTING = "NEURON_EXTRACT_GRAPHS_ONLY"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn warmup",
        description="Compile every kernel or graph into the compiler's cache.",
    )
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help="a named run, or the folder of a run"
    )
    parser.add_argument("changes", nargs="*", metavar="key=value", help="keys to change")
    parser.add_argument(
        "--list", action="store_true", help="print every graph with its shapes, and stop"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="of the run, on all nodes (%(default)s)"
    )
    parser.add_argument("--bench", action="store_true", help="the cases of delta-trn bench instead")
    parser.add_argument(
        "--parity", action="store_true", help="with --bench: the cases of parity, in every dtype"
    )
    parser.add_argument("--case", action="append", help="with --bench: this one; may be repeated")
    parser.add_argument(
        "--model", metavar="DIR", help="a model instead: training, prefill, a token"
    )
    parser.add_argument("--rows", type=int, default=1, help="with --model: sequences (%(default)s)")
    parser.add_argument(
        "--row-length", type=int, default=1024, help="with --model: tokens of each (%(default)s)"
    )
    parser.add_argument(
        "--capability", metavar="X.Y", help="of the GPU to compile for, such as 9.0; default: ours"
    )
    parser.add_argument("--jobs", type=int, help="processes that compile (default: one per core)")
    options = read_arguments(parser, arguments)
    if sum(map(bool, (options.recipe, options.bench, options.model))) != 1:
        raise UsageError("name one thing to warm up for: RECIPE, RUN_DIR, --bench or --model DIR")
    processes = max(options.processes, int(os.environ.get("WORLD_SIZE", "1")))
    if options.bench:
        return _compile(options, _bench(options.case, options.parity))
    if options.model:
        from delta_trn.train.run.launches import launch_model, require_model

        require_model(options.model)
        return _compile(
            options, lambda: launch_model(options.model, options.rows, options.row_length)
        )
    config = apply(_configuration(options.recipe), parse(options.changes))
    if options.list:
        return _list(config, processes)
    if options.capability or _is_for_gpu(config):
        from delta_trn.train.run.launches import launch_run, require_recordable
        from delta_trn.train.studies.probes import probe_of

        require_recordable(config, processes)
        return _compile(options, lambda: launch_run(config, processes, probe_of))
    return _warm(config)


def _is_for_gpu(config: RunConfig) -> bool:
    from delta_trn.backends import machine

    kind = machine.platforms()[0] if config.device == "auto" else config.device
    return kind.startswith("cuda")


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d+\.\d", text):
        raise UsageError(f"--capability={text}: expected a compute capability such as 9.0")
    major, minor = text.split(".")
    return int(major), int(minor)


def _bench(names: Sequence[str] | None, judged: bool) -> Callable[[], None]:
    """Returns what launches the cases of these names, or all that are timed on a GPU.

    judged: instead of those all that parity judges of both rules and their steps.
    """
    import torch

    from delta_trn.backends.bench.launches import launch
    from delta_trn.backends.parity import channel_cases
    from delta_trn.backends.parity.judge import DTYPES
    from delta_trn.backends.parity.rule_cases import BY_NAME, STEPS, find

    known = {**BY_NAME, **channel_cases.BY_NAME}
    if judged:
        every = [*known.values(), *STEPS.values(), *channel_cases.STEPS.values()]
        every = [case for case in every if "slow" not in case.tags]
        return lambda: [launch(every, dtype) for dtype in DTYPES].clear()
    try:
        named = [find(name, known) for name in names or ()]
    except ValueError as error:
        raise UsageError(str(error)) from error
    cases = named or [case for case in known.values() if "bench" in case.tags]
    return lambda: launch(cases, torch.bfloat16)


def _compile(options: argparse.Namespace, launch: Callable[[], None]) -> int:
    """Notes what `launch` launches, and compiles it; prints how many kernels, and the time left."""
    from delta_trn.backends import machine
    from delta_trn.backends.dispatch import triton_missing

    if reason := triton_missing("cuda"):
        raise ConfigError(f"nothing can be compiled: backend triton {reason}")
    if machine.processes().local_rank:
        return 0  # the first process of the node compiles for all
    from delta_trn.backends.gpu_stand_in.cuda import card
    from delta_trn.backends.gpu_stand_in.launch_adapter import fill, record_launches

    try:
        meant = card(_capability(options.capability))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(f"for {meant.name}, compute capability {meant.major}.{meant.minor}")
    with record_launches(meant) as found:
        launch()
    print(f"{len(found)} kernels", flush=True)
    begun, compiled, failed = time.monotonic(), 0, 0
    for done, (record, outcome) in enumerate(fill(found, options.jobs), 1):
        left = (time.monotonic() - begun) / done * (len(found) - done)
        print(f"{done}/{len(found)}, {left:.0f} s left: {record}", flush=True)
        if isinstance(outcome, Exception):
            print(f"not compiled: {record}: {outcome}", file=sys.stderr)
        compiled, failed = compiled + (outcome is True), failed + isinstance(outcome, Exception)
    print(
        f"{compiled} compiled in {time.monotonic() - begun:.0f} s, "
        f"{len(found) - compiled - failed} were in the cache, {failed} failed"
    )
    return 1 if failed else 0


def _configuration(name: str) -> RunConfig:
    """Returns a recipe's configuration, or that of a run's folder."""
    if (Path(name) / "config.json").is_file():
        from delta_trn.train.checkpoints.run_folder import RunFolder

        return RunFolder(Path(name)).read()[0]
    return announce(name)


def _list(config: RunConfig, world: int) -> int:
    """Prints the graphs without loading data or a model."""
    from delta_trn.backends import machine
    from delta_trn.train.neuron.compiling import graphs
    from delta_trn.train.parallel.layout import require_divisible

    require_divisible(config, world)
    listed = graphs(config, world=world)
    for graph in listed:
        print(graph)
    print("?: known once the data is prepared")
    # a laptop can list what a cluster compiles
    if "xla" in (config.device, machine.platforms()[0] if config.device == "auto" else ""):
        _list_instructions(config, listed)
    return 0


def _list_instructions(config: RunConfig, listed: list["Graph"]) -> None:
    """Prints the instructions of our kernels in each graph whose rows are known,
    and warns above a bound.
    """
    from delta_trn.backends import BackendRefusal
    from delta_trn.train.neuron.instructions import MOST, per_sequence

    print("\ninstructions of the NKI kernels in a graph, counted by the simulator:")
    try:
        counted = per_sequence(config)
    except BackendRefusal as refusal:
        print(f"not counted: {refusal}")
        return
    for graph in listed:
        if graph.rows is None:
            continue
        trains = graph.name == "step"
        total = graph.rows * (counted.training if trains else counted.forward)
        key = "batch.micro" if trains else "evaluation.batch"
        warning = f"  above {MOST:,}: neuronx-cc refuses it, lower {key}" if total > MOST else ""
        print(f"{graph.name:16}{total:>12,}{warning}")


def _warm(config: RunConfig) -> int:
    from delta_trn.train.neuron.compiling import compile_all, compiles
    from delta_trn.train.parallel.team import ask_leader
    from delta_trn.train.run.setup import start
    from delta_trn.train.studies.probes import probe_of
    from delta_trn.train.watch.display import console, leads

    tell = console(quiet=not leads()).print
    with tempfile.TemporaryDirectory(prefix="delta-trn-warmup-") as own:
        # one for all processes, as a run's folder must be
        minutes = config.distribution.timeout_minutes
        folder = ask_leader("for the folder of a warm-up", lambda: own, minutes)
        here = config.model_copy(update={"out": str(Path(folder) / "run")})
        with start(here) as run:
            compile_all(run, tell, probe_of(run))
            if not compiles(run):
                tell(
                    f"nothing to compile: on {run.device} operators run one by one unless "
                    "compile=true"
                )
            elif COLLECTING in os.environ:
                tell("collected for neuron_parallel_compile, which compiles now")
    return 0
