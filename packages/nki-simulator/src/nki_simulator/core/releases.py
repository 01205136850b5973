"""What the releases of NKI from 0.2.0 to 0.7.0 take: one table of rules, each with its source.

Without a release every rule holds, so that what runs here runs under all of them. A rule that is
`doubtful` stands in no text: no kernel of AWS's own library has the form (258 files of nki-library
2.28 and 350 of 2.29 were searched). A rule that `warns` stands in a text, and kernels that ran on
chips break it: it is no error.

Sources: aws-neuron-sdk at the tag of each release (SDK), nki-library at 2.28 and 2.29.
"""

from dataclasses import dataclass
from functools import lru_cache

RELEASES = ("0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0")
_SDKS = ("2.28.1", "2.29.1", "2.30.0", "2.31.1", "2.32.0", "2.33.0")
SDK: dict[str, str] = dict(zip(RELEASES, _SDKS, strict=True))


@dataclass(frozen=True)
class Rule:
    """A form of kernel code, and the releases from `first` to `last` that do not take it."""

    first: str
    last: str
    instead: str
    source: str
    doubtful: bool = False
    warns: str = ""  # from this release on it is no error

    def holds(self, release: str) -> bool:
        return RELEASES.index(self.first) <= RELEASES.index(release) <= RELEASES.index(self.last)

    def only_warns(self, nki: str | None) -> bool:
        """Return whether none of the releases whose rules hold takes it for an error."""
        return bool(self.warns) and all(r >= self.warns for r in releases_of(nki) if self.holds(r))

    def __str__(self) -> str:
        span = (
            f"nki {self.first}" if self.first == self.last else f"nki {self.first} to {self.last}"
        )
        verb = "is doubtful in" if self.doubtful else "is refused, or wrong, in"
        if self.warns:
            verb = "is refused by AWS's text, and public kernels have it, in"
        return f"{verb} {span}; {self.instead} ({self.source})"


