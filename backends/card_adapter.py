"""What a GPU's first launch needs, asked in seconds, each with its remedy.

Triton builds its launcher with a C compiler and Python's headers when it first launches: a slim
container has neither, and says so late, in Triton's words.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from delta_trn.backends import machine
from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.dispatch import Call, choose


class Check(NamedTuple):
    """One need: what it is, whether it is met, and what is there or what to do."""

    name: str
    met: bool
    text: str

    def __str__(self) -> str:
        return f"{self.name:10} {'' if self.met else 'MISSING: '}{self.text}"


def needs() -> Iterator[Check]:
    """Yields each need in order; the later ones are asked where an earlier one is not met, too."""
    for ask in (_driver, _triton, _compiler, _headers, _launch):
        yield Check(ask.__name__.lstrip("_"), *ask())


def _driver() -> tuple[bool, str]:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
        return True, f"{name}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    if torch.version.cuda is None:
        return False, (
            f"torch {torch.__version__} is built for CPUs: install the build for CUDA, "
            "https://pytorch.org says how"
        )
    return False, (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and sees no GPU: "
        "nvidia-smi must list one; install NVIDIA's driver, and give a container the GPU (--gpus all)"
    )


def _triton() -> tuple[bool, str]:
    capability = machine.compute_capability("cuda")
    call = Call("gated_delta_rule", "cuda", torch.bfloat16, capability=capability)
    try:
        choose(call, "triton")
    except BackendRefusal as refusal:
        return False, " ".join(str(refusal).split())
    return True, metadata.version("triton")


def _compiler() -> tuple[bool, str]:
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        return False, "Triton needs gcc or clang: apt-get install gcc, or name one with CC=PATH"
    try:
        told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{found} does not run ({error}): name another one with CC=PATH"
    return told.returncode == 0, (told.stdout or told.stderr).splitlines()[0]


def _headers() -> tuple[bool, str]:
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if header.is_file():
        return True, str(header)
    return False, f"Triton needs {header}: apt-get install python{version}-dev"


def _launch() -> tuple[bool, str]:
    if not torch.cuda.is_available():
        return False, "no kernel was launched, since there is no GPU"
    from delta_trn.triton_kernels.compiling.trivial import double

    x = torch.arange(100.0, device="cuda")
    y = torch.full_like(x, torch.nan)
    try:
        double(x, y)
        torch.cuda.synchronize()
    except Exception as error:  # a compiler's, a linker's, a driver's
        return False, f"{type(error).__name__}: {error}".splitlines()[0]
    if not torch.equal(y, 2 * x):
        return (
            False,
            "a kernel was launched, and its result is wrong: another driver, or another GPU",
        )
    return True, "a kernel was compiled and launched, and is right"
