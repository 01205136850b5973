"""Records outputs of a backend on one machine, and judges them on another.

A golden is a safetensors file. It holds every output of every case; its metadata hold the
fingerprint of the inputs, the errors measured where it was recorded, and the facts of that machine.
`check` makes the inputs again, refuses the file if their fingerprint differs, and judges the
recorded outputs here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from delta_trn.backends.checks import BackendRefusal, dtype_name
from delta_trn.backends.dispatch import BACKENDS
from delta_trn.backends.machine import facts
from delta_trn.backends.parity.judge import DTYPES, Verdict
from delta_trn.backends.parity.rule import outcome, reference
from delta_trn.backends.parity.rule_cases import BY_NAME, Case, inputs
from delta_trn.backends.parity.tables import judges_functions

FORMAT = "delta-trn golden 2"
SAME_ERROR = (
    1e-3  # errors are ratios of float64 sums, on which two machines agree to far more digits
)


class GoldenRefusal(ValueError):
    """Says that a file is no golden, or that its inputs are not those that this machine makes."""


def record(
    path: Path,
    backend: str,
    cases: Iterable[Case],
    device: str,
    refused: dict[tuple[str, torch.dtype], str] | None = None,
) -> list[Verdict]:
    """Runs `backend` on the cases in every parity dtype that it has, writes `path`,
    and returns the verdicts.

    `refused` gets what is outside the backend's declared limits, with the reason.
    """
    tensors: dict[str, torch.Tensor] = {}
    rows, verdicts, inexact = [], [], judges_functions(backend)
    dtypes = BACKENDS[backend].rows["gated_delta_rule"].dtypes
    for case in cases:
        for dtype in (dtype for dtype in DTYPES if dtype in dtypes):
            x, name = inputs(case, dtype), dtype_name(dtype)
            try:
                outputs = {tensor: y.cpu() for tensor, y in outcome(x.to(device), backend).items()}
            except BackendRefusal as refusal:
                if refused is None:
                    raise
                refused[case.name, dtype] = str(refusal)
                continue
            expected = reference(case, dtype, inexact=inexact)
            judged = expected.verdicts(backend, outputs)
            verdicts += judged
            tensors |= {
                f"{case.name}/{name}/{tensor}": y.contiguous() for tensor, y in outputs.items()
            }
            errors = {verdict.tensor: verdict.error for verdict in judged}
            rows.append({"case": case.name, "dtype": name, "inputs": x.digest(), "errors": errors})
    header = {
        "format": FORMAT,
        "backend": backend,
        "inexact": inexact,
        "facts": facts(torch.device(device)),
        "rows": rows,
    }
    # not save_file, whose files nobody else may read
    path.write_bytes(save(tensors, metadata={"golden": json.dumps(header)}))
    return verdicts


def check(path: Path) -> list[Verdict]:
    """Judges the outputs recorded in `path` with the judge of this machine.

    Raises GoldenRefusal where inputs, the file's format or the errors claimed for its outputs
    differ.
    """
    verdicts = []
    with safe_open(path, framework="pt") as file:
        header = json.loads((file.metadata() or {}).get("golden", "{}"))
        if header.get("format") != FORMAT:
            name = header.get("format", "no golden")
            raise GoldenRefusal(f"{path} is {name!r}, not {FORMAT!r}; record it again")
        for row in header["rows"]:
            if row["case"] not in BY_NAME:
                raise GoldenRefusal(
                    f"{path} has case {row['case']!r}, which this version lacks; record it again"
                )
            case, dtype = BY_NAME[row["case"]], getattr(torch, row["dtype"])
            here = inputs(case, dtype).digest()
            if here != row["inputs"]:
                raise GoldenRefusal(
                    f"{path} was recorded with other inputs for case {case.name} in "
                    f"{row['dtype']}: {row['inputs'][:12]} there, {here[:12]} here; record it again"
                )
            outputs = {
                name: file.get_tensor(f"{case.name}/{row['dtype']}/{name}")
                for name in row["errors"]
            }
            # goldens from before had no such field
            inexact = header.get("inexact", header["backend"] == "nki")
            expected = reference(case, dtype, inexact=inexact)
            for verdict in expected.verdicts(header["backend"], outputs):
                claimed = row["errors"][verdict.tensor]
                # 1e-12 is the judge's own error, all there is where an output is exact
                close = math.isclose(verdict.error, claimed, rel_tol=SAME_ERROR, abs_tol=1e-12)
                if not close and not (math.isnan(claimed) and math.isnan(verdict.error)):
                    raise GoldenRefusal(
                        f"{path} claims error {claimed:.6g} for {verdict}; the file or the judge "
                        "was changed"
                    )
                verdicts.append(verdict)
    return verdicts
