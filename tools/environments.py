"""Makes the environments that the Makefile's targets run in, each in a folder of the checkout.

    python3 tools/environments.py .venv-xla     makes that one, or what it lacks; make calls this
    python tools/environments.py --versions     prints what a Trn1's training depends on, and its versions

It runs before anything is installed, with whichever Python 3 is there, and imports nothing but
Python's own modules.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from glob import glob
from pathlib import Path

# What was run together. torch comes first and alone: a CUDA build brings the triton that it was
# built with. A CPU build brings none, and then this one is installed, which belongs to that torch.
TORCH, TRITON = "torch==2.13.0", "triton==3.7.1"
# the last torch that torch_xla supports, and so Trn1's; torch_xla does not require any torch itself
XLA = ("torch==2.9.0", "torch-xla==2.9.0")
LEAST = (3, 10)  # of Python
HELD = ("-c", ".ci/constraints.txt")
OURS = ("-e", "./packages/nki-simulator", "-e", ".")
# AWS's environments in its images, of SDK 2.28 to 2.31 with PyTorch 2.9; they are read, not changed
AWS = [
    f"/opt/aws_neuronx_venv_{name}"
    for name in ("pytorch_2_9", "pytorch_2_9_nxd_training", "pytorch_2_9_nxd_inference", "pytorch")
]
# AWS's packages that stay at AWS's versions, by how their names begin
AWS_HOLDS = ("torch", "libneuron", "neuron", "nki", "numpy", "ml_dtypes", "ml-dtypes", "protobuf")
PURELIB = 'import sysconfig; print(sysconfig.get_path("purelib"))'


@dataclass(frozen=True)
class Environment:
    """Says how an environment is made.

    what, needs     what is installed, and how much room and time that takes
    packages        what pip installs, call by call
    triton          whether TRITON is installed where torch brought none
    behind          whether it sees the packages of .venv behind its own
    anew            whether a folder that is there is removed first
    wheel           whether the wheel of this checkout is built and installed, as a user has it
    """

    what: str
    needs: str
    packages: tuple[tuple[str, ...], ...] = ()
    triton: bool = False
    behind: bool = False
    anew: bool = False
    wheel: bool = False


ENVIRONMENTS = {
    ".venv": Environment(
        "PyTorch and the packages beside it",
        "2 to 6 GB, several minutes",
        ((TORCH,), (*HELD, "-e", "./packages/nki-simulator", "-e", ".[dev]")),
        triton=True,
    ),
    ".venv-xla": Environment(
        "torch-xla and its PyTorch",
        "8 GB, several minutes",
        (XLA, (*HELD, *OURS, "pytest", "pytest-timeout")),
    ),
    # lm-eval brings 40 packages, so it has an environment of its own, which finds torch and the
    # rest in .venv. So has trl.
    ".venv-lm-eval": Environment(
        "lm-eval",
        "0.3 GB, a minute or two",
        ((*HELD, "-c", ".ci/lm_eval.txt", "lm_eval==0.4.13"),),
        behind=True,
    ),
    ".venv-trl": Environment(
        "TRL",
        "10 MB, less than a minute",
        ((*HELD, "-r", ".ci/trl.txt"),),
        behind=True,
    ),
    # without constraints, as a user's own
    ".venv-fresh": Environment(
        "the wheel and the newest packages", "6 GB, several minutes", anew=True, wheel=True
    ),
    ".venv-neuron": Environment(
        "what training needs beside AWS's environment", "1 GB, some minutes"
    ),
}


def make(name: str) -> None:
    """Makes an environment of the table, or what it lacks."""
    environment = ENVIRONMENTS[name]
    print(
        f"installing {environment.what} into {name}: {environment.needs}, in which pip says nothing",
        flush=True,
    )
    python = Path(name, "bin", "python")
    if name == ".venv-neuron":
        make_neuron(python, os.environ.get("AWS"))
        return
    if environment.anew and Path(name).exists():
        shutil.rmtree(name)
    if not python.exists():
        run(sys.executable, "-m", "venv", name)
    if environment.behind:
        see(python, ".venv")
    for i, words in enumerate(environment.packages):
        install(python, *words)
        if i == 0 and environment.triton and not finds(python, "triton"):
            install(python, TRITON)
    if environment.wheel:
        folder = Path(name, "wheel")
        pip(python, "wheel", "--no-deps", "--wheel-dir", str(folder), ".")
        install(python, *map(str, folder.glob("*.whl")))


def make_neuron(python: Path, named: str | None) -> None:
    """Makes an environment in front of AWS's, `named` or the first one that is there.

    AWS's packages come from AWS's environment. What training needs beside them, or needs newer, is
    installed here, where it hides AWS's and replaces nothing. What runs in the process together
    with the compiler stays AWS's version.
    """
    aws = named or next((folder for folder in AWS if Path(folder).exists()), AWS[0])
    there = " ".join(sorted(glob("/opt/aws_neuronx_venv_*"))) or "none"
    print(f"environments of AWS here: {there}; taken: {aws}", flush=True)
    theirs = Path(aws, "bin", "python")
    if not os.access(theirs, os.X_OK):
        sys.exit(
            f"{aws} is no environment. Images after SDK 2.31 hold none with PyTorch 2.9: "
            "docs/trainium.md says which image to take. Or name an environment: "
            "make neuron AWS=DIR"
        )
    folder = python.parents[1]
    if not python.exists():
        run(theirs, "-m", "venv", folder)
        with open(folder / "bin" / "activate", "a", encoding="utf-8") as file:
            file.write(f'PATH="$PATH:{Path(aws).absolute()}/bin"\n')
    Path(output(python, "-c", PURELIB), "aws.pth").write_text(output(theirs, "-c", PURELIB) + "\n")
    installed = output(
        theirs, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"
    )
    held = [line for line in installed.splitlines() if line.lower().startswith(AWS_HOLDS)]
    if not held:
        sys.exit(f"{aws} holds none of {', '.join(AWS_HOLDS)}: it is no environment of AWS's")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(held) + "\n")
    install(python, "-c", str(constraints), *OURS, "pytest")


def see(python: Path, other: str) -> None:
    """Lets an environment see another's packages behind its own, in any folder.

    `addsitedir` reads the .pth files there, too, so that delta_trn is found.
    """
    theirs = output(Path(other, "bin", "python"), "-c", PURELIB)
    line = f"import site; site.addsitedir({theirs!r})\n"
    Path(output(python, "-c", PURELIB), "venv.pth").write_text(line)


def finds(python: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def install(python: Path, *words: str) -> None:
    pip(python, "install", *words)


def pip(python: Path, verb: str, *words: str) -> None:
    run(python, "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *words)


def run(*words: str | Path) -> None:
    """Runs a command, says it, and ends this program with its status where it fails."""
    print(*words, flush=True)
    status = subprocess.run(list(map(str, words))).returncode
    if status:
        sys.exit(status)


def output(*words: str | Path) -> str:
    done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout.strip()


def print_versions() -> None:
    """Prints the versions of this environment; of two packages of a name, of the one in front."""
    found = {
        distribution.metadata["Name"].lower().replace("_", "-"): distribution.version
        for distribution in reversed(list(importlib.metadata.distributions()))
    }
    for name in (
        "torch", "torch-xla", "torch-neuronx", "neuronx-cc", "nki", "neuronx-distributed",
        "transformers",
    ):  # fmt: skip
        print(f"{name:20}{found.get(name, '-')}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="make an environment of the checkout")
    parser.add_argument("name", nargs="?", choices=ENVIRONMENTS, help="the environment's folder")
    parser.add_argument("--versions", action="store_true", help="print this environment's versions")
    options = parser.parse_args(arguments)
    if options.versions:
        print_versions()
    elif options.name is None:
        parser.error("no environment is named")
    elif sys.version_info < LEAST:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"delta-trn needs Python 3.10 or newer, this is {found}; try make PYTHON=python3.11")
        return 1
    else:
        make(options.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
