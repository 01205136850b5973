"""Where a measurement was made: versions, machine model, threads, commit. Never a host's name."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from delta_trn.backends import machine as platform_facts

ROOT = Path(__file__).resolve().parent.parent


def facts(device: torch.device) -> dict[str, Any]:
    """Device, versions (null: not installed), threads, commit (null: no checkout), whether it is dirty."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    return {
        "device": platform_facts.describe(device),
        "device_type": device.type,
        "threads": platform_facts.threads(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "transformers", "numpy")},
        "commit": commit,
        "dirty": None if commit is None else bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
