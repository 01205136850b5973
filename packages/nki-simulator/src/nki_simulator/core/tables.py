"""The Scalar engine's tables of functions, of which one at a time is resident, and what loading one
costs.

A function such as exp is a table of polynomials. The compiler ships tables in sets, loads a set
where the resident one lacks the next function, and refuses a program that uses more than eight.
Copies, squares and their like are in every set, so they load nothing.

Sources, all public:

    sets    tables.json: act_info.json of neuronx-cc 2.24, the set "trainium", which serves every
            generation
    limit   NCC_INLA001: "the number of activation tables must be <= 8"
    time    profiles of Gated DeltaNet kernels on trn2, each load exactly 1,283 ns in more than a
            thousand (KevGomes1403/nki-moe-megakernel, round and decode profiles of August 2026).
            Nobody has published it for Trn1. AccelOpt's AdamW there alternates between sqrt and
            reciprocal, and its Scalar engine is busy for its instructions alone, so the compiler
            groups them or a load is shorter: `make measure-trn1` measures it
"""

import json
from pathlib import Path

LOAD_US = 1.283
MOST_SETS = 8

EVERYWHERE = frozenset({"copy", "square", "abs", "relu", "sign"})
SETS: dict[str, frozenset[str]] = {
    name: frozenset(own)
    for name, own in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}


def owners(function: str) -> tuple[str, ...]:
    """Returns the sets that have a function, in the compiler's order; () where every set has it.

    >>> owners("exp"), owners("copy")
    (('exp', 'log and exp'), ())
    """
    if function in EVERYWHERE:
        return ()
    sets = tuple(name for name, functions in SETS.items() if function in functions)
    if not sets:
        raise ValueError(f"no set of tables has {function!r}: add the compiler's set to SETS")
    return sets


class Tables:
    """Follows a program's functions, and says where a set is loaded.

    A load takes whichever sets have all functions up to the next load, and of these the first.

    >>> tables = Tables()
    >>> [tables.load_for(function) for function in ("exp", "copy", "silu", "silu", "exp")]
    [True, False, True, False, True]
    >>> tables.loads, tables.names()
    (3, ('exp', 'silu'))
    """

    def __init__(self) -> None:
        self.resident: list[tuple[str, ...]] = []  # candidates of each load

    @property
    def loads(self) -> int:
        return len(self.resident)

    def load_for(self, function: str) -> bool:
        """Returns whether a set is loaded for the next function."""
        sets = owners(function)
        if not sets:
            return False
        kept = tuple(name for name in (self.resident[-1] if self.resident else ()) if name in sets)
        if kept:
            self.resident[-1] = kept
            return False
        self.resident.append(sets)
        return True

    def names(self) -> tuple[str, ...]:
        """Returns the sets of the program, in the order of their first load."""
        return tuple(dict.fromkeys(candidates[0] for candidates in self.resident))
