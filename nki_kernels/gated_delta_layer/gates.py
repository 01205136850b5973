"""Makes the gates of a layer, and their slopes, for all tokens of a call at once.

    x = a + dt_bias      g = -exp(A_log) softplus(x)      beta = beta_max sigmoid(b)

The Scalar engine evaluates exp alone: softplus, sigmoid and log are tables of their own, and each change of
tables costs it more than a microsecond. With y = exp(-|x|) and s = y / (1 + y/2), which is at most 2/3,

    softplus(x) = max(x, 0) + log(1 + y)
    log(1 + y)  = 2 artanh(s/2) = s (1 + q)         q = sum over k > 0 of (s/2)^2k / (2k + 1)
    sigmoid(x)  = max(y, x >= 0) / (1 + y)

so that softplus of a very negative x, which is y, keeps its digits. The sum ends at k = TERMS. What is left
out is less than 3^-14 / 15 (1 + 1/9 + ..) = 1.6e-8 of 1 + q. Besides, the relative error of g has at most ten
roundings of 2^-24 in it: two for each exponential, and one each for 1 + y/2, its reciprocal, s, 1 + q,
s (1 + q), and g. So it is less than 6.2e-7 of g(x); x itself is a rounded sum, as PyTorch's is.

g is RESET where it would be less, and where a packed sequence begins. Kernels take it in two words, as
`plan.split_decays` makes them. Backward takes slopes, and computes no exponential:

    dg/da       = -exp(A_log) sigmoid(x)            0 where g is RESET, which is no variable
    dg/dA_log   = g                                 likewise
    dbeta/db    = beta_max y_b / (1 + y_b)^2        y_b = exp(-|b|)

The last one has no difference in it, and so no cancellation where beta is nearly beta_max.

Layout in HBM: a, b, beta [N, T, HV]; g [N, T, HV, 2]; slopes [N, T, HV, 3], in the order above. On chip a
partition holds `slots` tokens that follow each other, so that a descriptor of DMA moves all of them: no token
needs another one, and the kernel loads each chunk from HBM as if PyTorch had made the gates. `start` makes a
dict of the arguments, the shape, and what the functions here hand to each other:

    x, y, r, s      a + dt_bias and b side by side, exp(-|.|), 1 / (1 + y), and sigmoid [rows, 2, slots, HV]
    bias, rate      dt_bias, and -exp(A_log), on all partitions [128, HV]
    begins          position, then RESET where that is 0, else 0 [rows, slots]
    decay           softplus(x), then g [rows, slots, HV]
"""

from delta_trn.nki_kernels.chunk import store_lanes
from delta_trn.nki_kernels.gated_rms_norm import load_everywhere, repeat_row
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import PARTITIONS
from delta_trn.nki_kernels.tiles import multiply_on_gpsimd, sbuf

RESET = -1024.0  # that of `backends.gated_delta_rule.contract`
MOST_LOG = 88.7  # of A_log: the exponential of 88.73 is infinite, and infinity times 0 is no number
ABSENT = -1e20  # a and b of a token that does not exist: its gates and slopes are 0
TO_INTEGER = 1.5 * 2.0**23  # added to a number between -2^22 and 2^22, it rounds it to the nearest integer
TERMS = 6  # of q


def start(a, b, A_log, dt_bias, biased, beta_max, position, packed, save):
    """Makes the dict that this module's functions take as `own`, once per call.

    It allocates g, beta and slopes in HBM, which the kernel returns where `save`; else there are no slopes.
    """
    N, T, HV = a.shape
    slots = (N * T + PARTITIONS - 1) // PARTITIONS
    buffer = nl.shared_hbm if save else nl.private_hbm
    g = nl.ndarray((N, T, HV, 2), dtype=nl.float32, buffer=buffer)
    beta = nl.ndarray((N, T, HV), dtype=nl.float32, buffer=buffer)
    slopes = beta
    if save:
        slopes = nl.ndarray((N, T, HV, 3), dtype=nl.float32, buffer=buffer)
    return {
        "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "biased": biased, "beta_max": beta_max,
        "position": position, "packed": packed, "save": save, "g": g, "beta": beta, "slopes": slopes,
        "tokens": N * T, "slots": slots, "rows": (N * T + slots - 1) // slots, "HV": HV,
    }  # fmt: skip


