"""delta-trn warmup RECIPE|RUN_DIR [key=value ...] [--list] [--processes N]

Start it as the run is started, under torchrun too. On Neuron twice: inside of
neuron_parallel_compile, which compiles all graphs at once, then again, to see that every graph
comes from the cache: train/launch/ does so.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from delta_trn.train.recipes import announce
from delta_trn.train.settings.overrides import apply, parse, read_arguments
from delta_trn.train.settings.schema import RunConfig

if TYPE_CHECKING:
    from delta_trn.train.neuron.compiling import Graph

# what neuron_parallel_compile sets for the processes whose graphs it collects; they compute nothing
COLLECTING = "NEURON_EXTRACT_GRAPHS_ONLY"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="delta-trn warmup",
        description="Compile every graph of a run into the compiler's cache.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a named run, or the folder of a run")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="keys to change")
    parser.add_argument(
        "--list", action="store_true", help="print every graph with its shapes, and stop"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="with --list: of how many processes (%(default)s)"
    )
    options = read_arguments(parser, arguments)
    config = apply(_configuration(options.recipe), parse(options.changes))
    if options.list:
        return _list(config, max(options.processes, int(os.environ.get("WORLD_SIZE", "1"))))
    return _warm(config)


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
