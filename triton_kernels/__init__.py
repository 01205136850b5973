"""Triton kernels for Hopper. They fill tensors that the caller allocates; the package imports only
triton.

    module                   computes
    gated_delta_rule_fwd     the gated delta rule over a sequence, forward (arXiv:2412.06464)
    gated_delta_rule_reverse its gradients: the reverse scan over the chunks
    gated_delta_rule_bwd     its gradients: every chunk in parallel
    gated_delta_rule_refine  their accuracy in bfloat16 where keys are alike
    gated_delta_rule_step    one token of it, for decoding
    kimi_delta_attention     chunks with a decay for each channel of a key (arXiv:2510.26692), and
                             gradients
    delta_residual           Deep Delta Learning's rank-1 residual update, forward and backward
    short_convolution        a causal depthwise convolution over time, then SiLU; forward and
                             backward
    rms_norm                 the norm of rows, plain, gated or of a residual sum; forward and
                             backward
    cross_entropy            the loss of rows of logits, and its gradient in their place
    hopper                   for compute capability 9, in Gluon: the first of these, and gradients
                             at 128:128
    segments                 long sequences with few heads: states at segment starts
    tiles                    pieces of kernels: products, a chunk's place, the triangular inverse
    launch                   the launch table: tile extents, warps and stages of every kernel
    chunks                   how the time axis is cut
    variants                 what every module declares for compile_only
    compile_only             compiles every kernel in every configuration for sm_90, which needs no
                             GPU
    sass                     reads machine code, for compile_only's bounds and for `tools.estimate`

Importing this package imports nothing else.
"""
