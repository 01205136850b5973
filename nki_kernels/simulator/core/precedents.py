"""Which forms of instructions public kernels have, so that a run can list those that it has alone.

A form is an instruction, or an instruction with one operator, engine or command: "tensor_copy engine=gpsimd".
AWS may document a form that no public kernel has: then nobody has shown that a compiler takes it.

Sources, whose calls were read: nki-library of SDK 2.28 and 2.29, trnfft, trntensor, trnblas 0.5.4, trnsparse
0.6.0, trnrand 0.5.0, zml's attention, nki-moe, and contributed models of NxD Inference.
"""

from collections.abc import Iterable

# an instruction: what its options are in public kernels; an option that is not named is in none
PUBLIC = {
    "activation": (
        "op=copy|exp|gelu_apprx_sigmoid|log|relu|rsqrt|sigmoid|silu|sin|square "
        "reduce_cmd=reset_reduce reduce_op=add"
    ),
    "activation_reduce": "op=exp|square reduce_op=add",
    "affine_select": "cmp_op=equal|greater_equal",
    "dma_compute": "reduce_op=add",
    "memset": "engine=gpsimd",
    "nc_transpose": "engine=vector",
    "range_select": "reduce_cmd=reset_reduce reduce_op=maximum",
    "scalar_tensor_tensor": "op0=add|multiply|subtract op1=add|maximum|multiply|subtract",
    "tensor_copy": "engine=scalar|vector",
    "tensor_partition_reduce": "op=add",
    "tensor_reduce": "op=add|maximum",
    "tensor_scalar": (
        "engine=gpsimd|scalar|vector "
        "op0=add|equal|greater|greater_equal|less|maximum|minimum|multiply|rsqrt|subtract "
        "op1=add|maximum|minimum|multiply"
    ),
    "tensor_scalar_reduce": "op0=abs|multiply reduce_op=maximum",
    "tensor_tensor": "op=add|equal|greater|logical_and|maximum|minimum|multiply|subtract",
    "tensor_tensor_scan": "op0=multiply op1=add",
}  # fmt: skip
# those that stand in public kernels without options
PLAIN = (
    "bn_aggr", "bn_stats", "core_barrier", "dma_copy", "dma_transpose", "iota", "local_gather", "max8",
    "nc_find_index8", "nc_match_replace8", "nc_matmul", "nc_matmul_mx", "nc_n_gather",
    "nc_stream_shuffle", "nonzero_with_count", "quantize_mx", "reciprocal", "register_alloc",
    "register_load", "sendrecv", "tensor_copy_predicated",
)  # fmt: skip
OPTIONS = ("op", "op0", "op1", "cmp_op", "reduce_op", "reduce_cmd", "engine")
_KNOWN = {
    (op, option, value)
    for op, text in PUBLIC.items()
    for option, _, values in (word.partition("=") for word in text.split())
    for value in values.split("|")
}


def without_precedent(forms: Iterable[tuple[str, str, str]]) -> list[str]:
    """Returns the forms (instruction, option, value) that no public kernel has; without an option "" and "".

    >>> without_precedent([("tensor_copy", "", ""), ("tensor_copy", "engine", "gpsimd"), ("topk", "", "")])
    ['tensor_copy engine=gpsimd', 'topk']
    """
    alone = {
        f"{op} {option}={value}" if option else op
        for op, option, value in forms
        if (op not in PUBLIC and op not in PLAIN) or (option and (op, option, value) not in _KNOWN)
    }
    return sorted(alone)
