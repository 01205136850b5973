"""Internals of FLA's kernels that one of its tests imports; there is nothing of ours to put there."""


def prepare_wy_repr_bwd(*_: object) -> None:
    raise NotImplementedError("FLA's WY representation has no counterpart here; deselect its test")


recompute_w_u_fwd = prepare_wy_repr_bwd
