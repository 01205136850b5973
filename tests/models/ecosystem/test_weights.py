"""Weights of other codes open here, and ours there, with the same logits; dead heads are found."""

import json
import os
import warnings
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from delta_trn import (
    DeltaConfig,
    DeltaForCausalLM,
    check_weights,
    load_model,
    patch_transformers,
    save_model,
)
from delta_trn.__main__ import main
from delta_trn.models.head_numbers import NUMBERS
from tests.support.families import make, tokens

# float64: weights are scaled by numbers that are no powers of 2, and summed in another order
ALLOWED = 2**-40
UNTIED = {"num_v_heads": 12, "allow_neg_eigval": True, "tie_word_embeddings": False}
BOUNDED = {"mixer": "kimi_delta_attention", "decay_bound": -7.0}


def ours(**settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "base_width": 32}
    model = DeltaForCausalLM(DeltaConfig(**sizes | settings)).eval()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model


def difference(a, b):
    ids = tokens(2, 70)
    with torch.no_grad():
        x, y = a(ids).logits, b(ids).logits
    return ((x - y).abs().max() / x.abs().max()).item()


class TestOursToOthersAndBack:
    @pytest.mark.parametrize("settings", [{}, UNTIED, BOUNDED], ids=str)
    def test_a_default_model_computes_the_same_after_its_way_there_and_back(
        self, settings, tmp_path
    ):
        model = ours(**settings).double()
        save_model(model, tmp_path, "fla", max_shard_size="50KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        again = load_model(tmp_path).eval()
        assert again.config.readout == "none" != model.config.readout
        assert difference(model, again) < ALLOWED
        again.config.rms_norm_eps = None
        for module in again.modules():
            if hasattr(module, "eps"):
                module.eps = model.config.rms_norm_eps
        assert difference(model, again) > 1000 * ALLOWED  # the epsilon had to be scaled, too

    def test_a_model_with_their_readout_comes_back_bit_for_bit(self, tmp_path):
        model = ours(readout="none", parametrization="sp")
        save_model(model, tmp_path, "fla")
        again = load_model(tmp_path)
        assert again.config.readout == model.config.readout == "none"
        assert all(
            torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters()
        )

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"residual": "ddl"}, "residual='ddl'"),
            ({"norm": "layer", "mlp": "gelu"}, "norm='layer', mlp='gelu'"),
            ({"attention_layers": (0,), "num_heads": 2}, r"attention_layers=\[0\]"),
        ],
    )
    def test_a_model_that_they_do_not_have_is_refused_by_name(self, settings, named, tmp_path):
        with pytest.raises(ValueError, match=named):
            save_model(ours(**settings), tmp_path / "new", "fla")
        assert not (tmp_path / "new").exists()


class TestConvertCommand:
    def test_it_writes_their_format_and_ours_with_the_tokenizer(self, tmp_path, capsys):
        save_model(ours().double(), tmp_path / "a")
        (tmp_path / "a" / "tokenizer.json").write_text("{}")
        assert main(["convert", f"{tmp_path}/a", "--to", f"{tmp_path}/b", "--format", "fla"]) == 0
        assert (
            json.loads((tmp_path / "b" / "config.json").read_text())["model_type"]
            == "gated_deltanet"
        )
        assert main(["convert", f"{tmp_path}/b", "--to", f"{tmp_path}/c"]) == 0
        assert (tmp_path / "c" / "tokenizer.json").is_file()
        assert "float64, format delta" in capsys.readouterr().out
        assert difference(load_model(tmp_path / "a"), load_model(tmp_path / "c")) < ALLOWED

    def test_what_cannot_be_is_one_line_and_nothing_is_written(self, tmp_path, capsys):
        save_model(ours(residual="ddl"), tmp_path / "a")
        make("qwen3_next").save_pretrained(tmp_path / "q")
        for name, complaint in (
            ("a", "residual='ddl'"),
            ("q", "is a Qwen3NextForCausalLM"),
            ("x", "no config"),
        ):
            assert (
                main(["convert", f"{tmp_path}/{name}", "--to", f"{tmp_path}/b", "--format", "fla"])
                == 2
            )
            assert complaint in capsys.readouterr().err
            assert not (tmp_path / "b").exists()
        assert main(["convert", f"{tmp_path}/a", "--to", f"{tmp_path}/q"]) == 2
        assert "not empty" in capsys.readouterr().err


