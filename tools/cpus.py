"""Runs the test suite on every instruction set of this CPU, with one thread and with two.

    python -m tools.cpus        (make test-cpus)

ATEN_CPU_CAPABILITY chooses PyTorch's own kernels; the other variables choose those of the libraries
that multiply for it and for NumPy. A last run has NumPy make torch's products, which stand for
other CPUs. It ends at the first run that fails.
"""

import os
import subprocess
import sys

import torch

# by PyTorch's name of a level, lowest first: what holds the other libraries to it
LEVELS = {
    "default": {
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
    "avx2": {
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "avx512": {},
}


def levels(own: str) -> list[str]:
    """Returns the levels up to this CPU's own; only the lowest, where PyTorch names another."""
    names = list(LEVELS)
    return names[: names.index(own) + 1] if own in names else names[:1]


def main() -> int:
    runs: list[tuple[dict[str, str], list[str]]] = [
        ({"ATEN_CPU_CAPABILITY": level, **LEVELS[level], "OMP_NUM_THREADS": threads}, [])
        for level in levels(torch.backends.cpu.get_cpu_capability().lower())
        for threads in ("1", "2")
    ]
    for variables, more in [*runs, ({}, ["--other-products"])]:
        print(*(f"{name}={value}" for name, value in variables.items()), *more, flush=True)
        suite = [sys.executable, "-m", "pytest", "-n", "2", "-m", "not slow and not serial", *more]
        status = subprocess.run(suite, env=os.environ | variables).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
