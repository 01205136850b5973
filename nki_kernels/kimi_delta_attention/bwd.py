"""Computes the gradients of Kimi Delta Attention: from the states that forward kept, last chunk
first.

The modules `chunk` and `chunk_gradients` beside this one have the equations. Stretches of chunks
are solved again as in `nki_kernels.gated_delta_rule_bwd`.
"""

from delta_trn.nki_kernels import gated_delta_rule_bwd
from delta_trn.nki_kernels.gated_delta_rule_bwd import run_backward
from delta_trn.nki_kernels.kimi_delta_attention.fwd import PREPARING, give_channels
from delta_trn.nki_kernels.language import nki
from delta_trn.nki_kernels.orders import ORDERS
from delta_trn.nki_kernels.plan import PARTITIONS
from delta_trn.nki_kernels.schedule import Stage, list_work, rank
from delta_trn.nki_kernels.triangular import INVERTING

STAGES = (
    *PREPARING,
    *INVERTING,
    # of a chunk, the first one first
    Stage("apply T", needs=("T", "P_t", "scaled keys", "gates"), makes=("applied",)),
    Stage("R", needs=("scaled keys", "gates"), before=("S",), makes=("R",)),
    Stage("U", follows=("applied", "R"), makes=("U", "S")),
    # of a chunk, the last one first
    Stage("dR by channel", needs=("applied", "R", "U"), before=("dS",), makes=("dR",)),
    Stage("dS", follows=("dR",), makes=("dS",)),
    Stage("transpose gradients", needs=("U",), follows=("dR",), makes=("transposes",)),
    Stage("transpose states", needs=("R",), follows=("dR",), makes=("transposed states",)),
    Stage("round pairs", follows=("transposes",), makes=("own",)),
    Stage("mask pairs", follows=("own",), makes=("masked",)),
    Stage("read channels", follows=("transposed states", "own"), makes=("reads",)),
    # dq, dk and dg of one chunk of a bundle lie in PSUM at a time
    Stage("begin dg", follows=("reads",), before=("stored", "dg"), makes=("begun",)),
    Stage("levels 1", follows=("begun", "masked"), makes=("one",)),
    Stage("levels 2", follows=("one",), makes=("two",)),
    Stage("levels 3", follows=("two",), makes=("three",)),
    Stage("levels 4", follows=("three",), makes=("four",)),
    Stage("levels 5", follows=("four",), makes=("five",)),
    Stage("levels 6", follows=("five",), makes=("six",)),
    Stage("levels 7", follows=("six",), makes=("seven",)),
    Stage("levels 8", follows=("seven",), makes=("raw dqk",)),
    Stage("sum along", follows=("raw dqk",), makes=("along",)),
    Stage("norms", follows=("along",), makes=("dqk",)),
    Stage("store keys", follows=("dqk",), makes=("stored",)),
    Stage("sum rows", follows=("raw dqk",), makes=("dg",)),
)
ORDER = rank("kimi_delta_attention_bwd", STAGES, ORDERS["CHANNELS_BACKWARD"])


@nki.jit
def kimi_delta_attention_bwd(
    q,
    k,
    v,
    g,
    beta,
    do,
    dstate,
    initial_state,
    states,
    scale,
    l2norm,
    has_dstate,
    has_state,
    every,
    C,
    lanes,
    width,
):
    """Computes the gradients of `kimi_delta_attention_fwd`, with the same C and every.

    Args, Returns:
        as `gated_delta_rule_bwd`, with g and dg [N, T, HV, K]
    """
    assert q.shape[3] <= PARTITIONS, (
        f"K={q.shape[3]} exceeds {PARTITIONS} partitions, one for each channel"
    )
    options = (scale, l2norm, has_dstate, has_state, every, C, lanes, width)
    work = list_work(ORDER, (q.shape[1] + C * every - 1) // (C * every))
    return run_backward((q, k, v, g, beta), do, dstate, initial_state, states, options, work, True)


def example(**shape):
    """Returns the kernel and arguments as in training: no gradient of the final state, l2norm."""
    return kimi_delta_attention_bwd, give_channels(gated_delta_rule_bwd.example(**shape)[1])
