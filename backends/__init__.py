"""Delta-rule operations, each computed by whichever backend suits the device of its tensors.

gated_delta_rule, gated_delta_rule_step     the operations over time
kimi_delta_attention, kimi_delta_attention_step     the same with a decay for each channel of a key
delta_residual                              the operation over depth
gated_delta_layer                           what a layer computes between its projections
log_decay, write_strength                   the gates of Gated DeltaNet alone, which the rule makes
                                            too
short_convolution, gated_rms_norm, add_rms_norm, linear_cross_entropy       a layer's small operations
default_backend, checking                   which backend runs; whether data is checked
describe, BackendRefusal                    what runs here, and why the rest does not
"""

from delta_trn.backends.checks import BackendRefusal, checking
from delta_trn.backends.delta_residual import delta_residual
from delta_trn.backends.dispatch import Availability, default_backend
from delta_trn.backends.dispatch import describe as _describe
from delta_trn.backends.gated_delta_layer import find_layer_backend, gated_delta_layer
from delta_trn.backends.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from delta_trn.backends.gated_delta_rule.contract import log_decay, write_strength
from delta_trn.backends.kimi_delta_attention import kimi_delta_attention, kimi_delta_attention_step
from delta_trn.backends.layers import (
    add_rms_norm,
    gated_rms_norm,
    linear_cross_entropy,
    short_convolution,
)
from delta_trn.backends.machine import platforms

__all__ = [
    "BackendRefusal",
    "add_rms_norm",
    "checking",
    "default_backend",
    "delta_residual",
    "describe",
    "find_layer_backend",
    "gated_delta_layer",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_rms_norm",
    "kimi_delta_attention",
    "kimi_delta_attention_step",
    "linear_cross_entropy",
    "log_decay",
    "short_convolution",
    "write_strength",
]


def describe() -> list[Availability]:
    """Returns for each operation and backend on which of this machine's devices it runs,
    and why not.
    """
    return _describe(platforms())