class RunsCode:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("format", ["delta", "fla"])
def test_a_file_that_would_run_code_is_refused_in_our_words_and_runs_nothing(
    format, tmp_path, capsys
):
    save_model(ours(readout="none", parametrization="sp"), tmp_path / "a", format)
    for file in (tmp_path / "a").glob("*.safetensors"):
        file.unlink()
    torch.save({"x": RunsCode(tmp_path / "ran")}, tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"more than tensors in it \(posix.system\).*safetensors"):
        load_model(tmp_path / "a")
    assert main(["convert", f"{tmp_path}/a", "--to", f"{tmp_path}/b"]) == 2
    assert "weights_only" not in capsys.readouterr().err and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["no_such_family", "delta_trn"])
def test_code_beside_the_weights_is_never_run_nor_asked_about(kind, tmp_path, monkeypatch):
    """On a terminal transformers asks whether it may run the code."""
    save_model(ours(), tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config |= {
        "model_type": kind,
        "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    }
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    (tmp_path / "a" / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("it asks"))
    if kind == "delta_trn":
        assert type(load_model(tmp_path / "a")).__name__ == "DeltaForCausalLM"
    else:
        with pytest.raises(
            ValueError, match=r"a is a no_such_family, whose code .*: code.C, code.M;"
        ):
            load_model(tmp_path / "a")
    assert not (tmp_path / "ran").exists()


class TestFoldersThatDoNotFit:
    @pytest.fixture
    def folder(self, tmp_path):
        save_model(ours(), tmp_path, "fla", max_shard_size="50KB")
        return tmp_path

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"use_gate": False}, "use_gate=False"),
            ({"hidden_act": "powlu"}, "hidden_act='powlu'"),
            ({"attnres_block_size": 4}, "attnres_block_size=4"),
            ({"attn": {"layers": [1], "num_heads": 6}}, "attn={'layers'"),
            ({"head_dim": 12}, r"conv.weight: \(144, 4\), expected \(288, 4\)"),
            ({"num_hidden_layers": 1}, r"model.blocks.1.*expected none"),
        ],
    )
    def test_what_has_no_equivalent_is_refused_by_name(self, change, named, folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=named):
            load_model(folder)

    def test_a_missing_shard_or_config_is_named(self, folder):
        next(folder.glob("*00002-of*.safetensors")).unlink()
        with pytest.raises(
            ValueError, match=r"weights do not fit config.json.*: missing, expected"
        ):
            load_model(folder)
        with pytest.raises(ValueError, match=r"no config\.json"):
            load_model(folder / "nothing")

    def test_a_missing_tensor_of_theirs_is_refused_by_name(self, tmp_path):
        """transformers would fill it with random numbers, and warn."""
        make("qwen3_next").save_pretrained(tmp_path)
        (file,) = tmp_path.glob("*.safetensors")
        tensors = load_file(file)
        absent = sorted(name for name in tensors if name.endswith("linear_attn.out_proj.weight"))
        del tensors[absent[0]]
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"no weights for {absent[0]}; 1 are missing"):
            load_model(tmp_path)

    def test_what_is_no_causal_language_model_is_refused(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "vit"}')
        with pytest.raises(ValueError, match="holds a vit"):
            load_model(tmp_path)

    def test_a_tied_readout_of_its_own_is_refused(self, folder):
        shard = next(folder.glob("*00001-of*.safetensors"))
        state = load_file(shard)
        save_file(state | {"lm_head.weight": torch.ones(61, 48)}, shard)
        with pytest.raises(ValueError, match="lm_head and the embedding differ"):
            load_model(folder)