TRACER = "refused by the tracer of nki 0.6.0: docs/neuron-notes.md of foxl-ai/kiln"
LIBRARY = "in no kernel of nki-library 2.28 and 2.29"
RULES = {
    # seen while a kernel runs
    "a None argument": Rule(
        "0.2.0",
        "0.3.0",
        "each call would compile again: pass a tensor or a number that is not read",
        "NKI release notes, 0.4.0, bug fixes",
    ),
    "a view of a view": Rule(
        "0.2.0",
        "0.4.0",
        "index a tile, or its .reshape, once",
        "NKI migration guide of SDK 2.28, 'Nested slicing is not available'; nki-library 2.29 "
        "slices "
        "a slice of HBM; views compose from 0.5.0",
        warns="0.3.0",
    ),
    "an integer index of the partition axis": Rule(
        "0.2.0",
        "0.2.0",
        "0.2.0 drops the axis, later releases keep it: use a slice",
        "NKI language guide of SDK 2.28 and of 2.29, tensor indexing",
    ),
    "a matmul operand of three dimensions": Rule(
        "0.3.0",
        "0.3.0",
        "its simulator computes zeros: give [partitions, free]",
        "NKI release notes, 0.4.0, nki.simulate",
    ),
    "a view method": Rule(
        "0.2.0",
        "0.4.0",
        "use a slice, .ap or .reshape",
        "NKI release notes, 0.5.0, view primitives",
    ),
    "accumulation onto zeros of another instruction": Rule(
        "0.2.0",
        "0.7.0",
        "begin with accumulate=False",
        "stubs of nc_matmul; trnfft, trnblas do it",
        warns="0.2.0",
    ),
    "a destination that repeats": Rule(
        "0.2.0",
        "0.7.0",
        "give each element a place of its own",
        "its last value stays; qkv of nki-library 2.29 does it where only the sum counts",
        warns="0.2.0",
    ),
    "a transposition into a wider dtype": Rule(
        "0.2.0",
        "0.7.0",
        "transpose by nc_matmul with an identity",
        "stubs of nc_transpose want one dtype; Trn1 takes bfloat16 into float32 PSUM alone, as "
        "foxl-ai/kiln measured, and three kernels for trn2 do it",
        warns="0.2.0",
    ),
    "an output in private_hbm": Rule(
        "0.2.0",
        "0.7.0",
        "allocate it with buffer=nl.shared_hbm",
        "NKI language guide; ltx2-video-audio of NxD Inference does it",
        warns="0.2.0",
    ),
    # seen in a kernel's source
    "a tuple as a loop's target": Rule(
        "0.2.0",
        "0.6.0",
        "loop over an index, and assign",
        LIBRARY,
        doubtful=True,
    ),
    "a starred value": Rule(
        "0.2.0", "0.6.0", "write the values one by one", LIBRARY, doubtful=True
    ),
    "enumerate, zip, map and their like": Rule(
        "0.2.0", "0.6.0", "loop over range(len(...))", LIBRARY, doubtful=True
    ),
    "`is` with None": Rule(
        "0.3.0",
        "0.6.0",
        "use == or !=",
        "NKI 0.3.0 update guide, language restrictions; nki-library 2.29 does it",
        warns="0.3.0",
    ),
    "a function inside a function": Rule(
        "0.2.0",
        "0.5.0",
        "define it at the top (0.6.0 has it for fori_loop)",
        "CHANGELOG of trnrand 0.5.0",
    ),
    "a function defined in a loop": Rule(
        "0.6.0", "0.6.0", "define it at the top, or before the loop", TRACER
    ),
    "the power operator": Rule("0.6.0", "0.6.0", "multiply, or compute it outside", TRACER),
    "functools.partial": Rule("0.6.0", "0.6.0", "write a function, or pass the arguments", TRACER),
    "an element as one of several targets": Rule(
        "0.2.0", "0.6.0", "assign the values one by one", "CHANGELOG of trnrand 0.5.0"
    ),
    "Python outside the compiler's subset": Rule(
        "0.2.0", "0.6.0", "0.7.0 traces ordinary Python", "NKI language guide of SDK 2.28 to 2.32"
    ),
    "a mutable global": Rule(
        "0.2.0",
        "0.7.0",
        "a kernel must be pure: use a tuple",
        "NKI language guide; nki-library 2.29 does it",
        warns="0.2.0",
    ),
    "a variable of an enclosing function": Rule(
        "0.2.0",
        "0.6.0",
        "the parser finds it unbound: make it an argument or a global",
        "CHANGELOG of trnblas 0.5.4",
    ),
    "dynamic_range": Rule(
        "0.7.0", "0.7.0", "use range", "NKI release notes, 0.6.0, deprecated APIs"
    ),
}

