"""Probes measure what goes on inside a model while it trains, at every evaluation on one held-out
batch.

Sizes are root mean squares. Gradients are of the loss summed over tokens, so that they do not
depend on the number of tokens: those of the mean, as in training, shrink with the batch. The last
column says how each grows with width d under muP; K is the key size (arXiv:2606.04048):

    of a layer          layers/I/NAME, I the first, middle and last layer with a token mixer
    q k v               after convolution and SiLU, before normalization           1
    o                   S^T q                                                      d^-1/2 to 1
    hidden              the block's input                                          1
    beta_mean           write strength, as a share of the largest                  1
    beta_strong         share of beta above half the largest                       1
    alpha_mean          decay                                                      1
    memory              tokens that the median head remembers, 1 / (1 - mean alpha)
    gate_decay_std      standard deviation of W_a x, without its bias              1
    gate_beta_std       standard deviation of W_b x                                1
    Sk/T                |S k| sqrt(K) / |S| of the state after T tokens and the next token's unit k:
                        1 for a random direction k, sqrt(K) if the state holds only k
    qk/T  qk_mean       mean cosine of q and k at token T, and at all tokens
    grad_q _k _hidden   gradients of the same tensors                              1/d

    of a write          depth/I/NAME, of Deep Delta Learning's residuals, I from 0 to 2 L - 1 with
                        depth
    beta_mean           mean of beta over tokens
    identity            share of tokens with beta below 1/2: the stream stays
    projection          from 1/2 to 3/2: what the stream holds along k is replaced
    reflection          above 3/2: what the stream holds along k changes its sign
    along               root mean square of |k^T X|, k of norm 1
    determinant         mean of det(I - beta k k^T)^DV = (1 - beta)^DV; 1 where nothing is erased
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.models.residual import DeepDelta, LatentUpdate, WriteOnly
from delta_trn.train.data.loader import Batch
from delta_trn.train.run.evaluate import held_out_crops
from delta_trn.train.run.step import loss_function

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM
    from delta_trn.train.run.loop import Probe
    from delta_trn.train.run.setup import Run
    from delta_trn.train.run.step import Loss

PLACES = 8  # qk/T and Sk/T divide the sequence into so many parts
L2_EPSILON = 1e-6  # as in the operation's own normalization of q and k


class MixerView:
    """One Gated DeltaNet layer in one forward pass, seen by hooks on its block; tensors keep their
    gradients.

    stream  [B, T, d]         residual stream before the block
    x       [B, T, d]         input
    qkv     [B, T, channels]  after convolution and SiLU, before normalization
    o       [B, T, HV, V]     output of the delta rule, with its scale, before its norm
    """

    stream: Tensor
    x: Tensor
    sequences: Any
    qkv: Tensor
    o: Tensor

    def __init__(self, block: Any) -> None:
        self.mixer: GatedDeltaNet = block.mixer
        self.hooks = [
            block.register_forward_pre_hook(lambda _, inputs: self._keep("stream", inputs[0])),
            self.mixer.register_forward_pre_hook(
                lambda _, inputs: vars(self).update(x=inputs[0], sequences=inputs[1])
            ),
            self.mixer.conv.register_forward_hook(lambda _, inputs, out: self._keep("qkv", out)),
            self.mixer.o_norm.register_forward_pre_hook(
                lambda _, inputs: self._keep("o", inputs[0])
            ),
        ]

    def _keep(self, name: str, tensor: Any) -> None:
        if tensor.requires_grad:
            tensor.retain_grad()
        setattr(self, name, tensor)

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k [B, T, H, K] and v [B, T, HV, V], before normalization."""
        sizes = (self.mixer.K, self.mixer.K, self.mixer.V)
        parts = self.qkv.split(self.mixer.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True))
        return q, k, v

    def gates(self) -> tuple[Tensor, Tensor]:
        """Returns g = log(alpha) and beta, [B, T, HV];
        g of Kimi Delta Attention for each channel.
        """
        return self.mixer.gates(self.x, self.sequences)

    def state(self, tokens: int) -> Tensor:
        """Returns the state [B, HV, K, V] after the first `tokens`."""
        q, k, v = (x[:, :tokens] for x in self.split())
        g, beta = (x[:, :tokens] for x in self.gates())
        options: Any = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
        _, state = self.mixer.rule(q, k, v, g, beta, **options)
        assert state is not None
        return state


# place in depth -> a write of Deep Delta Learning's residuals, and its inputs
Writes = dict[int, tuple[Any, tuple[Tensor, ...]]]


