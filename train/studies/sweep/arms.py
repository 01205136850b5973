"""Arms: alternatives that a sweep compares, each a name and the keys it changes.

The named sets are the questions that arXiv:2606.04048 leaves open.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from delta_trn.train.settings.errors import UsageError


@dataclass(frozen=True)
class Arm:
    """Keys of the configuration as they would be given on the command line."""

    name: str
    changes: Mapping[str, str] = field(default_factory=dict)


PLAIN = Arm("")

_FOUR = {"model.ddl_value_channels": "4"}
_TOKEN, _CHANNEL = {"model.ddl_compressor": "token"}, {"model.ddl_compressor": "channel"}

ARMS: dict[str, tuple[Arm, ...]] = {
    # Which power of width do SGD's gates and per-head numbers need? Tables 1 and 2 have 1/sqrt(m) and
    # sqrt(m); full alignment of gradients and inputs would ask for 1/m and 1; "original" is 1 and 1.
    "sgd_gates": tuple(
        Arm(name, {"parametrization": name}) for name in ("mup", "mup_aligned", "mup_original")
    ),
    # Are norm gains and convolution taps vectors, as Tensor Programs V has them, or hidden matrices, as in
    # the paper's code?
    "vectors": tuple(Arm(name, {"parametrization": name}) for name in ("mup", "mup_authors")),
    # Does the factor on the delta rule's output matter, where an exact norm would cancel it?
    "readout": tuple(Arm(name, {"model.readout": name}) for name in ("sqrt_k", "none")),
    # Where heads remember 16 times as long, are SGD's rates for what they store to be divided by that, as the
    # paper has it, by its root, or not at all? Derived in `models.mup`.
    "slow_forgetting": tuple(
        Arm(f"memory^{power:g}", {"model.forgetting": "0.0625", "optimizer.memory": repr(16.0**power)})
        for power in (0.0, 0.5, 1.0)
    ),
    # Taps and embedding as the released code draws them, so small that mixers hardly speak at first and the
    # output norm's epsilon keeps them so; or a last matrix of 0: that without epsilon, at any width.
    "initialization": (
        *(Arm(name, {"model.init": name}) for name in ("delta_trn", "authors")),
        Arm("mixers from 0", {"model.mixer_output_init": "0"}),
    ),
    # AdamW multiplies decay by a parameter's own rate: under muP wide matrices decay less. Is that wanted?
    "weight_decay": (
        Arm("no decay", {"optimizer.weight_decay": "0"}),
        Arm("with the rate", {"optimizer.independent_weight_decay": "false"}),
        Arm("independent", {"optimizer.independent_weight_decay": "true"}),
    ),
    # From which epsilon on does Adam's denominator stop being the gradient's size?
    "epsilon": tuple(Arm(f"eps {eps}", {"optimizer.eps": eps}) for eps in ("1e-12", "1e-8", "1e-6")),
    # What does a residual stream gain from erasing, from more values a feature, from how they are read? The
    # write-only control is what "Deep Delta Learning" leaves to others. A direction, a gate and a compressor
    # cost up to 2% more parameters than a sum: SwiGLU's size makes up for it, within 0.1% at width 96.
    "ddl_residuals": (
        Arm("additive", {"model.residual": "additive", "model.intermediate_size": "266"}),
        Arm("dv=1", {"model.residual": "ddl", "model.intermediate_size": "265"}),
        Arm("TC", {"model.residual": "ddl", "model.intermediate_size": "256", **_FOUR, **_TOKEN}),
        Arm("CC", {"model.residual": "ddl", "model.intermediate_size": "261", **_FOUR, **_CHANNEL}),
        Arm(
            "write-only",
            {"model.residual": "write_only", "model.intermediate_size": "261", **_FOUR, **_CHANNEL},
        ),
    ),
}


@dataclass(frozen=True)
class Question:
    """A sweep that is one command: the axes of `python -m train sweep NAME`, unless others are given."""

    recipe: str
    axes: Mapping[str, str]


def _by_width(arms: str, rates: Mapping[str, str], widths: str = "64,256") -> Question:
    """Each arm at its best of three rates an octave apart, and how much it loses at the wider width with the
    rate that is best at the base width."""
    lrs = {f"lrs.{optimizer}": text for optimizer, text in rates.items()}
    swept = {"widths": widths, "optimizers": ",".join(rates), "seeds": "0,1", "refine": "0"}
    return Question("transfer", {"arms": arms, **swept, **lrs})


# what is no question of width's power is asked at twice the base width, not four times: in half the time
_ADAMW, _SGD = {"adamw": "2**-8..2**-6"}, {"sgd": "2**-4..2**-2"}
QUESTIONS: Mapping[str, Question] = {
    "ddl_residuals": Question(
        "ddl_residuals", {"arms": "ddl_residuals", "lrs": "2**-7..2**-6", "seeds": "0,1,2", "refine": "0"}
    ),
    "sgd_gates": _by_width("sgd_gates", _SGD),
    "vectors": _by_width("vectors", _SGD),
    "readout": _by_width("readout", _ADAMW, "64,128"),
    "slow_forgetting": _by_width("slow_forgetting", _SGD, "64,128"),
    "initialization": _by_width("initialization", _ADAMW, "64,128"),
    "weight_decay": _by_width("weight_decay", _ADAMW, "64,128"),
    "epsilon": _by_width("epsilon", _ADAMW, "64,128"),
}


def arms_of(text: str) -> tuple[Arm, ...]:
    """Arms from the command line.

        NAME            a set of ARMS
        KEY=V1,V2       one arm for every value of a key, named by the value
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
        return tuple(Arm(name, {key: name}) for name in names)
    if text.endswith(".json"):
        return _of_file(Path(text))
    near = get_close_matches(text, ARMS, n=1)
    hint = f"did you mean {near[0]}? known" if near else "known"
    raise UsageError(f"arms={text}: {hint}: {', '.join(ARMS)}; or KEY=V1,V2, or FILE.json")


def _of_file(path: Path) -> tuple[Arm, ...]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        arms = tuple(
            Arm(name, {key: _text(value) for key, value in keys.items()}) for name, keys in tree.items()
        )
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(
            f'arms={path} cannot be read ({error}); expected {{"name": {{"key": "value"}}, ...}}'
        ) from None
    if not arms:
        raise UsageError(f"arms={path} has no arm in it")
    return arms


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
