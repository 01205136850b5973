"""Initial values have their laws whoever draws them: all at once, or module by module."""

from typing import Any

import pytest
import torch
from torch import nn

from delta_trn.models import DeltaForCausalLM, DeltaForSequenceClassification, DeltaModel
from delta_trn.models.parameters import initial_std, tagged_parameters
from tests.models.test_documents import MODELS
from tests.support.tiny_models import config, tokens

NOTHING = 7.0


def empty(kind: Any, **changes: Any) -> Any:
    """Returns a model whose parameters hold what no law of ours draws."""
    torch.manual_seed(0)
    model = kind(config(num_labels=3, **changes))
    for parameter in model.parameters():
        parameter.data.fill_(NOTHING)
    return model


def assert_drawn(model: Any) -> None:
    """Asserts that every parameter has values that its law draws, within their spread."""
    generator = torch.Generator().manual_seed(5)
    for name, found, tag in tagged_parameters(model):
        std = initial_std(tag, model.config)
        if std is None:
            assert tag.law is not None
            drawn = torch.stack([tag.law(torch.empty(found.shape), generator) for _ in range(200)])
            low, high = drawn.amin(0), drawn.amax(0)
            slack = 0.5 * (high - low)
            assert ((low - slack <= found) & (found <= high + slack)).all(), name
        elif std == 0:
            assert not found.any(), name
        else:
            spread = (2 * found.numel()) ** -0.5
            assert abs(found.std().item() / std - 1) < 6 * spread, name


def by_transformers(model: Any) -> None:
    """Goes from module to module as transformers does for DeepSpeed's ZeRO-3."""

    def go(module: nn.Module, draw: Any) -> None:
        for child in module.children():
            go(child, child._initialize_weights if isinstance(child, type(model.model)) else draw)
        draw(module, False)

    go(model, model._initialize_weights)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_drawn_module_by_module_follows_its_laws(name):
    for draw in (lambda m: m.apply(m._init_weights), by_transformers):
        model = empty(DeltaForCausalLM, **MODELS[name])
        draw(model)
        assert_drawn(model)
        ids = tokens(1, 20)
        assert model(ids, labels=ids).loss.isfinite()


@pytest.mark.parametrize("kind", [DeltaModel, DeltaForSequenceClassification])
def test_so_does_a_backbone_and_a_classifier(kind):
    model = empty(kind)
    model.apply(model._init_weights)
    assert_drawn(model)


def test_muP_decides_the_sizes_and_a_seed_the_values():
    wide, values = [], []
    for seed in (0, 0, 1):
        model = empty(DeltaForCausalLM, hidden_size=128)
        torch.manual_seed(seed)
        model.apply(model._init_weights)
        wide.append(model.model.blocks[0].mlp.gate_proj.weight.std().item())
        values.append(model.model.blocks[0].mixer.A_log.clone())
    expected = model.config.initializer_range * (128 / 16) ** -0.5
    assert wide[0] == pytest.approx(expected, rel=0.05)
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


def test_a_tied_readout_is_the_embedding_and_one_of_its_own_is_drawn():
    for tied in (True, False):
        model = empty(DeltaForCausalLM, tie_word_embeddings=tied, embedding_init=4.0)
        model.apply(model._init_weights)
        head = model.lm_head.weight
        tag = next(tag for _, found, tag in tagged_parameters(model) if found is head)
        assert head.std().item() == pytest.approx(initial_std(tag, model.config), rel=0.1)


def test_loaded_parameters_stay(tmp_path):
    DeltaForCausalLM(config()).save_pretrained(tmp_path)
    model = DeltaForCausalLM.from_pretrained(tmp_path)
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.apply(model._init_weights)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_drawn_as_the_old_ones(tied):
    model = DeltaForCausalLM(config(tie_word_embeddings=tied, vocab_size=400))
    model.resize_token_embeddings(900, mean_resizing=False)
    weights = (model.model.embed.weight, model.lm_head.weight)
    tags = [tag for _, x, tag in tagged_parameters(model) if any(x is W for W in weights)]
    assert len(tags) == 2 - tied
    for W, tag in zip(weights, tags * (1 + tied), strict=True):
        new = W[400:]
        assert new.std().item() == pytest.approx(initial_std(tag, model.config), rel=0.1)


def test_what_cannot_be_drawn_is_named():
    model = DeltaForCausalLM(config())
    model.model.blocks[0].mixer.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"mixer.extra.weight .* has no muP role"):
        model._init_weights(model.model.blocks[0].mixer.extra)
    with pytest.raises(ValueError, match=r"embed.gain .* has no muP role"):
        foreign = nn.Module()
        foreign.gain = nn.Parameter(torch.ones(2))
        model._init_weights(foreign)
    model._init_weights(nn.ReLU())


def test_parameters_of_no_elements_are_named_with_what_to_do():
    """deepspeed.zero.Init leaves such, in models that are made by hand."""
    for name in ("mlp.up_proj", "mixer.conv"):
        model = DeltaForCausalLM(config())
        model.model.blocks[0].get_submodule(name).weight.data = torch.empty(0)
        for draw in (model.initialize_weights, lambda m=model: m.apply(m._init_weights)):
            with pytest.raises(ValueError, match=rf"{name}.weight has no elements.*HfDeepSpeed"):
                draw()


def readable(model: Any) -> Any:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_maps_are_pytorch_s_own_and_draw_nothing(name):
    """Quantizers and adapters ask for that very class."""
    torch.manual_seed(3)
    maps = [m for m in DeltaForCausalLM(config(**MODELS[name])).modules() if type(m) is nn.Linear]
    after = torch.rand(())
    assert len(maps) > 7
    torch.manual_seed(3)
    torch.randint(2**62, ())  # the seed of all initial values
    assert torch.equal(torch.rand(()), after)


class Swapped(nn.Linear):
    pass


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_that_is_put_in_a_maps_place_before_is_drawn_as_the_map(name):
    """transformers swaps layers for a quantizer's on the meta device, and draws what is missing."""
    torch.manual_seed(3)
    expected = readable(DeltaForCausalLM(config(**MODELS[name])))
    with torch.device("meta"):
        model = DeltaForCausalLM(config(**MODELS[name]))
        for path, m in [*model.named_modules()]:
            if type(m) is nn.Linear:
                swapped = Swapped(m.in_features, m.out_features, m.bias is not None)
                model.set_submodule(path, swapped)
    model.to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(3)
    model.initialize_weights()
    found = readable(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_tag_is_found_behind_what_others_put_around_a_map():
    model = DeltaForCausalLM(config())
    block, tags = model.model.blocks[0], {name: tag for name, _, tag in tagged_parameters(model)}
    wrapped = nn.Module()
    wrapped.base_layer, block.mixer.q_proj = block.mixer.q_proj, wrapped
    found = {name: tag for name, _, tag in tagged_parameters(model)}
    name = "model.blocks.0.mixer.q_proj{}.weight"
    assert found[name.format(".base_layer")] is tags[name.format("")]