# Functions of nki.isa and nki.language, and parameters, that came after 0.2.0: from the stubs of
# each tag.
NEW = {
    "0.3.0": (
        "nc_matmul accumulate",
        "dma_copy engine",
        "dma_compute unique_indices",
        "register_move src",
        "sendrecv dma_engine",
        "ndarray address",
        "shared_identity_matrix dst",
        "all",
        "arctan",
        "broadcast_to",
        "ceil",
        "copy",
        "cos",
        "dropout",
        "empty_like",
        "erf",
        "erf_dx",
        "exp",
        "expand_dims",
        "floor",
        "fmod",
        "full",
        "gather_flattened",
        "gelu",
        "gelu_apprx_tanh",
        "gelu_dx",
        "load",
        "load_transpose2d",
        "log",
        "matmul",
        "max",
        "mean",
        "min",
        "mish",
        "mod",
        "negative",
        "no_reorder",
        "ones",
        "prod",
        "rand",
        "random_seed",
        "relu",
        "rms_norm",
        "sigmoid",
        "sign",
        "silu",
        "silu_dx",
        "sin",
        "softmax",
        "softplus",
        "sqrt",
        "square",
        "store",
        "sum",
        "tan",
        "tanh",
        "transpose",
        "trunc",
        "var",
        "where",
        "zeros_like",
    ),
    "0.4.0": (
        "activate2",
        "dma_copy priority",
        "dma_transpose priority",
        "dma_compute oob_mode",
        "tensor_scalar_reduce reduce_cmd",
        "tensor_scalar_reduce reduce_init",
    ),
    "0.5.0": ("get_nc_sub_version",),
    "0.6.0": ("topk", "fori_loop", "while_loop", "tensor_scalar_reduce reduce_res_negate"),
}
# Instructions whose parameters had another order up to a release, by the stubs of each tag.
BEFORE = {
    "affine_select": {
        "0.2.0": "dst pattern offset channel_multiplier on_true_tile on_false_value cmp_op name"
    },
    "dma_compute": {
        "0.2.0": "dst srcs scales reduce_op name",
        "0.3.0": "dst srcs reduce_op scales unique_indices name",
    },
    "dma_copy": {
        "0.2.0": "dst src dst_rmw_op oob_mode dge_mode unique_indices name",
        "0.3.0": "dst src oob_mode dge_mode engine name",
    },
    "dma_transpose": {"0.3.0": "dst src axes dge_mode oob_mode name"},
    "nc_matmul": {
        "0.2.0": "dst stationary moving is_stationary_onezero is_moving_onezero is_transpose tile_position "
        "tile_size perf_mode name"
    },
}
# Parameters that a release before this one requires.
REQUIRED_BEFORE = {"affine_select": ("offset", "0.3.0"), "iota": ("offset", "0.3.0")}


def releases_of(nki: str | None) -> tuple[str, ...]:
    """Returns the releases whose rules hold: the named one, or all of them."""
    if nki is None:
        return RELEASES
    if nki not in RELEASES:
        raise ValueError(
            f"nki {nki!r} is not a release with a table of rules: {', '.join(RELEASES)}, or None"
        )
    return (nki,)


def orders_of(nki: str | None, name: str, newest: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Returns the order of an instruction's parameters in each release whose rules hold, newest
    first.

    >>> orders_of("0.2.0", "dma_compute", ())
    {'0.2.0': ('dst', 'srcs', 'scales', 'reduce_op', 'name')}
    """
    orders = {}
    for release in reversed(releases_of(nki)):
        older = [names for last, names in BEFORE.get(name, {}).items() if release <= last]
        orders[release] = tuple(older[0].split()) if older else newest
    return orders


@lru_cache(maxsize=16)
def rules_of(nki: str | None) -> dict[str, Rule]:
    """Returns the rules of a release, or of all, by name.

    >>> "a None argument" in rules_of("0.2.0"), "a None argument" in rules_of("0.7.0")
    (True, False)
    """
    return {n: r for n, r in RULES.items() if any(r.holds(release) for release in releases_of(nki))}


def signature_problem(nki: str | None, name: str, keywords: tuple[str, ...]) -> str | None:
    """Returns what a release has against a call of nisa.NAME or nl.NAME
    with these keywords, or None.
    """
    oldest = RELEASES.index(releases_of(nki)[0])
    for release, entries in NEW.items():
        if oldest >= RELEASES.index(release):
            continue
        for entry in entries:
            function, _, parameter = entry.partition(" ")
            if function == name and (not parameter or parameter in keywords):
                what = f"{name} {parameter}=" if parameter else name
                return f"{what} is new in nki {release} (stubs of SDK {SDK[release]})"
    parameter, since = REQUIRED_BEFORE.get(name, ("", RELEASES[0]))
    if parameter and parameter not in keywords and oldest < RELEASES.index(since):
        return f"{name} needs {parameter}= before nki {since} (stubs of SDK {SDK[RELEASES[0]]})"
    return None
