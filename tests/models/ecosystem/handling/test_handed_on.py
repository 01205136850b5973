"""A patched model stays patched, or says that it is not, wherever others take it: pickled, spawned,
copied, replicated, sharded, offloaded, cast.
"""

import copy
import pickle
import sys
from functools import partial

import accelerate
import pytest
import torch
from torch import nn

from delta_trn import check_packing, check_weights, patch_transformers
from delta_trn.models import DeltaForCausalLM
from delta_trn.models.ecosystem import patching
from delta_trn.models.ecosystem.patching import Patch
from tests.models.test_documents import MODELS
from tests.support.families import make, tokens
from tests.support.tiny_models import model as tiny
from tests.support.warm import run_python

FAMILIES = ["qwen3_next", "kimi_linear"]
LENGTHS = (5, 64, 1, 20)
PLACES = torch.tensor([[*range(7), *range(13)]])
NUMBERS = ("A_log", "dt_bias")
apart = partial(check_packing, lengths=LENGTHS, by="position_ids")


def layer_of(model):
    return next(m for m in model.modules() if hasattr(m, "A_log"))


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_file(model, folder):
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


@torch.no_grad()
def packed_logits(model):
    return model(tokens(1, 20), position_ids=PLACES, use_cache=False).logits


class TestPickle:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("way", ["pickle", "file", "copy"])
    def test_what_was_pickled_or_copied_is_patched(self, family, way, tmp_path):
        model = make(family)
        with patch_transformers(model, backend="chunked") as patch:
            ways = {"pickle": by_pickle, "file": partial(by_file, folder=tmp_path)}
            other = ways.get(way, copy.deepcopy)(model)
            assert apart(other) and torch.equal(packed_logits(other), packed_logits(model))
            assert (Patch.of(other) is patch) == (way == "copy")
            assert Patch.of(other).rows == patch.rows
            layer_of(other).A_log.data += 1
            assert not torch.equal(packed_logits(other), packed_logits(model))
        assert not apart(model)
        assert bool(apart(other)) == (way != "copy")
        if way != "copy":
            with pytest.raises(ValueError, match=r"patched already; call undo\(\).*Patch.of"):
                patch_transformers(other)
            Patch.of(other).undo()
            assert not apart(other)
        for unpatched in (model, other, by_pickle(other), copy.deepcopy(other)):
            assert not apart(unpatched)
            with pytest.raises(ValueError, match="is not patched"):
                Patch.of(unpatched)
            with patch_transformers(unpatched, backend="chunked"):
                assert apart(unpatched)

    def test_so_is_a_model_of_a_process_that_is_patched(self):
        model = make("qwen3_next")
        with patch_transformers(backend="chunked"):
            pickled, copied = pickle.dumps(model), copy.deepcopy(model)
            assert apart(copied) and apart(pickle.loads(pickled))
        assert not apart(model) and not apart(copied)
        other = pickle.loads(pickled)
        assert apart(other)
        Patch.of(other).undo()
        assert not apart(other)

    @pytest.mark.parametrize("whole", [False, True], ids=["a model", "the process"])
    def test_another_process_computes_the_same(self, whole, tmp_path):
        model = make("qwen3_next")
        with patch_transformers(None if whole else model, backend="chunked"):
            torch.save((model, packed_logits(model)), tmp_path / "model.pt")
        program = (
            "import torch\n"
            f"model, expected = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
            "from tests.models.ecosystem.handling.test_handed_on import packed_logits\n"
            "assert torch.equal(packed_logits(model), expected)\n"
            "print('the same')"
        )
        done = run_python(["-c", program])
        assert done.stdout.strip().endswith("the same"), done.stderr

    def test_without_this_package_it_is_not_loaded(self, monkeypatch):
        model = make("qwen3_next")
        with patch_transformers(model, backend="chunked"):
            pickled = pickle.dumps(model)
        monkeypatch.setitem(sys.modules, patching.__name__, None)
        with pytest.raises(ModuleNotFoundError, match="delta_trn"):
            pickle.loads(pickled)

    def test_a_class_of_somebody_else_is_patched_there_or_named(self):
        kind = type(layer_of(make("qwen3_next")))

        class Heir(kind):
            pass

        class Other(kind):
            def forward(self, *args, **kwargs):
                return super().forward(*args, **kwargs)

        patch = Patch()
        patched = type(patching._revive(Heir, patch))
        assert patched is not Heir and issubclass(patched, Heir) and patched.__name__ == "Heir"
        with pytest.raises(ValueError, match=r"Other was patched .* a forward of its own"):
            patching._revive(Other, patch)
        with patch_transformers(backend="chunked"):
            assert type(patching._revive(Other, patch)) is Other


