"""delta-trn warmup RECIPE|RUN_DIR [key=value ...] [--list] [--processes N]

On Neuron twice: inside of neuron_parallel_compile, then again, to see that every graph comes from the cache.
On several nodes start both by hand on each: `neuron_parallel_compile torchrun ... -m train warmup ...`, then
without the first word.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from delta_trn.train.recipes import announced
from delta_trn.train.settings.errors import ConfigError, TrainError
from delta_trn.train.settings.overrides import apply, parse, read_arguments
from delta_trn.train.settings.schema import RunConfig

if TYPE_CHECKING:
    from delta_trn.train.neuron.compiling import Graph

# what neuron_parallel_compile sets for the processes whose graphs it collects; they compute nothing
COLLECTING = "NEURON_EXTRACT_GRAPHS_ONLY"


def main(arguments: Sequence[str]) -> int:
    options = read_arguments(_parser(), arguments)
    config = apply(_configuration(options.recipe), parse(options.changes))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if options.processes < 1:
        raise ConfigError(f"--processes={options.processes}: expected at least 1")
    if options.processes > 1 and world > 1:
        raise ConfigError(
            f"--processes={options.processes} under torchrun: leave it out, or leave out torchrun"
        )
    if options.list:
        return _list(config, max(world, options.processes))

    from delta_trn.backends import machine
    from delta_trn.train.run.model import pick_device

    command = [options.recipe, *options.changes, "--here"]
    started = options.here or world > 1 or COLLECTING in os.environ
    if not started and machine.is_neuron(pick_device(config.device)):
        # all graphs at once, by many compilers; then each again, which shows that it comes from the cache
        _start(command, options.processes, wrapper=_neuron_parallel_compile())
        _start(command, options.processes)
        return 0
    if options.processes > 1:
        _start(command, options.processes)
        return 0
    return _warm(config)


def _configuration(name: str) -> RunConfig:
    """Returns a recipe's configuration, or that of a run's folder."""
    if (Path(name) / "config.json").is_file():
        from delta_trn.train.checkpoints.run_folder import RunFolder

        return RunFolder(Path(name)).read()[0]
    return announced(name)


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
    """Prints the instructions of our kernels in each graph whose rows are known, and warns above a bound."""
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
        warning = f"  above {MOST:,}: neuronx-cc may refuse it, lower {key}" if total > MOST else ""
        print(f"{graph.name:16}{total:>12,}{warning}")


def _start(arguments: list[str], processes: int, wrapper: str | None = None) -> None:
    """Runs the same command in `processes` processes, inside a wrapper if given. TrainError if it fails."""
    command = [sys.executable, "-m", "delta_trn", "warmup", *arguments]
    if processes > 1:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, "-m", *launcher, *command[1:]]
    if wrapper is not None:
        command = [wrapper, *command]
    status = subprocess.run(command, check=False).returncode
    if status:
        raise TrainError(f"{Path(command[0]).name} ended with status {status}; its own message is above")


def _neuron_parallel_compile() -> str:
    program = shutil.which("neuron_parallel_compile")
    if program is None:
        raise TrainError(
            "neuron_parallel_compile is not on the path; it comes with torch-neuronx: start this in the "
            "environment that has it"
        )
    return program


def _warm(config: RunConfig) -> int:
    from delta_trn.train.commands.run import observers
    from delta_trn.train.neuron.compiling import compile_all, compiles
    from delta_trn.train.run.setup import start
    from delta_trn.train.watch.display import console, leads

    out = console(quiet=not leads())

    def tell(text: str) -> None:
        out.print(text, markup=False)

    with tempfile.TemporaryDirectory(prefix="delta-trn-warmup-") as folder:
        here = config.model_copy(update={"out": str(Path(folder) / "run")})
        with start(here) as run:
            compile_all(run, tell, observers(run))
            if not compiles(run):
                tell(f"nothing to compile: on {run.device} operators run one by one unless compile=true")
            elif COLLECTING in os.environ:
                tell("collected for neuron_parallel_compile, which compiles now")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="delta-trn warmup",
        description="Compile every graph of a run into the compiler's cache.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a named run, or the folder of a run")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="keys to change")
    parser.add_argument("--list", action="store_true", help="print every graph with its shapes, and stop")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="number of processes on this machine to start and to compile for (%(default)s)",
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help="on Neuron: in this process, without neuron_parallel_compile",
    )
    return parser
