"""Records what the models of others compute, by their own code in float64.

    python -m tests.models.ecosystem.record_goldens fla
    python -m tests.models.ecosystem.record_goldens kda
    python -m tests.models.ecosystem.record_goldens authors CHECKOUT

It needs flash-linear-attention 0.6.0 (0.5.2 computed the same of "fla", bit for bit), einops and
triton; for "authors" also a checkout of github.com/lauyikfung/gated_delta_net_mup (recorded at
bb1ccf1). Only their operators, which need a GPU, are replaced: by flash-linear-attention's own
references in PyTorch where it has them (both delta rules, their gates, RMSNorm), and by torch's
functions (convolution, SwiGLU). None of our code is used.

A golden has no weights: `fill` makes them from names. Large tensors are recorded by `sketch`.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent / "goldens"
TOKENS = (
    70  # more than one chunk of the chunked rule, and more than flash-linear-attention decodes with
)
FLA_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 12, "vocab_size": 23,
    "intermediate_size": 40, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FLA_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {
        **{"num_v_heads": 4, "allow_neg_eigval": True, "conv_size": 3, "norm_eps": 1e-3},
        **{"tie_word_embeddings": True, "expand_v": 1.5, "fuse_norm": False, "fuse_swiglu": False},
    },
    "no_convolution": {"use_short_conv": False},
}
KDA_CASES: dict[str, dict[str, Any]] = {
    "kda plain": {},
    "kda grouped": {
        **{
            "num_v_heads": 4,
            "allow_neg_eigval": True,
            "conv_size": 3,
            "norm_eps": 1e-3,
            "expand_v": 1.5,
        },
        **{"safe_gate": True, "lower_bound": -5.0, "fuse_norm": False},
    },
    "kda bound alone": {"lower_bound": -4.0, "safe_gate": False, "tie_word_embeddings": True},
}
AUTHORS_SIZES = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": -1, "vocab_size": 29,
    "hidden_init_std_factor": 0.32,
}  # fmt: skip
AUTHORS_CASES: dict[str, dict[str, Any]] = {
    "gdn 96": {"hidden_size": 96, "hidden_size_base": 48, "mup": True},
    "gdn 160": {"hidden_size": 160, "hidden_size_base": 80, "mup": True},
    "gdn 96 sp": {"hidden_size": 96, "mup": False},
}
GATED = "fla.layers.gated_deltanet"
RATE, MOMENTUM, BETAS = 2**-6, 0.98, (0.9, 0.95)


def fill(name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the weights of a parameter, float32: they depend on its name and shape alone."""
    x = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) > 1:
        x *= 2 * shape[-1] ** -0.5
    else:
        x = {"A_log": 0.5 * x, "dt_bias": x - 2}.get(name.split(".")[-1], 1 + 0.2 * x)
    return torch.from_numpy(x.astype(np.float32))


def sketch(x: Tensor, name: str) -> Tensor:
    """Returns x if it is small, or else its products with four random tensors and its norm."""
    if x.numel() <= 64:
        return x.detach().flatten().clone()
    random = np.random.RandomState(zlib.crc32(f"{name} sketch".encode())).standard_normal(
        (4, x.numel())
    )
    x = x.detach().double().flatten()
    return torch.cat([torch.from_numpy(random) @ x, x.norm()[None]])


def tokens(vocabulary: int) -> Tensor:
    """Returns the tokens of every golden, [2, TOKENS]."""
    return torch.from_numpy(np.random.RandomState(17).randint(0, vocabulary, (2, TOKENS)))


@contextmanager
def float64() -> Iterator[None]:
    """Makes what asks for float32 get float64."""
    with float64_logits(), mock.patch.multiple(torch, float32=torch.float64, float=torch.float64):
        yield


def rule(q, k, v, g, beta, A_log=None, dt_bias=None, **options):
    """Computes a delta rule by the naive references of flash-linear-attention:
    Kimi's by g [B, T, HV, K].
    """
    if g.dim() == 4:
        from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
        from fla.ops.kda.naive import naive_recurrent_kda
    else:
        from fla.ops.gated_delta_rule.gate import naive_gdn_gate
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    assert options.pop("use_qk_l2norm_in_kernel") and not options.pop("output_final_state")
    assert options.pop("initial_state") is None and options.pop("cu_seqlens") is None
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    with float64():
        bound, made = options.pop("lower_bound", None), options.pop("use_gate_in_kernel", False)
        if made and bound is not None:
            g = naive_kda_lowerbound_gate(g, A_log, dt_bias, bound, torch.float64)
        elif made:
            g = (naive_kda_gate if g.dim() == 4 else naive_gdn_gate)(
                g, A_log, dt_bias, torch.float64
            )
        if options.pop("use_beta_sigmoid_in_kernel", False):
            beta = beta.sigmoid() * (2 if options.pop("allow_neg_eigval") else 1)
        assert not set(options) - {"state_v_first", "allow_neg_eigval", "safe_gate"}
        if g.dim() == 4:
            return naive_recurrent_kda(q, k, v, g, beta)
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
        return naive_recurrent_gated_delta_rule(q, k, v, beta, g)


def convolution(x, weight, bias=None, activation=None, **options):
    """Computes the causal convolution of [B, T, C]."""
    weight = weight.reshape(weight.shape[0], 1, -1)
    y = F.conv1d(
        F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0)), weight, bias, groups=x.shape[-1]
    )
    assert activation == "silu"
    return F.silu(y).transpose(1, 2), None