class TestHeadsStayFloat32:
    @pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "olmo_hybrid", "ours", "fla"])
    def test_numbers_of_a_head_are_float32_whatever_is_loaded(self, family, tmp_path):
        if family in ("ours", "fla"):
            save_model(ours(), tmp_path, "fla" if family == "fla" else "delta")
        else:
            make(family).save_pretrained(tmp_path)
        model, exact = load_model(tmp_path, torch.bfloat16), load_model(tmp_path)
        for name, parameter in model.named_parameters():
            number = name.endswith(("A_log", "dt_bias"))
            assert parameter.dtype == (torch.float32 if number else torch.bfloat16)
            assert not number or torch.equal(parameter, exact.get_parameter(name))

    @pytest.mark.parametrize(
        "cast", [torch.nn.Module.bfloat16, torch.nn.Module.half, lambda m: m.to(torch.half)]
    )
    def test_a_cast_leaves_numbers_and_gradients_of_our_heads_as_they_are(self, cast):
        model = ours()
        model(tokens(1, 5), labels=tokens(1, 5)).loss.backward()
        mixer = model.model.blocks[0].mixer
        before = [getattr(mixer, name).detach().clone() for name in NUMBERS]
        cast(model)
        for numbers, expected in zip((mixer.A_log, mixer.dt_bias), before, strict=True):
            assert numbers.dtype == numbers.grad.dtype == torch.float32 and torch.equal(
                numbers, expected
            )
        assert model.lm_head.weight.dtype == mixer.a_proj.weight.dtype != torch.float32
        model.double()
        assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float64

    def test_patching_a_model_in_bfloat16_widens_its_numbers_and_says_so(self, capsys):
        model = make("qwen3_next").bfloat16()
        layer = model.model.layers[0].linear_attn
        layer.A_log.data[1] = -torch.inf
        before = layer.A_log.detach().clone()
        patch_transformers(model)
        assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
        assert torch.equal(layer.A_log.bfloat16(), before)
        printed = capsys.readouterr().out
        assert (
            "A_log is float32 now, it was bfloat16" in printed
            and "A_log[1] = -inf: decay 1" in printed
        )

    def test_patching_all_models_keeps_float32_in_what_is_loaded_afterwards(self, tmp_path):
        model = make("qwen3_5")
        model.save_pretrained(tmp_path)
        load = partial(type(model).from_pretrained, tmp_path, dtype=torch.bfloat16)
        with patch_transformers():
            assert load().model.layers[0].linear_attn.A_log.dtype == torch.float32
        assert load().model.layers[0].linear_attn.A_log.dtype == torch.bfloat16


class TestDeadHeads:
    def test_a_dead_head_is_named_with_layer_head_and_meaning(self):
        model = ours()
        assert check_weights(model)
        numbers = model.model.blocks[1].mixer
        with torch.no_grad():
            numbers.A_log[2], numbers.A_log[3] = -torch.inf, 100.0
            numbers.dt_bias[0], numbers.dt_bias[5] = torch.nan, -torch.inf
        report = check_weights(model)
        assert not report
        found = {(row.name, row.head): row.effect.split(":")[0] for row in report.dead}
        assert found == {
            ("model.blocks.1.mixer.A_log", 2): "decay 1",
            ("model.blocks.1.mixer.A_log", 3): "decay 0",
            ("model.blocks.1.mixer.dt_bias", 0): "the head computes NaN",
            ("model.blocks.1.mixer.dt_bias", 5): "decay 1",
        }
        assert "model.blocks.1.mixer.A_log[2] = -inf" in str(report) and "anew, as by" in str(
            report
        )

    @pytest.mark.parametrize("family", ["qwen3_next", "ours"])
    def test_loading_warns_of_dead_heads(self, family, tmp_path):
        model = ours() if family == "ours" else make(family)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.save_pretrained(tmp_path)
            load_model(tmp_path)
        dead = next(p for name, p in model.named_parameters() if name.endswith("A_log"))
        dead.data[1] = -torch.inf
        model.save_pretrained(tmp_path)
        with pytest.warns(UserWarning, match=r"A_log\[1\] = -inf: decay 1"):
            load_model(tmp_path)

    def test_a_model_without_such_heads_has_nothing_to_check(self):
        with pytest.raises(ValueError, match="nothing to check"):
            check_weights(torch.nn.Linear(2, 2))
