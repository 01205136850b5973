"""Deep Delta Learning over widths: tags compared with shapes, writes with their derivation."""

import pytest
import torch

from delta_trn.models import DeltaForCausalLM
from delta_trn.models.mup import TABLES
from delta_trn.models.parameters import tagged_parameters
from delta_trn.models.residual import Value
from tests.models.test_ddl import VARIANTS
from tests.support.tiny_models import config


def built(width: int, *, meta: bool = True, **changes) -> DeltaForCausalLM:
    sizes = {"hidden_size": width, "base_width": 64, "initializer_range": 0.02, **changes}
    with torch.device("meta" if meta else "cpu"):
        return DeltaForCausalLM(config(**sizes))


@pytest.mark.parametrize("scale_by", ["head_dim", "heads"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_declared_roles_of_deep_delta_are_those_that_shapes_imply(variant, scale_by):
    def at(width: int) -> DeltaForCausalLM:
        heads = {} if scale_by == "head_dim" else {"num_heads": width // 16, "head_dim_k": 12}
        return built(width, scale_by=scale_by, **{**VARIANTS[variant], **heads})

    narrow, wide = at(64), at(128)
    pairs = zip(tagged_parameters(narrow), tagged_parameters(wide), strict=True)
    for (name, p, tag), (_, q, _) in pairs:
        grew = sum(a != b for a, b in zip(p.shape, q.shape, strict=True))
        assert tag.role.growing == grew, f"{name}: declared {tag.role.name}, {grew} dimensions grew"


def change_of_the_stream(width: int, parametrization: str) -> float:
    """Returns the rms of what the blocks change in the stream, for embeddings of rms one."""
    torch.manual_seed(0)
    m = built(
        width, meta=False, residual="ddl", parametrization=parametrization, attention_layers=[0, 1, 2],
        num_hidden_layers=3,
    )  # fmt: skip
    with torch.no_grad():
        m.model.embed.weight.normal_(0, 1)
        states = m(torch.randint(0, 61, (4, 16)), output_hidden_states=True).hidden_states
    return float((states[-1] - states[0]).square().mean().sqrt())


def test_writes_move_the_stream_as_much_at_every_width():
    """v grows like sqrt(m) under muP; without it, as under SP, 8 times the width moves the stream less."""
    mup = [change_of_the_stream(width, "mup") for width in (64, 512)]
    sp = [change_of_the_stream(width, "sp") for width in (64, 512)]
    assert mup[0] == sp[0], "at the base width they are one model"
    assert 0.8 < mup[1] / mup[0] < 1.25
    assert sp[1] / sp[0] < 0.6


def test_value_multiplier_is_that_of_the_table():
    assert [TABLES[name].value for name in ("sp", "mup_original", "mup")] == [0.0, 0.5, 0.5]
    m = built(256, parametrization="mup", residual="ddl")
    values = [x for x in m.modules() if isinstance(x, Value)]
    assert len(values) == 6 and all(x.multiplier == 2.0 for x in values)
