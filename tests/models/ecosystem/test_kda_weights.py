"""The bound of gates in files of flash-linear-attention's KDAForCausalLM;
numbers: `test_weight_goldens`.
"""

import json

import pytest

from delta_trn import load_model, save_model
from tests.models.ecosystem.test_weights import ours


@pytest.mark.parametrize(("bound", "safe"), [(None, False), (-7.0, False), (-5.0, True)])
def test_safe_gate_is_written_only_with_a_bound_that_it_is_taken_with(bound, safe, tmp_path):
    save_model(ours(mixer="kimi_delta_attention", decay_bound=bound), tmp_path, "fla")
    written = json.loads((tmp_path / "config.json").read_text())
    assert [written[name] for name in ("model_type", "lower_bound", "safe_gate")] == [
        "kda",
        bound,
        safe,
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"safe_gate": True}, "safe_gate=True without a lower_bound"),
        ({"lower_bound": 1.0}, "^lower_bound=1.0: "),
    ],
)
def test_a_bound_that_is_missing_or_positive_is_refused_by_their_name(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kda", **change}))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)
