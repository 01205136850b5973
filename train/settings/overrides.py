"""`key=value` on the command line: strict, with the nearest known key where one is unknown."""

import argparse
import contextlib
import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from delta_trn.train.settings.effects import require_effect
from delta_trn.train.settings.errors import ConfigError, UsageError
from delta_trn.train.settings.schema import RunConfig, declaration, flatten, validate

# 2**-8.5, as learning rate grids are written
_POWER = re.compile(r"-?\d+(\.\d+)?\*\*-?\d+(\.\d+)?")


def read_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str], *, section: str = ""
) -> argparse.Namespace:
    """Reads options and `key=value` in any order. UsageError for a key that is spelled as an
    option.

    section     where the command's own keys are; of two keys with one name, its is the one that is
                meant
    """
    # argparse would call `key=value` required, where anything else is missing
    for action in parser._actions:
        action.required = action.required and action.nargs != "*"
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if not unknown:
        return options
    name, equals, value = unknown[0].lstrip("-").replace("-", "_").partition("=")
    if not equals:
        rest = [*arguments, ""]
        value = rest[rest.index(unknown[0]) + 1] or "VALUE"
    # another command's own key, such as a sweep's widths, stays as it is
    keys = [key for key, _ in flatten(RunConfig()) if key.rpartition(".")[2] == name]
    key = next((key for key in keys if key == f"{section}.{name}"), keys[0] if keys else name)
    raise UsageError(
        f"{parser.prog} has no option {unknown[0]}; keys have no dashes: {key}={value} "
        f"(`{parser.prog} --help` lists the options)"
    )


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """Returns key -> value of each `key=value`. UsageError for anything else, and for a key given
    twice.

    >>> parse(["steps=100", "optimizer.lr=4e-3"])
    {'steps': '100', 'optimizer.lr': '4e-3'}
    """
    changes: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise UsageError(f"expected key=value, got {argument!r}, as in steps=100")
        if key in changes:
            raise UsageError(f"{key} is given twice: {changes[key]!r} and {value!r}")
        changes[key] = value
    return changes


def apply(config: RunConfig, changes: dict[str, str]) -> RunConfig:
    """Returns the configuration with changes. ConfigError for an unknown key,
    a wrong value, or no effect.
    """
    changed = change(config, changes)
    require_effect(changed, changes.keys())
    return changed


def change(config: RunConfig, changes: dict[str, str]) -> RunConfig:
    """Returns the configuration with changes, also those without effect.
    ConfigError for all else.
    """
    tree = config.model_dump()
    for key, text in changes.items():
        section, name = _locate(tree, key)
        section[name] = _value(declaration(key).annotation, text)
    return validate(tree)


def number(text: str) -> float:
    """Reads a number such as `0.01`, or a power such as `2**-8.5`.
    Raises ValueError or OverflowError.
    """
    base, power, exponent = text.partition("**")
    return math.pow(float(base), float(exponent)) if power else float(base)


def whole_numbers(key: str, text: str, *, least: int = 1, count: int = 1) -> list[int]:
    """Reads `count` or more different whole numbers, such as `1,2`.
    Raises UsageError for anything else.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) < count or min(numbers) < least or len(set(numbers)) < len(numbers):
        several = f"{count} or more " if count > 1 else ""
        raise UsageError(
            f"{key}={text}: expected {several}different whole numbers of at least {least}, such as "
            "1,2"
        )
    return numbers


def whole_number(key: str, text: str) -> int:
    """Reads one whole number from 1 on. Raises UsageError for anything else."""
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise UsageError(f"{key}={text}: expected one whole number of at least 1")


def _locate(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    section, name = tree, key
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            raise ConfigError(_unknown(key))
        section, name, tree = tree, part, tree[part]
    if isinstance(tree, dict):
        keys = ", ".join(f"{key}.{leaf}" for leaf in tree)
        raise ConfigError(f"{key} is a section, not a key; its keys are {keys}")
    return section, name


def _unknown(key: str) -> str:
    known = [name for name, _ in flatten(RunConfig())]
    # a forgotten section is commoner than a misspelled name: lr for optimizer.lr
    same_name = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = same_name or get_close_matches(key, known, n=3, cutoff=0.5)
    if not near:
        leaves: dict[str, list[str]] = {}
        for name in known:
            leaves.setdefault(name.rpartition(".")[2], []).append(name)
        matches = get_close_matches(key.rpartition(".")[2], list(leaves), n=1, cutoff=0.5)
        near = [name for match in matches for name in leaves[match]]
    hint = f"the nearest known: {', '.join(near)}" if near else "none is near"
    return f"unknown key {key!r}; {hint} (`delta-trn run RECIPE --all-keys` prints all)"


def _value(kind: Any, text: str) -> Any:
    """Returns what pydantic converts and checks: None, a list, or the text."""
    if text.lower() in ("none", "null") and type(None) in get_args(kind):
        return None
    if get_origin(kind) is tuple:
        return [part.strip() for part in text.strip("()[]").split(",") if part.strip()]
    if _POWER.fullmatch(text):
        with contextlib.suppress(ValueError, OverflowError):
            return number(text)
    return text
