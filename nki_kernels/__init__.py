"""NKI kernels for Trainium: tensors in, tensors out. A leaf package, which imports only NKI and
NumPy.

    module                   computes
    gated_delta_rule_fwd     the gated delta rule over a sequence, forward (arXiv:2412.06464)
    gated_delta_rule_bwd     its gradients
    gated_delta_rule_step    one token of it, for decoding
    kimi_delta_attention     the rule with a decay per channel, forward and gradients
                             (arXiv:2510.26692)
    delta_residual           Deep Delta Learning's rank-1 residual update, forward and backward
    short_convolution        causal, depthwise, over time, then SiLU; forward and backward
    gated_rms_norm           RMS norm of rows, times a gain and SiLU of a gate; forward and backward
    cross_entropy            the loss of a linear readout and its gradients; the logits stay on chip
    chunk, chunk_gradients   one chunk of the gated delta rule, forward and backward: equations and
                             letters
    triangular               the inverse of a chunk's triangular matrix
    tiles                    pieces of kernels: loads, constants, products, transpositions, cells,
                             examples
    plan                     how work is cut into calls, waves, bundles and lanes, and every bound
    language                 the one import of NKI, from Neuron's package or from nki-simulator

In kernels a name that ends in `_sb` is a tile in SBUF, and one that ends in `_ps` a tile in PSUM;
`_t` says that a matrix is transposed. Arguments of kernels lie in HBM and have no suffix. Nor have
lists, dicts and views of tiles: theirs lie in SBUF unless a docstring says otherwise. Shapes name
the partition axis first.

Importing this package imports nothing else.
"""
