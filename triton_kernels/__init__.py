"""Triton kernels for Hopper: tensors in, tensors filled. A leaf package, which imports only triton.

    module                   computes
    gated_delta_rule_fwd     the gated delta rule over a sequence, forward (arXiv:2412.06464)
    gated_delta_rule_bwd     its gradients
    gated_delta_rule_step    one token of it, for decoding
    delta_residual           Deep Delta Learning's rank-1 residual update, forward and backward
    short_convolution        causal, depthwise, over time, then SiLU; forward and backward
    rms_norm                 of rows: plain, gated, or of a residual sum; forward and backward
    cross_entropy            of rows of logits, and its gradient in their place
    tiles                    pieces of kernels: products, a chunk's place, the triangular inverse
    launch                   chunk size, tile widths, warps and stages of every launch
    compile_only             compiles every kernel and configuration for sm_90, which needs no GPU

Importing this package imports nothing else.
"""
