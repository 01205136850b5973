"""Loads exported models where this package cannot be imported: python -I load_without_package.py
OUT DIR ...

For every folder it writes to OUT what the models compute. A test compares that with this package.
"""

import sys
from importlib.abc import MetaPathFinder


class Hiding(MetaPathFinder):
    """Keeps this package, and pydantic, which transformers does not need, from being found."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] not in ("delta_trn", "pydantic"):
            return None
        exported = [finder for finder in sys.meta_path if type(finder).__name__ == "Sources"]
        spec = exported[0].find_spec(fullname) if exported else None
        if spec is None:
            raise ModuleNotFoundError(f"No module named {fullname!r}")
        return spec


def load(auto, folder):
    """Loads a model by one of transformers' Auto classes."""
    return auto.from_pretrained(folder, trust_remote_code=True).eval()


def other_models(folder):
    """Returns what the backbone computes, and what the model does after it was saved again
    from there.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    ids, mask = inputs()
    backbone, classifier = load(AutoModel, folder), load(AutoModelForSequenceClassification, folder)
    assert torch.equal(classifier.model.embed.weight, backbone.embed.weight)
    load(AutoModelForCausalLM, folder).save_pretrained(f"{folder}/again")
    again = load(AutoModelForCausalLM, f"{folder}/again")
    assert torch.equal(load(AutoModel, f"{folder}/again").embed.weight, backbone.embed.weight)
    hidden = backbone(ids, attention_mask=mask).last_hidden_state
    return {"hidden": hidden.detach(), "again": again(ids, attention_mask=mask).logits.detach()}


def inputs():
    """Returns token ids [2, 70] and a mask that pads the second row on the left."""
    import torch

    ids = torch.randint(0, 61, (2, 70), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return ids, mask


def computed(model):
    """Returns logits, generated tokens, the loss and every gradient of a model, by name."""
    ids, mask = inputs()
    prompt = {
        "input_ids": ids[:, :12],
        "attention_mask": mask[:, :12],
        "max_new_tokens": 4,
        "pad_token_id": 0,
    }
    output = model(ids, attention_mask=mask, labels=ids)
    output.loss.backward()
    return {
        "logits": output.logits.detach(),
        "loss": output.loss.detach(),
        "greedy": model.generate(**prompt, do_sample=False),
        "beams": model.generate(**prompt, do_sample=False, num_beams=3),
        **{name: p.grad for name, p in model.named_parameters()},
    }


if __name__ == "__main__":
    sys.meta_path.insert(0, Hiding())
    import torch
    from transformers import AutoModelForCausalLM

    results = {folder: computed(load(AutoModelForCausalLM, folder)) for folder in sys.argv[2:]}
    results[sys.argv[2]] |= other_models(sys.argv[2])
    torch.save(results, sys.argv[1])