def references(*modules: str) -> ExitStack:
    """Puts the references in place of flash-linear-attention's operators,
    also in other `modules`.
    """
    from fla.modules.layernorm import rms_norm_ref

    def norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False):
        return rms_norm_ref(x, weight, bias, residual, eps, prenorm)

    def gated(x, g, weight, bias, activation, eps, **options):
        gate = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}[activation]
        return rms_norm_ref(x, weight, bias, eps=eps) * gate(g)

    replaced = {
        "fla.modules.layernorm": {"rms_norm": norm},
        "fla.modules.fused_norm_gate": {"rms_norm_gated": gated},
        "fla.modules.conv.causal_conv1d": {"causal_conv1d": convolution},
        "fla.modules.mlp": {
            "swiglu": lambda x, y: F.silu(x) * y,
            "swiglu_linear": lambda x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias),
        },
    }
    for module in modules:
        kind = "kda" if module.endswith("kda") else "gated_delta_rule"
        replaced[module] = {f"chunk_{kind}": rule, f"fused_recurrent_{kind}": rule}
    if GATED in modules:
        replaced[GATED]["causal_conv1d"] = convolution
    stack = ExitStack()
    for module, functions in replaced.items():
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(importlib.import_module(module), name, function))
    return stack


def fill_model(model: torch.nn.Module) -> torch.nn.Module:
    model = model.double()
    for name, parameter in model.named_parameters():
        parameter.data = fill(name, tuple(parameter.shape)).double()
    return model


def record_fla(kind: str) -> dict[str, Tensor]:
    models = importlib.import_module(f"fla.models.{'kda' if kind == 'kda' else 'gated_deltanet'}")
    name, layers = ("KDA", "fla.layers.kda") if kind == "kda" else ("GatedDeltaNet", GATED)
    out, about = {}, {}
    for case, settings in (KDA_CASES if kind == "kda" else FLA_CASES).items():
        with references(layers):
            config = getattr(models, f"{name}Config")(**FLA_SIZES | settings)
            model = fill_model(getattr(models, f"{name}ForCausalLM")(config))
            if config.tie_word_embeddings:
                model.lm_head.weight = model.model.embeddings.weight
            ids = tokens(config.vocab_size)
            logits = model.train()(ids, use_cache=False).logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            decoded = model.eval()(ids[:, :64], use_cache=False).logits  # by the other operator
            assert (decoded - logits[:, :64]).abs().max() < 1e-12
        out |= write(case, logits, model)
        about[case] = {"config": json.loads(config.to_json_string()), "shapes": shapes(model)}
    return out, about


def record_authors(checkout: str) -> dict[str, Tensor]:
    sys.path.insert(0, checkout)
    groups = {
        "sgd": importlib.import_module("utils.gdn_sgd_utils").get_gdn_sgd_param_groups,
        "adamw": importlib.import_module("utils.gdn_adam_utils").get_gdn_adam_param_groups,
    }
    out, about = {}, {}
    for case, settings in AUTHORS_CASES.items():
        settings = {**AUTHORS_SIZES, **settings, "nanogpt_next_model_type": "gdn"}
        code = importlib.import_module("model.gdn")
        with references(GATED, code.__name__), float64_logits():
            config = code.GPTConfig(**settings)
            drawn = code.GPT(config)
            stds = {n: p.std().item() for n, p in drawn.named_parameters() if p.dim() > 1}
            model = fill_model(drawn).train()
            ids = tokens(config.vocab_size)
            logits, loss = model(ids[:, :-1], targets=ids[:, 1:])
            loss.backward()
        out |= write(case, logits, model) | {f"{case}/loss": loss.detach()}
        m = config.hidden_size / config.hidden_size_base if config.mup else 1.0
        # the factors of their trainers, lines 770 to 790 of train_sgd_finewebedu.py and 775 of
        # train_adam_...
        factors = {
            "sgd": {
                "embedding_lr_mult": m,
                "gate_lr_mult": math.sqrt(1 / m),
                "scalar_lr_mult": math.sqrt(m),
            },
            "adamw": {"hidden_lr_mult": 1 / m},
        }
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name in groups if config.mup else ():
            for parameter_name, p in model.named_parameters():
                p.data.copy_(start[parameter_name])
            rows = groups[name](model, 0.0, **factors[name])
            rows = [{**row, "lr": RATE * row["lr_mult"]} for row in rows]
            optimizer = (
                torch.optim.SGD(rows, lr=RATE, momentum=MOMENTUM, nesterov=True)
                if name == "sgd"
                else torch.optim.AdamW(rows, lr=RATE, betas=BETAS, eps=0.0, weight_decay=0.0)
            )
            optimizer.step()
            for parameter_name, p in model.named_parameters():
                moved = p.detach() - start[parameter_name]
                out[f"{case}/{name}/{parameter_name}"] = sketch(moved, parameter_name)
        about[case] = {
            "config": json.loads(config.to_json_string()),
            "shapes": shapes(model),
            "stds": stds,
        }
    return out, about


@contextmanager
def float64_logits() -> Iterator[None]:
    """Leaves logits and gates in float64, where their code asks for float32."""
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def write(case: str, logits: Tensor, model: torch.nn.Module) -> dict[str, Tensor]:
    grads = {f"{case}/gradient/{n}": sketch(p.grad, n) for n, p in model.named_parameters()}
    return {f"{case}/logits": logits.detach().contiguous(), **grads}


def main(kind: str, *checkout: str) -> None:
    warnings.simplefilter("ignore")
    tensors, about = record_authors(*checkout) if kind == "authors" else record_fla(kind)
    HERE.mkdir(exist_ok=True)
    save_file(tensors, HERE / f"{kind}.safetensors", metadata={"about": json.dumps(about)})
    print(f"{len(about)} cases, {(HERE / f'{kind}.safetensors').stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
