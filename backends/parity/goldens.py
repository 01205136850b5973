"""Outputs of one backend on one machine, to be judged on another that it never meets.

A golden is a safetensors file: every output of every case, and in its metadata the fingerprint of the inputs,
the errors measured where it was recorded, and where that was. `check` makes the inputs again, refuses if
their fingerprint differs, and judges the recorded outputs here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from delta_trn.backends.machine import facts
from delta_trn.backends.parity.judge import DTYPES, Verdict, outcome, reference
from delta_trn.backends.parity.rule_cases import BY_NAME, Case, inputs

FORMAT = "delta-trn golden 1"

# errors are ratios of float64 sums: two machines agree on them to far more digits than this
SAME_ERROR = 1e-3


class GoldenRefusal(ValueError):
    """The file is no golden, or its inputs are not the ones this machine makes."""


def record(path: Path, backend: str, cases: Iterable[Case], device: str) -> list[Verdict]:
    """Runs `backend` on the cases in every parity dtype, writes `path`, and returns the verdicts."""
    tensors: dict[str, torch.Tensor] = {}
    rows, found = [], []
    for case in cases:
        for dtype in DTYPES:
            given = inputs(case, dtype)
            outputs = {name: x.cpu() for name, x in outcome(given.to(device), backend).items()}
            verdicts = reference(case, dtype).verdicts(backend, outputs)
            found += verdicts
            tensors |= {f"{case.name}/{_name(dtype)}/{name}": x.contiguous() for name, x in outputs.items()}
            errors = {verdict.tensor: verdict.error for verdict in verdicts}
            rows.append(
                {"case": case.name, "dtype": _name(dtype), "inputs": given.digest(), "errors": errors}
            )
    header = {"format": FORMAT, "backend": backend, "facts": facts(torch.device(device)), "rows": rows}
    save_file(tensors, path, metadata={"golden": json.dumps(header)})
    return found


def check(path: Path) -> list[Verdict]:
    """Judges the outputs recorded in `path` with the judge of this machine.

    Raises GoldenRefusal where inputs, the file's format or the errors claimed for its outputs differ.
    """
    found = []
    with safe_open(path, framework="pt") as file:
        header = _header(path, file.metadata())
        for row in header["rows"]:
            if row["case"] not in BY_NAME:
                raise GoldenRefusal(
                    f"{path} has case {row['case']!r}, which this version lacks; record it again"
                )
            case, dtype = BY_NAME[row["case"]], getattr(torch, row["dtype"])
            right = reference(case, dtype)
            if right.inputs.digest() != row["inputs"]:
                raise GoldenRefusal(
                    f"{path} was recorded with other inputs for case {case.name} in {row['dtype']}: "
                    f"{row['inputs'][:12]} there, {right.inputs.digest()[:12]} here; record it again"
                )
            outputs = {name: file.get_tensor(f"{case.name}/{row['dtype']}/{name}") for name in row["errors"]}
            for verdict in right.verdicts(header["backend"], outputs):
                claimed = row["errors"][verdict.tensor]
                # 1e-12: the judge's own error, which is all there is where an output is exact
                if not abs(verdict.error - claimed) <= SAME_ERROR * claimed + 1e-12:
                    raise GoldenRefusal(
                        f"{path} claims error {claimed:.6g} for {verdict}; the file or the judge was changed"
                    )
                found.append(verdict)
    return found


def _header(path: Path, metadata: dict[str, str] | None) -> dict:
    header = json.loads((metadata or {}).get("golden", "{}"))
    if header.get("format") != FORMAT:
        raise GoldenRefusal(
            f"{path} is {header.get('format', 'no golden')!r}, not {FORMAT!r}; record it again"
        )
    return header


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
