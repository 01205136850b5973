"""The recurrence that FLA's tests compare with: our literal one, in float32."""

from torch import Tensor

from delta_trn import backends


def naive_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """FLA's order of arguments; differentiable. A state without its batch axis is one sequence's."""
    if initial_state is not None:
        initial_state = initial_state.float().reshape(-1, *initial_state.shape[-3:])
    o, state = backends.gated_delta_rule(
        q.float(),
        k.float(),
        v.float(),
        g.float(),
        beta.float(),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        backend="recurrent",
    )
    return o.to(v.dtype), state
