"""Arms: alternatives that a sweep compares, each a name and the keys of the configuration that it changes.

ARMS holds the named sets, among them the questions that arXiv:2606.04048 leaves open.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from delta_trn.train.settings.errors import UsageError


@dataclass(frozen=True)
class Arm:
    """An alternative: keys of the configuration and their values, as on the command line.

    axis, scale     where arms are amounts of one thing, its name and how much of it: the report then says how
                    curves move per doubling of it
    """

    name: str
    changes: Mapping[str, str] = field(default_factory=dict)
    axis: str = ""
    scale: float = math.nan


def parse_arms(text: str) -> tuple[Arm, ...]:
    """Reads arms from the command line.

        NAME            a set of ARMS
        KEY=V1,V2       one arm for every value of a key, named after the value; an axis if all are positive
        FILE.json       {"name": {"key": "value", ...}, ...}

    Raises UsageError for anything else.
    """
    if text in ARMS:
        return ARMS[text]
    key, equals, values = text.partition("=")
    if equals:
        names = [value.strip() for value in values.split(",")]
        if not key or not all(names) or len(set(names)) < len(names):
            raise UsageError(
                f"arms={text}: expected a key and different values, such as model.readout=sqrt_k,none"
            )
        amounts = [_amount(name) for name in names]
        if all(amounts) and len(set(amounts)) > 1:
            pairs = zip(names, amounts, strict=True)
            return tuple(Arm(name, {key: name}, key, amount) for name, amount in pairs)
        return tuple(Arm(name, {key: name}) for name in names)
    if text.endswith(".json"):
        return _load_arms(Path(text))
    near = get_close_matches(text, ARMS, n=1)
    hint = f"did you mean {near[0]}? known" if near else "known"
    raise UsageError(f"arms={text}: {hint}: {', '.join(ARMS)}; or KEY=V1,V2, or FILE.json")


def _amount(text: str) -> float:
    """Returns the positive number that a value is; 0 for anything else."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < math.inf else 0.0


