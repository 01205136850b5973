"""Two options against tokens whose gradient RMSNorm(o) makes large: a skip D v, and a bound."""

import pytest
import torch
from torch import Tensor

from delta_trn.models.gated_deltanet import BoundedGradient
from tests.support.tiny_models import model, rows, tokens


def test_without_a_skip_there_is_no_parameter_and_with_d_0_the_model_is_the_same():
    plain, skipping = model(), model(value_skip=0.5)
    names = {name.rsplit(".", 1)[-1] for name, _ in plain.named_parameters()}
    assert "D" not in names and torch.equal(skipping.model.blocks[0].mixer.D, torch.full((4,), 0.5).double())
    ids = tokens(2, 9)
    assert not torch.allclose(plain(ids).logits, skipping(ids).logits)
    for block in skipping.model.blocks:
        torch.nn.init.zeros_(block.mixer.D)
    assert torch.equal(plain(ids).logits, skipping(ids).logits)


def test_a_skip_adds_d_times_v_to_what_the_norm_reads():
    layer, seen = model(value_skip=0.5, num_v_heads=8).model.blocks[0].mixer, []
    layer.o_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = torch.randn(2, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.D.copy_(torch.linspace(-1, 1, 8))
        layer(x, rows(7))
        with_skip = seen.pop()
        skip, layer.D = layer.D, None
        layer(x, rows(7))
        qkv = layer.conv(torch.cat([p(x) for p in (layer.q_proj, layer.k_proj, layer.v_proj)], -1), rows(7))
    v = qkv.split(layer.sizes, -1)[2].unflatten(-1, (8, -1))
    assert torch.allclose(with_skip, seen[0] + skip[:, None] * v, rtol=1e-12, atol=1e-12)


def test_generation_with_a_cache_has_the_skip_too():
    m, ids = model(value_skip=0.5), tokens(2, 6)
    with torch.no_grad():
        whole, cache, parts = m(ids, use_cache=False).logits, None, []
        for t in range(6):
            out = m(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache, parts = out.past_key_values, [*parts, out.logits]
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


def bounded(do: Tensor, bound: float) -> Tensor:
    o = torch.zeros_like(do, requires_grad=True)
    out = BoundedGradient.apply(o, bound)
    assert torch.equal(out, o)
    out.backward(do)
    assert o.grad is not None
    return o.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_only_gradients_beyond_the_bound_are_shortened_and_keep_their_direction(dtype: torch.dtype):
    do = torch.randn(2, 50, 3, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))
    do[0, 1, 2] *= 1000
    new, norms = bounded(do, 2.0), do.double().norm(dim=-1)
    limit = 2 * norms.flatten(0, 1).median(0).values
    long = norms > limit
    assert long[0, 1, 2] and long.sum() < 15
    assert torch.equal(new[~long], do[~long])
    tolerance = 4 * torch.finfo(dtype).eps
    assert torch.allclose(new.double().norm(dim=-1)[long], limit.expand_as(long)[long], rtol=tolerance)
    direction = torch.nn.functional.cosine_similarity(new.double(), do.double(), dim=-1)
    assert (direction - 1).abs().max() < tolerance
    assert torch.equal(bounded(do, 1e9), do), "a bound that nothing reaches changes no bit"


def test_tokens_without_a_gradient_do_not_lower_the_bound_of_others():
    """With most targets ignored the median of all would be 0, and every gradient would be lost."""
    do = torch.zeros(1, 9, 1, 4)
    do[0, 3:5] = 1.0
    assert torch.equal(bounded(do, 1.0), do)
    assert torch.equal(bounded(torch.zeros(1, 1, 1, 4), 1.0), torch.zeros(1, 1, 1, 4))


def test_a_bound_changes_gradients_and_not_the_loss():
    ids, gradients, losses = tokens(2, 33), [], []
    for bound in (0.0, 1.0):
        m = model(o_gradient_bound=bound).train()
        loss = m.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        losses.append(loss.item())
        gradients.append(m.model.blocks[0].mixer.v_proj.weight.grad)
    assert losses[0] == losses[1]
    assert gradients[1].norm() < 0.99 * gradients[0].norm()
