"""Computes Kimi Delta Attention forward: the delta rule with a decay per channel, several heads
side by side.

    S <- Diag(exp(g_t)) S    u = beta_t (v_t - S^T k_t)    S <- S + k_t u^T    o_t = scale S^T q_t

Source: arXiv:2510.26692. Value head j reads query and key of head j // (HV / H). The module `chunk`
has the equations of a chunk; once its tiles are made, it is advanced as one of the gated delta
rule.
"""

from delta_trn.nki_kernels import gated_delta_rule_fwd
from delta_trn.nki_kernels.gated_delta_rule_fwd import run_forward
from delta_trn.nki_kernels.language import nki
from delta_trn.nki_kernels.orders import ORDERS
from delta_trn.nki_kernels.plan import PARTITIONS
from delta_trn.nki_kernels.schedule import Stage, list_work, rank
from delta_trn.nki_kernels.tiles import uniforms
from delta_trn.nki_kernels.triangular import INVERTING

PREPARING = (
    Stage("load", makes=("g", "beta", "qk", "v")),
    Stage("square keys", needs=("qk",), makes=("squares",)),
    Stage("normalize", needs=("squares",), makes=("keys",)),
    Stage("transpose q, k", needs=("keys",), makes=("qk_t",)),
    Stage("sum channels", needs=("g",), makes=("exponentials",)),
    Stage("multiply decays", needs=("exponentials",), makes=("decays",)),
    Stage("scale keys", needs=("qk_t", "decays"), makes=("scaled keys",)),
    Stage("strengths", needs=("beta", "v"), makes=("gates",)),
    Stage("factors", needs=("g", "qk_t"), makes=("factors",)),
    Stage("pairs", needs=("factors",), makes=("pairs",)),
    Stage("weigh pairs", needs=("pairs", "gates"), makes=("P_t", "L")),
    Stage("list columns", needs=("L",), makes=("block_columns",)),
)
STAGES = (
    *PREPARING,
    *INVERTING,
    Stage("W", needs=("T", "scaled keys"), makes=("W",)),
    Stage("P T", needs=("T", "P_t"), makes=("PT_t",)),
    Stage("R", needs=("scaled keys", "gates"), before=("S",), makes=("R",)),
    Stage("O", needs=("scaled keys", "PT_t", "R"), makes=("o",)),
    Stage("S", needs=("W", "R"), before=("S",), makes=("S",)),
)
ORDER = rank("kimi_delta_attention_fwd", STAGES, ORDERS["CHANNELS_FORWARD"])


@nki.jit
def kimi_delta_attention_fwd(
    q, k, v, g, beta, initial_state, scale, l2norm, has_state, every, C, lanes, width
):
    """Computes Kimi Delta Attention over whole sequences.

    Args, Returns:
        as `gated_delta_rule_fwd`, but g [N, T, HV, K] float32, the decay's logarithm, -1e4 to 0; K
        <= 128
    """
    assert q.shape[3] <= PARTITIONS, (
        f"K={q.shape[3]} exceeds {PARTITIONS} partitions, one for each channel"
    )
    work = list_work(ORDER, (q.shape[1] + C - 1) // C)
    options = (scale, l2norm, has_state, every, C, lanes, width)
    return run_forward((q, k, v, g, beta), initial_state, options, work, True)


def give_channels(arguments):
    """Returns the arguments of an example of the gated delta rule with a decay per channel."""
    q, k, v, g, *rest = arguments
    return q, k, v, -(uniforms(*g.shape[:3], q.shape[3]) ** 3), *rest


def example(**shape):
    """Returns the kernel and arguments as in training: no initial state,
    l2norm; every=0: as in inference.
    """
    return kimi_delta_attention_fwd, give_channels(gated_delta_rule_fwd.example(**shape)[1])
