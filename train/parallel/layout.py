"""How the processes of a run share a step: who has how many sequences,
and how many go forward at once.
"""

from dataclasses import dataclass

from delta_trn.train.settings.errors import ConfigError
from delta_trn.train.settings.schema import RunConfig


@dataclass(frozen=True)
class Layout:
    """One process's share of a step.

    shares      data-parallel shares of a step; the processes of a tensor or context group have the
                same one
    sequences   sequences of one share
    micro       sequences in one forward pass
    length      tokens of each sequence that one process has
    """

    shares: int
    sequences: int
    micro: int
    length: int


def layout_of(config: RunConfig, world: int) -> Layout:
    """Returns the layout of a run on `world` processes.
    See `require_divisible` for what must divide what.
    """
    d, b = config.distribution, config.batch
    shares = world // (d.tensor * d.context)
    sequences = b.sequences // shares
    return Layout(shares, sequences, min(b.micro or sequences, sequences), b.length // d.context)


def is_divided(config: RunConfig, world: int) -> bool:
    """Returns whether a process has only a part of the weights,
    or of the memory of their optimizer.
    """
    return world > 1 and (config.distribution.mode != "ddp" or config.distribution.tensor > 1)


def require_divisible(config: RunConfig, world: int) -> None:
    """ConfigError unless `world` processes can share this run, naming what does not divide what."""
    d, m, b = config.distribution, config.model, config.batch
    group = d.tensor * d.context
    if world % group:
        raise ConfigError(
            f"distribution.tensor={d.tensor} x distribution.context={d.context} does not divide "
            f"{world} processes; start a multiple of {group} with torchrun --nproc_per_node, or "
            "change them"
        )
    if config.log.probes and world > 1:
        raise ConfigError(
            f"log.probes=true looks into the model of one process, and this run has {world}; leave "
            "it out, or start one process"
        )
    layout = layout_of(config, world)
    shares = layout.shares
    if b.sequences % shares:
        raise ConfigError(
            f"batch.sequences={b.sequences} cannot be shared by {shares} data-parallel processes; "
            f"give a multiple of {shares}"
        )
    if layout.sequences % layout.micro:
        raise ConfigError(
            f"batch.micro={b.micro} does not divide the {layout.sequences} sequences that each of "
            f"{shares} data-parallel processes has in a step; give a divisor"
        )
    if b.length % d.context:
        raise ConfigError(
            f"distribution.context={d.context} does not divide batch.length={b.length}; give a "
            "divisor"
        )
    if d.context > 1 and b.length // d.context < m.conv_size:
        raise ConfigError(
            f"distribution.context={d.context} leaves {b.length // d.context} tokens to a process, "
            f"and a convolution of {m.conv_size} taps reaches further than one neighbor; lower it"
        )
    if d.context > 1 and m.attention_layers:
        raise ConfigError(
            "distribution.context divides sequences at states, which softmax attention does not "
            "have; set model.attention_layers= to none, or distribution.context=1"
        )
    for name, heads in (("model.heads", m.heads), ("model.v_heads", m.v_heads or m.heads)):
        if heads % d.tensor:
            raise ConfigError(
                f"distribution.tensor={d.tensor} does not divide {name}={heads}: every process has "
                "whole heads; give a divisor"
            )