def load_gates(own):
    """Loads what `make_gates` takes."""
    rows, slots, HV = own["rows"], own["slots"], own["HV"]
    own["x"] = sbuf((rows, 2, slots, HV))
    if own["tokens"] < rows * slots:
        nisa.memset(dst=own["x"], value=ABSENT)
    move(own["a"], own["x"], 0, HV, False, own)
    move(own["b"], own["x"], slots * HV, HV, False, own)
    if own["biased"]:
        own["bias"] = load_everywhere(own["dt_bias"])
    own["rate"] = load_everywhere(own["A_log"])
    if own["packed"]:
        own["begins"] = sbuf((rows, slots))
        if own["tokens"] < rows * slots:
            nisa.memset(dst=own["begins"], value=1.0)
        move(own["position"], own["begins"], 0, 1, False, own)


def move(hbm, tile_sb, first, width, is_store, own):
    """Stores numbers of a tile in HBM [N, T, width], or loads them: `slots` times `width` per partition.

    `first` is the first one's place in a partition of the tile.
    """
    slots, free = own["slots"], 1
    for size in tile_sb.shape[1:]:
        free = free * size
    whole = own["tokens"] // slots
    rest = own["tokens"] - whole * slots
    for part in ((0, whole, slots * width), (whole, 1, rest * width)):
        p, rows, count = part
        if count > 0:
            far = hbm.ap(pattern=[[slots * width, rows], [1, count]], offset=p * slots * width)
            near = tile_sb.ap(pattern=[[free, rows], [1, count]], offset=p * free + first)
            if is_store:
                nisa.dma_copy(dst=far, src=near)
            else:
                nisa.dma_copy(dst=near, src=far)


def make_gates(own):
    """Computes and stores g, beta and, where they are kept, slopes."""
    evaluate_exponentials(own)
    compute_strengths(own)
    compute_softplus(own)
    compute_decays(own)
    store_words(own)
    if own["save"]:
        store_slopes(own)


def evaluate_exponentials(own):
    """Adds the bias to a, and computes y and the rate."""
    x_sb, rate_sb, y_sb = own["x"], own["rate"], sbuf(own["x"].shape)
    own["y"] = y_sb
    if own["biased"]:
        bias = repeat_row(own["bias"], own["rows"], own["slots"])
        nisa.tensor_tensor(dst=x_sb[:, 0], data1=x_sb[:, 0], data2=bias, op=nl.add)
    nisa.scalar_tensor_tensor(
        dst=y_sb, data=x_sb, op0=nl.multiply, operand0=-1.0, op1=nl.minimum, operand1=x_sb
    )
    nisa.tensor_scalar(dst=rate_sb, data=rate_sb, op0=nl.minimum, operand0=MOST_LOG)
    nisa.activation(dst=y_sb, op=nl.exp, data=y_sb)
    nisa.activation(dst=rate_sb, op=nl.exp, data=rate_sb)
    nisa.tensor_scalar(dst=rate_sb, data=rate_sb, op0=nl.multiply, operand0=-1.0)


def compute_strengths(own):
    """Computes sigmoid(x) and beta, and stores beta."""
    x_sb, y_sb, slots, HV = own["x"], own["y"], own["slots"], own["HV"]
    r_sb, s_sb = sbuf(x_sb.shape), sbuf(x_sb.shape)
    own["r"], own["s"] = r_sb, s_sb
    nisa.tensor_scalar(dst=r_sb, data=y_sb, op0=nl.add, operand0=1.0)
    nisa.reciprocal(dst=r_sb, data=r_sb)
    nisa.scalar_tensor_tensor(
        dst=s_sb, data=x_sb, op0=nl.greater_equal, operand0=0.0, op1=nl.maximum, operand1=y_sb
    )
    multiply_on_gpsimd(s_sb, s_sb, r_sb)
    scale_strengths(s_sb[:, 1], own)
    move(own["beta"], s_sb, slots * HV, HV, True, own)


def scale_strengths(view, own):
    """Multiplies by beta_max, where it is not 1."""
    if own["beta_max"] != 1.0:
        nisa.tensor_scalar(dst=view, data=view, op0=nl.multiply, operand0=own["beta_max"])


def compute_softplus(own):
    """Computes softplus(x)."""
    shape = (own["rows"], own["slots"], own["HV"])
    y, s_sb, square_sb, q_sb = own["y"][:, 0], sbuf(shape), sbuf(shape), sbuf(shape)
    nisa.tensor_scalar(dst=s_sb, data=y, op0=nl.multiply, operand0=0.5, op1=nl.add, operand1=1.0)
    nisa.reciprocal(dst=s_sb, data=s_sb)
    nisa.tensor_tensor(dst=s_sb, data1=s_sb, data2=y, op=nl.multiply)
    nisa.tensor_tensor(dst=square_sb, data1=s_sb, data2=s_sb, op=nl.multiply)
    nisa.tensor_scalar(dst=q_sb, data=square_sb, op0=nl.multiply, operand0=coefficient(TERMS))
    for i in range(1, TERMS):
        nisa.scalar_tensor_tensor(
            dst=q_sb, data=q_sb, op0=nl.add, operand0=coefficient(TERMS - i), op1=nl.multiply,
            operand1=square_sb,
        )  # fmt: skip
    nisa.scalar_tensor_tensor(dst=q_sb, data=q_sb, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=s_sb)
    nisa.scalar_tensor_tensor(
        dst=q_sb, data=own["x"][:, 0], op0=nl.maximum, operand0=0.0, op1=nl.add, operand1=q_sb
    )
    own["decay"] = q_sb