class TestClass:
    def test_a_patched_layer_keeps_name_and_module_and_makes_unpatched_ones(self, qwen):
        for module in (layer_of(qwen), qwen.model):
            kind = type(module)
            with patch_transformers(qwen, backend="chunked"):
                patched = type(module)
                assert patched is not kind and isinstance(module, kind)
                for name in ("__name__", "__module__", "__qualname__", "__doc__"):
                    assert getattr(patched, name) == getattr(kind, name)
            assert type(module) is kind
        with patch_transformers(qwen, backend="chunked"):
            made = type(qwen.model)(qwen.config)
            assert type(made) is type(make("qwen3_next").model) and type(made) is not type(
                qwen.model
            )
            assert qwen.model.config_class is type(made).config_class

    def test_a_replica_of_data_parallel_computes_with_its_own_weights(self, qwen):
        """torch.nn.parallel.replicate makes replicas so, and gives them weights of their own."""
        layer, x = layer_of(qwen), torch.randn(1, 5, 32)
        with patch_transformers(qwen, backend="chunked"), torch.no_grad():
            replica = layer._replicate_for_data_parallel()
            replica._modules = copy.deepcopy(dict(layer._modules))
            for name, parameter in layer._parameters.items():
                setattr(replica, name, parameter)
            replica.out_proj.weight.zero_()
            assert layer(x).norm() > 0 == replica(x).norm()

    def test_what_fsdp_makes_of_it_is_undone_and_not_pickled(self, qwen):
        """fully_shard gives a module a class of its own, too."""
        model = copy.deepcopy(qwen)
        patch = patch_transformers(model, backend="chunked")
        for module in (layer_of(model), model.model):
            module.__class__ = type(f"FSDP{type(module).__name__}", (Sharded, type(module)), {})
        assert apart(model)
        with pytest.raises(pickle.PicklingError, match="FSDPQwen3Next"):
            pickle.dumps(model)
        patch.undo()
        assert not apart(model) and type(layer_of(model)).__name__.startswith("FSDP")

    def test_a_forward_that_others_put_into_a_module_is_not_passed_by(self):
        model = make("qwen3_next")
        for module in (layer_of(model), model.model):
            plain = module.forward
            module.forward = lambda *args, _plain=plain, **kwargs: _plain(*args, **kwargs)
            with pytest.raises(ValueError, match="forward that something else put into the module"):
                patch_transformers(model, backend="chunked")
            module.forward = plain  # as accelerate leaves it
            with patch_transformers(model, backend="chunked"):
                assert apart(model)
            assert not apart(model)
            del module.forward


class Sharded:
    """Stands in for torch's FSDPModule."""


def offloaded(model, how, folder):
    """Returns the model with its weights elsewhere: in memory, or on disk."""
    if how == "disk":
        return accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


