"""Which forms of instructions public kernels have, so that a run can list those that it has alone.

A form is an instruction, or an instruction with one operator, engine or command: "tensor_copy
engine=gpsimd". AWS may document a form that no public kernel has: then nobody has shown that a
compiler takes it.

precedents.json has them. Its sources, whose calls were read: nki-library of SDK 2.28 and 2.29, and
of 13 April 2026, nki-samples of 10 February 2026, trnfft, trntensor, trnblas 0.5.4, trnsparse
0.6.0, trnrand 0.5.0, zml's attention, nki-moe, and contributed models of NxD Inference.
"""

import json
from collections.abc import Iterable
from pathlib import Path

# an instruction: what its options are in public kernels; an option that is not named is in none
FILE = Path(__file__).with_suffix(".json")
PUBLIC: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text())
OPTIONS = ("op", "op0", "op1", "cmp_op", "reduce_op", "reduce_cmd", "engine")


def without_precedent(forms: Iterable[tuple[str, str, str]]) -> list[str]:
    """Returns the forms (instruction, option, value) that no public kernel has; without an option
    "" and "".

    >>> without_precedent([("tensor_copy", "", ""), ("tensor_copy", "engine", "gpsimd"), ("topk", "", "")])
    ['tensor_copy engine=gpsimd', 'topk']
    """
    alone = {
        f"{op} {option}={value}" if option else op
        for op, option, value in forms
        if op not in PUBLIC or (option and value not in PUBLIC[op].get(option, ()))
    }
    return sorted(alone)
