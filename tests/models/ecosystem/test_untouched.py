"""A vision tower and MTP layers, which a language model does not load,
come through training as they were.
"""

import json

import pytest
import torch
import transformers
from huggingface_hub import metadata_load
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from delta_trn import DeltaConfig, DeltaForCausalLM, complete_weights, load_model, save_model
from delta_trn.models.ecosystem.heads import NUMBERS
from tests.support.families import make, tokens, write_whole


def read(folder):
    return {
        name: x
        for file in sorted(folder.glob("*.safetensors"))
        for name, x in load_file(file).items()
    }


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    write_whole(folder, request.param)
    return folder


def opened(folder, **options):
    with pytest.warns(
        UserWarning, match=r"has no use for \d+ tensors of .*: (model\.visual \(21\), )?mtp \(2\)"
    ):
        return load_model(folder, **options)


class TestUntouched:
    def test_a_trained_model_opens_as_what_it_was_with_all_that_it_had(self, source, tmp_path):
        model = opened(source, dtype=torch.float32)
        model.get_input_embeddings().weight.data += 1
        model.config.eos_token_id = 7
        save_model(model, tmp_path)
        before, after = read(source), read(tmp_path)
        assert before.keys() == after.keys()
        changed = [
            name
            for name in before
            if not torch.equal(before[name], after[name].to(before[name].dtype))
        ]
        assert len(changed) == 1 and changed[0].endswith("embed_tokens.weight")
        assert all(
            x.dtype == before[name].dtype for name, x in after.items() if not name.endswith(NUMBERS)
        )
        assert all(x.dtype == torch.float32 for name, x in after.items() if name.endswith(NUMBERS))
        was, config = (
            json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path)
        )
        assert config["architectures"] == was["architectures"] and config["dtype"] == "bfloat16"
        assert config.get("vision_config") == was.get("vision_config")
        assert config.get("text_config", config)["eos_token_id"] == 7
        assert config.get("text_config", {}).get("mtp_num_hidden_layers") == was.get(
            "text_config", {}
        ).get("mtp_num_hidden_layers")
        assert (tmp_path / "video_preprocessor_config.json").is_file()
        kind = getattr(transformers, config["architectures"][0])
        whole, report = kind.from_pretrained(
            tmp_path, dtype=torch.float32, output_loading_info=True
        )
        assert not report["missing_keys"] and not report["unexpected_keys"]
        expected = opened(tmp_path, dtype=torch.float32).eval()(tokens(1, 9)).logits
        assert torch.equal(whole.eval()(input_ids=tokens(1, 9)).logits, expected)

    def test_a_trainers_folder_is_completed_also_twice_and_in_another_dtype(self, source, tmp_path):
        opened(source, dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="30KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2  # each of them is cast
        assert read(tmp_path).keys() < read(source).keys()
        added = complete_weights(tmp_path, source)
        before, after = read(source), read(tmp_path)
        assert {x.dtype for name, x in after.items() if not name.endswith(NUMBERS)} == {
            torch.bfloat16
        }
        assert (
            "mtp.fc.weight" in added and complete_weights(tmp_path, source, dtype="float32") == []
        )
        after = read(tmp_path)
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], before[name].to(after[name].dtype)) for name in before)
        assert (
            after["lm_head.weight"].dtype == torch.float32
            and after["mtp.fc.weight"].dtype == torch.bfloat16
        )
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == after.keys() and set(index.values()) == {
            p.name for p in tmp_path.glob("*.safetensors")
        }


@pytest.mark.parametrize("family", ["qwen4_exp", "olmo_hybrid"])
def test_a_family_that_is_loaded_whole_is_written_in_the_dtypes_of_its_source(family, tmp_path):
    make(family).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    save_model(load_model(tmp_path / "source", dtype=torch.float32), tmp_path / "out")
    before, after = read(tmp_path / "source"), read(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(x.to(before[name].dtype), before[name]) for name, x in after.items())
    assert {(x.dtype, name.endswith(NUMBERS)) for name, x in after.items()} == {
        (torch.bfloat16, False), (torch.float32, True),
    }  # fmt: skip


def test_the_card_names_the_base_model_and_its_license_and_keeps_what_it_has(tmp_path):
    source = tmp_path / "models--Qwen--Qwen4-exp" / "snapshots" / "0123"
    make("qwen4_exp").save_pretrained(source)
    (source / "README.md").write_text(
        "---\nlicense: apache-2.0\nlicense_link: there\ntags: [a]\n---\n# Theirs\n"
    )
    save_model(load_model(source), tmp_path / "out")
    first = metadata_load(tmp_path / "out" / "README.md")
    assert first["base_model"] == "Qwen/Qwen4-exp" and "tags" not in first
    assert (first["license"], first["license_link"]) == ("apache-2.0", "there")
    (tmp_path / "out" / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    complete_weights(tmp_path / "out", source)
    assert metadata_load(tmp_path / "out" / "README.md") == first | {"license": "mit"}
    assert (tmp_path / "out" / "README.md").read_text().endswith("# Mine\n")
    save_model(load_model(tmp_path / "out"), tmp_path / "next")
    card = (tmp_path / "next" / "README.md").read_text()
    assert "base_model: out\n" in card and str(tmp_path) not in card


class TestRefusals:
    def test_adapters_and_the_source_itself_are_refused_before_anything_is_written(self, tmp_path):
        write_whole(tmp_path / "source", "qwen3_5")
        before = read(tmp_path / "source")
        model = opened(tmp_path / "source")
        adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
        with pytest.raises(ValueError, match="merge_and_unload"):
            save_model(adapted, tmp_path / "out")
        adapted.save_pretrained(tmp_path / "adapters")
        with pytest.raises(ValueError, match=r"adapters has no model\*.safetensors: merge"):
            complete_weights(tmp_path / "adapters", tmp_path / "source")
        merged = adapted.merge_and_unload()
        with pytest.raises(ValueError, match="save to another folder"):
            save_model(merged, tmp_path / "source")
        with pytest.raises(ValueError, match="is its own source"):
            complete_weights(tmp_path / "source", tmp_path / "source")
        with pytest.raises(ValueError, match=r"dtype='bf16' is none.*bfloat16"):
            save_model(merged, tmp_path / "out", dtype="bf16")
        assert not (tmp_path / "out").exists()
        after = read(tmp_path / "source")
        assert (
            all(torch.equal(after[name], x) for name, x in before.items())
            and before.keys() == after.keys()
        )

    @pytest.mark.parametrize("format", ["delta", "fla"])
    def test_one_of_ours_is_written_in_the_dtype_that_is_asked_for(self, format, tmp_path):
        torch.manual_seed(0)
        model = DeltaForCausalLM(DeltaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2))
        save_model(model, tmp_path, format, dtype="bfloat16")
        kinds = {(x.dtype, name.endswith(NUMBERS)) for name, x in read(tmp_path).items()}
        assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
        model = load_model(tmp_path)
        assert isinstance(model, DeltaForCausalLM) and model.dtype == torch.bfloat16