class TestOffload:
    @pytest.mark.parametrize("how", ["cpu", "disk"])
    @pytest.mark.parametrize("first", ["patch", "offload"])
    @pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "kimi_linear"])
    def test_a_patched_model_runs_whichever_came_first(self, family, first, how, tmp_path):
        model, ids = make(family), tokens(1, 9)
        plain = model(ids).logits.detach()
        with patch_transformers(model, backend="chunked"):
            expected = packed_logits(model)
        if first == "offload":
            offloaded(model, how, tmp_path)
        patch = patch_transformers(model, backend="chunked")
        assert ("not in memory" in str(patch)) == (first == "offload")
        if first == "patch":
            offloaded(model, how, tmp_path)
        assert layer_of(model).A_log.is_meta
        assert torch.equal(packed_logits(model), expected)
        patch.undo()
        with torch.no_grad():
            assert torch.equal(model(ids).logits, plain)
        assert not torch.allclose(packed_logits(model), expected)
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        assert not apart(model)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_process_that_is_patched_reaches_models_that_were_offloaded_before(self, family):
        model = make(family)
        leaking = packed_logits(model)
        with patch_transformers(model, backend="chunked"):
            expected = packed_logits(model)
        offloaded(model, "cpu", None)
        others = [make(family) for _ in range(2)]  # made before, and wrapped by something else
        for other in others:
            layer = next(m for m in other.modules() if hasattr(m, "conv1d"))
            layer.forward = partial(type(layer).forward, layer)
        with patch_transformers(backend="chunked") as patch:
            later = offloaded(make(family), "cpu", None)
            assert all(torch.equal(packed_logits(x), expected) for x in (model, later))
            rows = {row.name: row.reason for row in patch.rows}
            assert "2 of this class were made before" in rows[type(layer).__name__]
        assert all(torch.equal(packed_logits(x), leaking) for x in (model, later))

    @pytest.mark.parametrize("first", ["patch", "offload"])
    def test_hooks_that_are_removed_leave_the_patch(self, first):
        model = make("qwen3_next")
        patch = patch_transformers(model, backend="chunked") if first == "patch" else None
        offloaded(model, "cpu", None)
        patch = patch or patch_transformers(model, backend="chunked")
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        assert apart(model) and apart(by_pickle(model))
        patch.undo()
        assert not apart(model)

    @pytest.mark.parametrize("how", ["cpu", "disk"])
    @pytest.mark.parametrize("T", [5, 100])
    @pytest.mark.parametrize("name", ["hybrid", "kimi", "deep-delta"])
    def test_our_models_run(self, name, T, how, tmp_path):
        model, ids = tiny(dtype=torch.float32, **MODELS[name]), tokens(2, T)

        def results():
            with torch.no_grad():
                loss = model(ids, labels=ids).loss
                return model(ids).logits, loss, model.generate(ids, max_new_tokens=3)

        expected = results()
        offloaded(model, how, tmp_path)
        model.hf_device_map = {}
        assert all(p.is_meta for p in model.parameters())
        for x, y in zip(results(), expected, strict=True):
            torch.testing.assert_close(x, y)

    def test_our_models_are_loaded_onto_a_disk(self, tmp_path):
        model, ids = tiny(dtype=torch.float32), tokens(1, 70)
        model.save_pretrained(tmp_path / "model")
        other = DeltaForCausalLM.from_pretrained(
            tmp_path / "model", device_map={"": "disk"}, offload_folder=str(tmp_path / "weights")
        )
        assert other.model.blocks[0].mixer.v_proj.weight.is_meta
        with torch.no_grad():
            torch.testing.assert_close(other(ids).logits, model(ids).logits)


class TestCasts:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize(
        "cast", [nn.Module.bfloat16, nn.Module.half, lambda m: m.to(torch.half)]
    )
    def test_a_cast_after_the_patch_leaves_the_numbers_of_heads(self, family, cast):
        model = make(family)
        expected = {name: getattr(layer_of(model), name).clone() for name in NUMBERS}
        with patch_transformers(model, backend="chunked"):
            for other in (model, copy.deepcopy(model), by_pickle(model)):
                cast(other)
                for name, x in expected.items():
                    assert torch.equal(getattr(layer_of(other), name), x)
                assert other.lm_head.weight.dtype != torch.float32

    def test_models_that_are_made_or_cast_in_a_patched_process_keep_them(self, tmp_path):
        model = make("qwen3_next")
        model.save_pretrained(tmp_path)
        kind, config, half = type(model), model.config, torch.bfloat16
        with patch_transformers(backend="chunked"):
            for made in (
                kind._from_config(config, dtype=half),
                kind(config).bfloat16(),
                kind(config).to(half),
                kind.from_pretrained(tmp_path).half(),
            ):
                layer = layer_of(made)
                assert layer.out_proj.weight.dtype != torch.float32
                assert {getattr(layer, name).dtype for name in NUMBERS} == {torch.float32}
                assert check_weights(made)
        assert layer_of(kind(config).bfloat16()).A_log.dtype == half

    def test_weights_of_no_elements_are_not_in_memory(self):
        """DeepSpeed leaves such, whose parts other processes have."""
        model, shapes = make("qwen3_next"), {}
        for parameter in model.parameters():
            shapes[parameter], parameter.data = parameter.data, torch.empty(0)
        with pytest.raises(
            ValueError, match=r"A_log is not in memory.*before such a model is loaded"
        ):
            check_weights(model)
        with patch_transformers(model) as patch:
            assert "its weights are not in memory" in str(patch) and "before" in str(patch)
            for parameter, data in shapes.items():
                parameter.data = data
            assert apart(model)