@contextlib.contextmanager
def observe(model: DeltaForCausalLM) -> Iterator[tuple[dict[int, MixerView], Writes]]:
    """Within `with`, a forward pass fills views of the first, middle and last mixer, and all
    writes.

    Their tensors keep their gradients after backward.
    """
    mixers: dict[int, MixerView] = {}
    writes: Writes = {}
    handles: list[Any] = []
    blocks: list[Any] = list(model.model.blocks)
    layers = [i for i, block in enumerate(blocks) if isinstance(block.mixer, GatedDeltaNet)]
    for i in sorted({layers[0], layers[len(layers) // 2], layers[-1]} if layers else ()):
        mixers[i] = MixerView(blocks[i])
        handles += mixers[i].hooks

    def write(place: int, module: Any, inputs: Any) -> None:
        writes[place] = module, inputs

    for i, block in enumerate(blocks):
        for place, module in ((2 * i, block.mixer_write), (2 * i + 1, block.mlp_write)):
            if isinstance(module, (DeepDelta, LatentUpdate)):
                handles.append(module.register_forward_pre_hook(partial(write, place)))
    try:
        yield mixers, writes
    finally:
        for handle in handles:
            handle.remove()


def normalize(x: Tensor) -> Tensor:
    """Returns x / sqrt(sum x^2 + 1e-6) over the last dimension, as the operation computes it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)


def rms(x: Tensor) -> float:
    """Returns sqrt(mean x^2), computed in float64."""
    return float(x.detach().double().square().mean().sqrt())


def probe_of(run: Run) -> Probe | None:
    """Returns what measures the probes of a run of one process;
    None where log.probes asks for none.
    """
    if not run.config.log.probes:
        return None
    loss = loss_function(run.model, run.config.model_copy(update={"compile": False}), run.device)
    (batch,) = held_out_crops(run.config, run.dataset, run.layout, at_most=1)
    return partial(measure, run.model, loss, batch.each(lambda x: x.to(run.device)))


def measure(model: DeltaForCausalLM, loss: Loss, batch: Batch) -> dict[str, float]:
    """Returns every probe by its name, and leaves weights,
    their gradients and random numbers as they are.
    """
    training = model.training
    kept = [(p, p.grad) for p in model.parameters()]
    model.eval()
    try:
        for p, _ in kept:
            p.grad = None
        with observe(model) as (mixers, writes):
            # the sum over tokens, not their mean
            (loss(*batch) * batch.targets.numel()).backward()
        values: dict[str, float] = {}
        with torch.no_grad():
            for i, (write, inputs) in writes.items():
                of_write = write_probes(
                    *operands(write, *inputs), erases=not isinstance(write, WriteOnly)
                )
                values |= {f"depth/{i}/{name}": value for name, value in of_write.items()}
            for i, mixer in mixers.items():
                values |= {
                    f"layers/{i}/{name}": value for name, value in layer_probes(mixer).items()
                }
    finally:
        model.train(training)
        for p, grad in kept:
            p.grad = grad
    return {name: float(f"{value:.6g}") for name, value in values.items()}


def layer_probes(view: MixerView) -> dict[str, float]:
    """Measures one layer."""
    q, k, v = view.split()
    T = q.shape[1]
    g, beta = view.gates()
    beta = beta / view.mixer.beta_max
    alpha = g.exp()
    heads = beta.shape[-1]
    decay, strength = view.mixer._project_gates(view.x).tensor_split((-heads,), -1)
    cosine = (normalize(q) * normalize(k)).sum(-1)
    forgets = -torch.expm1(g).mean((0, 1))  # 1 - alpha without its cancellation
    probes = {
        **{name: rms(x) for name, x in {"q": q, "k": k, "v": v}.items()},
        "o": rms(view.o) / view.mixer.scale,
        "hidden": rms(view.stream),
        "beta_mean": float(beta.mean()),
        "beta_strong": float((beta > 0.5).float().mean()),
        "alpha_mean": float(alpha.mean()),
        "memory": float((1 / forgets.clamp_min(1e-12)).median()),
        "gate_decay_std": float(decay.std()),
        "gate_beta_std": float(strength.std()),
        "qk_mean": float(cosine.mean()),
    }
    for i in range(PLACES + 1):
        t = min(i * T // PLACES, T - 1)
        probes[f"qk/{t}"] = float(cosine[:, t].mean())
        if 0 < i < PLACES:
            probes[f"Sk/{t}"] = recall(view.state(t), k[:, t])
    if view.qkv.grad is not None:
        q, k, _ = view.qkv.grad.split(view.mixer.sizes, dim=-1)
        gradients = {"q": q, "k": k, "hidden": view.stream.grad}
        probes |= {f"grad_{name}": rms(x) for name, x in gradients.items() if x is not None}
    return probes


def operands(write: Any, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a write's X [..., D, DV], k [..., D] of norm 1, and beta [...]."""
    X, k, _, beta = write.operands(*inputs)
    return X, k * (k.square().sum(-1, keepdim=True) + write.k_eps**2).rsqrt(), beta


def write_probes(X: Tensor, k: Tensor, beta: Tensor, *, erases: bool = True) -> dict[str, float]:
    """Measures one write by its `operands`."""
    X, k, beta = X.float(), k.float(), beta.float()
    along = torch.einsum("...d,...dv->...v", k, X).norm(dim=-1)
    determinant = (1 - beta) ** X.shape[-1] if erases else torch.ones_like(beta)
    return {
        "beta_mean": float(beta.mean()),
        "identity": float((beta < 0.5).float().mean()),
        "projection": float(((beta >= 0.5) & (beta <= 1.5)).float().mean()),
        "reflection": float((beta > 1.5).float().mean()),
        "along": float(along.square().mean().sqrt()),
        "determinant": float(determinant.mean()),
    }


def recall(S: Tensor, k: Tensor) -> float:
    """Returns |S^T k| sqrt(K) / |S|_F for unit k, as the root mean square over sequences and heads.

    S [B, HV, K, V]; k [B, H, K] of any length. Averaged over all directions of k it is 1, whatever
    S is.
    """
    k = normalize(k.float()).repeat_interleave(S.shape[1] // k.shape[1], dim=1)
    values = torch.einsum("bhkv,bhk->bhv", S.float(), k)
    share = values.square().sum(-1) / S.float().square().sum((-2, -1)).clamp_min(1e-30)
    return float((share.mean() * S.shape[2]).sqrt())
