"""The named cases of Kimi Delta Attention, channel_cases.json.

`rule_cases` has the form of a case, and how inputs are made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from delta_trn.backends.parity import rule_cases
from delta_trn.backends.parity.rule_cases import Case, decoded

OP = "kimi_delta_attention"


def _read(row: dict[str, Any]) -> Case:
    """Returns a case; `same` names one of the gated delta rule's, whose sizes and inputs it has."""
    row = {name: tuple(x) if isinstance(x, list) else x for name, x in row.items()}
    if "same" in row:
        return replace(rule_cases.BY_NAME[row.pop("same")], op=OP, **row)
    return Case(**row | {"op": OP, "tags": frozenset(row.get("tags", ()))})


CASES = tuple(map(_read, json.loads(Path(__file__).with_suffix(".json").read_text())))
BY_NAME: Mapping[str, Case] = {case.name: case for case in CASES}
DECODED = (
    "kimi_one", "kimi_fresh", "kimi_none", "kimi_strong", "kimi_apart", "kimi_split", "kimi_deep",
    "kimi_reset", "kimi_collide", "kimi_reflect", "kimi_odd", "kimi_k96", "kimi_k256", "kimi_gva",
    "kimi_norm", "kimi_norm_zero", "kimi_gates", "kimi_bound", "kimi_scale", "kimi_values_tiny",
)  # fmt: skip
STEPS: Mapping[str, Case] = decoded(map(BY_NAME.__getitem__, DECODED))