def _load_arms(path: Path) -> tuple[Arm, ...]:
    def as_text(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        arms = tuple(
            Arm(name, {key: as_text(value) for key, value in keys.items()}) for name, keys in tree.items()
        )
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(
            f'arms={path} cannot be read ({error}); expected {{"name": {{"key": "value"}}, ...}}'
        ) from None
    if not arms:
        raise UsageError(f"arms={path} contains no arm")
    return arms


_FOUR_VALUES = {"model.ddl_value_channels": "4"}
_TOKEN, _CHANNEL = {"model.ddl_compressor": "token"}, {"model.ddl_compressor": "channel"}

_WALL = (
    Arm("as it is"),
    Arm("skip D v", {"model.value_skip": "1"}),
    Arm("bounded tokens", {"model.o_gradient_bound": "2"}),
    Arm("larger epsilon", {"model.output_norm_eps": "0.01"}),
    Arm("aligned gates", {"parametrization": "mup_aligned"}),
    Arm("clipping norm", {"optimizer.clip_norm": "width"}),
)
_DEPTHS = (2, 4, 8)
_LOUD = {"model.mixer_output_init": "1"}  # the paper's: mixers that add to the stream from the first step


def _horizon(times: int) -> dict[str, str]:
    """Returns the keys of a run that is so many times as long as `transfer`, its warmup included."""
    return {"steps": str(300 * times), "schedule.warmup": str(30 * times)}


ARMS: Mapping[str, tuple[Arm, ...]] = {
    # Which power of width do SGD's gates and per-head parameters need? Tables 1 and 2 have 1/sqrt(m) and
    # sqrt(m). Full alignment of gradients and inputs would ask for 1/m, from initial gates of 1/m, and 1.
    # "mup_original" has 1 and 1.
    "sgd_gates": tuple(
        Arm(name, {"parametrization": name}) for name in ("mup", "mup_aligned", "mup_original")
    ),
    # Are norm gains and convolution taps vectors, as in Tensor Programs V, or hidden matrices, as in the
    # paper's code?
    "vectors": tuple(Arm(name, {"parametrization": name}) for name in ("mup", "mup_authors")),
    # Does the factor on the delta rule's output matter? An exact norm would cancel it.
    "readout": tuple(Arm(name, {"model.readout": name, **_LOUD}) for name in ("sqrt_k", "none")),
    # Heads remember 16 times as long. Are SGD's rates for what they store to be divided by that factor, as in
    # the paper, by its root, or not at all?
    "slow_forgetting": tuple(
        Arm(f"memory^{power:g}", {"model.forgetting": "0.0625", "optimizer.memory": repr(16.0**power)})
        for power in (0.0, 0.5, 1.0)
    ),
    # The released code draws taps and embedding so small that mixers add little at first, and the output
    # norm's epsilon keeps it so. A zero output projection does the same at any width, without epsilon.
    "initialization": (
        *(Arm(name, {"model.init": name, **_LOUD}) for name in ("delta_trn", "authors")),
        Arm("mixers from 0", {"model.mixer_output_init": "0"}),
    ),
    # AdamW multiplies decay by each parameter's own rate, so that wide matrices decay less under muP. Does
    # that help?
    "weight_decay": (
        Arm("no decay", {"optimizer.weight_decay": "0"}),
        Arm("with the rate", {"optimizer.independent_weight_decay": "false"}),
        Arm("independent", {"optimizer.independent_weight_decay": "true"}),
    ),
    # What stops the wall? 1% of tokens have gradients that do not shrink with width: where o is nearly 0,
    # before its norm. A skip keeps it away from 0, and a bound limits such a token's gradient. Rate 1 for
    # scalars and a clipping norm of one size at every width mend rules that such tokens make worse.
    "wall": _WALL,
    "wall_sgd": (*_WALL, Arm("scalars at rate 1", {"parametrization": "mup_scalars"})),  # AdamW's have it
    # How does depth move the best rate, without a rule and with CompleteP's, whose base is two layers?
    "depth": (
        *(Arm(f"{n} layers", {"model.layers": str(n)}, "layers", n) for n in _DEPTHS),
        Arm("CompleteP, 2 layers", {"model.layers": "2"}, "layers with CompleteP", 2),
        *(
            Arm(
                f"CompleteP, {n} layers",
                {"model.layers": str(n), "model.base_layers": "2"},
                "layers with CompleteP",
                n,
            )
            for n in _DEPTHS[1:]
        ),
    ),
    # How does the number of tokens move it, and the size of a batch at one number of tokens?
    "horizon": tuple(Arm(f"{300 * n} steps", _horizon(n), "steps", 300 * n) for n in (1, 4)),
    "batch": tuple(
        Arm(
            f"{n} sequences",
            {"batch.sequences": str(n), "steps": str(2400 // n), "schedule.warmup": str(240 // n)},
            "sequences per batch",
            n,
        )
        for n in (4, 8, 16)
    ),
    # From which epsilon on does Adam's denominator stop following the size of the gradient?
    "epsilon": tuple(Arm(f"eps {eps}", {"optimizer.eps": eps}) for eps in ("1e-12", "1e-8", "1e-6")),
    # What does a residual stream gain from erasing, from several values per feature, from how they are read?
    # "Deep Delta Learning" has no write-only control. A direction, a gate and a compressor cost up to 2% more
    # parameters than a sum; SwiGLU's size makes up for it, within 0.1% at width 96.
    "ddl_residuals": (
        Arm("additive", {"model.residual": "additive", "model.intermediate_size": "266"}),
        Arm("dv=1", {"model.residual": "ddl", "model.intermediate_size": "265"}),
        Arm("TC", {"model.residual": "ddl", "model.intermediate_size": "256", **_FOUR_VALUES, **_TOKEN}),
        Arm("CC", {"model.residual": "ddl", "model.intermediate_size": "261", **_FOUR_VALUES, **_CHANNEL}),
        Arm(
            "write-only",
            {"model.residual": "write_only", "model.intermediate_size": "261", **_FOUR_VALUES, **_CHANNEL},
        ),
    ),
}