def coefficient(k):
    """Returns that of s^2k in q."""
    return 0.25**k / (2 * k + 1)


def compute_decays(own):
    """Computes g."""
    rows, slots, HV, g_sb = own["rows"], own["slots"], own["HV"], own["decay"]
    nisa.tensor_tensor(dst=g_sb, data1=g_sb, data2=repeat_row(own["rate"], rows, slots), op=nl.multiply)
    if not own["packed"]:
        nisa.tensor_scalar(dst=g_sb, data=g_sb, op0=nl.maximum, operand0=RESET)
        return
    begins_sb = own["begins"]
    nisa.tensor_scalar(
        dst=begins_sb, data=begins_sb, op0=nl.equal, operand0=0.0, op1=nl.multiply, operand1=RESET
    )
    nisa.scalar_tensor_tensor(
        dst=g_sb, data=g_sb, op0=nl.maximum, operand0=RESET, op1=nl.minimum,
        operand1=begins_sb.ap(pattern=[[slots, rows], [1, slots], [0, HV]], offset=0),
    )  # fmt: skip


def store_words(own):
    """Stores g in two words: the multiple of 2^-8 nearest to it, and the rest."""
    g_sb, HV = own["decay"], own["HV"]
    words_sb, scaled_sb = sbuf((own["rows"], own["slots"], HV, 2)), sbuf(g_sb.shape)
    near, rest = words_sb[:, :, :, 0], words_sb[:, :, :, 1]
    nisa.tensor_scalar(
        dst=scaled_sb, data=g_sb, op0=nl.multiply, operand0=256.0, op1=nl.add, operand1=TO_INTEGER
    )
    nisa.tensor_scalar(
        dst=near, data=scaled_sb, op0=nl.subtract, operand0=TO_INTEGER, op1=nl.multiply, operand1=1 / 256.0
    )
    nisa.tensor_tensor(dst=rest, data1=g_sb, data2=near, op=nl.subtract, engine=nisa.engine.gpsimd)
    move(own["g"], words_sb, 0, HV * 2, True, own)


def store_slopes(own):
    """Computes and stores slopes."""
    g_sb, HV, r = own["decay"], own["HV"], own["r"][:, 1]
    slopes_sb, varies_sb, product_sb = (
        sbuf((own["rows"], own["slots"], HV, 3)), sbuf(g_sb.shape), sbuf(g_sb.shape)
    )  # fmt: skip
    nisa.tensor_scalar(dst=varies_sb, data=g_sb, op0=nl.greater, operand0=RESET)
    multiply_on_gpsimd(product_sb, own["s"][:, 0], repeat_row(own["rate"], own["rows"], own["slots"]))
    multiply_on_gpsimd(slopes_sb[:, :, :, 0], product_sb, varies_sb)
    multiply_on_gpsimd(slopes_sb[:, :, :, 1], g_sb, varies_sb)
    multiply_on_gpsimd(product_sb, own["y"][:, 1], r)
    multiply_on_gpsimd(slopes_sb[:, :, :, 2], product_sb, r)
    scale_strengths(slopes_sb[:, :, :, 2], own)
    move(own["slopes"], slopes_sb, 0, HV * 3, True, own)


def store_strength_gradient(dst, dbeta_sb, slopes_sb, bundle, start, tokens):
    """Stores db of a chunk in HBM [N, T, HV]."""
    out_sb = sbuf(dbeta_sb.shape)
    multiply_on_gpsimd(out_sb, dbeta_sb, slopes_sb[:, :, 2])
    store_lanes(dst, out_sb, bundle, start, tokens)


def store_decay_gradients(dst, dg_sb, slopes_sb, bundle, start, tokens):
    """Stores da of a chunk, and what its tokens add to the gradient of A_log, in HBM [N, T, HV, 2]."""
    rows, lanes = dg_sb.shape
    out_sb = sbuf((rows, lanes, 2))
    twice = dg_sb.ap(pattern=[[lanes, rows], [1, lanes], [0, 2]], offset=0)
    multiply_on_gpsimd(out_sb, twice, slopes_sb[:, :, 0:2])
    store_lanes(dst, out_sb, bundle, start, tokens)
