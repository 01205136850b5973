"""Probes measure what goes on inside a model while it trains, at every evaluation on one held-out batch.

Sizes are root mean squares. Gradients are of the loss summed over tokens, so that they do not depend on the
number of tokens: those of the mean, as in training, shrink with the batch. The last column says how each
grows with width d under muP; K is the key size (arXiv:2606.04048):

    of a layer          layers/I/NAME, I the first, middle and last layer with a token mixer
    q k v               after convolution and SiLU, before normalization           1
    o  y  out           S^T q; normalized and gated; what the layer adds           d^-1/2 to 1; 1; 1
    hidden              the block's input                                          1
    beta_mean _std      write strength, as a share of the largest                  1
    beta_strong         share of beta above half the largest                       1
    alpha_mean          decay                                                      1
    memory              tokens that the median head remembers, 1 / (1 - mean alpha)
    gate_decay_std      standard deviation of W_a x, without its bias              1
    gate_beta_std       standard deviation of W_b x                                1
    state               entries after the last token, times sqrt(K)                1
    Sk/T                |S k| sqrt(K) / |S| of the state after T tokens and the next token's unit k: 1 for a
                        random direction k, sqrt(K) if the state holds only k
    qk/T                mean cosine of q and k at token T;  qk_mean, qk_abs: its mean and mean size over all
    grad_q grad_k grad_v grad_hidden grad_y    gradients of the same tensors       1/d
    grad_o              gradient of S^T q                                          1/d to d^-1/2

    of a group          groups/NAME/..., NAME one of GROUPS
    weight  grad        Frobenius norms of the parameters and of their gradient
    lr                  mean learning rate, weighted by parameters, factors included
    update              Frobenius norm of the last step's change, decay included; fraction: update over weight

    of a write          depth/I/..., of Deep Delta Learning's residuals: see depth.py

    logit_std           mean over tokens of the standard deviation over the vocabulary
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from delta_trn.train.data import Batch
from delta_trn.train.parallel.layout import layout_alone
from delta_trn.train.parallel.sharding import named_parameters
from delta_trn.train.run.evaluate import held_out_crops, is_due
from delta_trn.train.run.step import loss_function
from delta_trn.train.studies.probes import depth
from delta_trn.train.studies.probes.hooks import MixerView, ModelView, normalized, observed, rms

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM
    from delta_trn.train.run.loop import Observer
    from delta_trn.train.run.setup import Run
    from delta_trn.train.run.step import Loss

GROUPS = ("embedding", "main_proj", "gate_proj", "scalar", "conv", "norm", "mlp", "residual")
PLACES = 8  # qk/T and Sk/T divide the sequence into so many parts


class Probes:
    """Measures and leaves training alone: weights, their gradients and random numbers stay as they are."""

    def __init__(
        self,
        model: DeltaForCausalLM,
        optimizer: Optimizer,
        loss: Loss,
        batch: Batch,
        device: torch.device,
        before: dict[str, Tensor] | None = None,
    ):
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.batch = batch.each(lambda x: x.to(device))
        self._before = before or {}

    @torch.no_grad()
    def before_step(self) -> None:
        """Copies the weights, to see what the coming step changes. Needed only before an evaluation."""
        self._before = {name: p.detach().clone() for name, p, _ in self._parameters()}

    def measure(self) -> dict[str, float]:
        """Returns every probe by its name."""
        training = self.model.training
        kept = {name: p.grad for name, p, _ in self._parameters()}
        self.model.eval()
        try:
            for _, p, _ in self._parameters():
                p.grad = None
            with observed(self.model, gradients=True) as views, depth.watched(self.model) as writes:
                # the sum over tokens, not their mean
                (self.loss(*self.batch) * self.batch.targets.numel()).backward()
            with torch.no_grad():
                values = {"logit_std": self._logit_std(views[0])} | self._groups() | depth.named(writes)
                layers = sorted(views[0].mixers)
                for i in sorted({layers[0], layers[len(layers) // 2], layers[-1]} if layers else ()):
                    of_layer = layer_probes(views[0].mixers[i], views[0].stream[i])
                    values |= {f"layers/{i}/{name}": value for name, value in of_layer.items()}
        finally:
            self.model.train(training)
            for name, p, _ in self._parameters():
                p.grad = kept[name]
            self._before = {}
        return {name: float(f"{value:.6g}") for name, value in values.items()}

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter, float]]:
        """Lists the name, the parameter and the current learning rate of all parameters."""
        return [
            (name, p, group["lr"])
            for group in self.optimizer.param_groups
            for name, p in zip(group["names"], group["params"], strict=True)
        ]

    def _groups(self) -> dict[str, float]:
        squares: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name, p, lr in self._parameters():
            into = squares[group_of(name)]
            into["count"] += p.numel()
            into["lr"] += lr * p.numel()
            into["weight"] += _square(p)
            into["grad"] += 0.0 if p.grad is None else _square(p.grad)
            if name in self._before:
                into["update"] += _square(p - self._before[name])
        values = {}
        for group, sums in squares.items():
            count = sums.pop("count")
            of_group = {"lr": sums.pop("lr") / count} | {key: value**0.5 for key, value in sums.items()}
            if "update" in of_group and of_group["weight"]:
                of_group["fraction"] = of_group["update"] / of_group["weight"]
            values |= {f"groups/{group}/{key}": value for key, value in of_group.items()}
        return values

    def _logit_std(self, view: ModelView) -> float:
        hidden = view.hidden[:1].float()  # one sequence: all logits of a batch may not fit
        head = self.model.lm_head
        logits = F.linear(hidden, head.weight.float()) * head.multiplier
        return float(logits.std(-1).mean())


class ProbeObserver:
    """Measures the probes of a run at every evaluation (see `train.run.loop.Observer`)."""

    def __init__(self, run: Run):
        self.config = run.config
        self.probes = Probes(run.model, run.optimizer, *_loss_and_batch(run, run.model), run.device)

    def before_step(self, step: int) -> None:
        if is_due(self.config, step):
            self.probes.before_step()

    def after_evaluation(self) -> dict[str, float]:
        return self.probes.measure()


class TeamProbeObserver:
    """Measures the probes of a run of several processes, as one process would, on a copy that is whole.

    Probes read whole layers, however a model, its batch or its sequences are divided. For each evaluation the
    weights before and after its step are put together on the leader, which then measures alone. It needs the
    memory that probes need in a run of one process.
    """

    def __init__(self, run: Run):
        self.run = run
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        if is_due(self.run.config, step):
            # this process's parts
            self._before = {name: p.detach().clone() for name, p in named_parameters(self.run.optimizer)}

    def after_evaluation(self) -> dict[str, float]:
        run = self.run
        run.sharding.at_rest()
        before = self._whole(self._before)
        weights = self._whole(dict(named_parameters(run.optimizer)))
        self._before = {}
        if not run.team.leads:
            return {}
        model, optimizer = _copy(run, weights)
        return Probes(model, optimizer, *_loss_and_batch(run, model), run.device, before).measure()

    @torch.no_grad()
    def _whole(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns whole matrices on the leader, none elsewhere. All processes must call."""
        leads, whole = self.run.team.leads, {}
        for name, part in parts.items():
            matrix = self.run.sharding.whole(name, part)
            if leads:
                whole[name] = matrix.clone()
        return whole


def _copy(run: Run, weights: dict[str, Tensor]) -> tuple[DeltaForCausalLM, Optimizer]:
    """Returns a model of one process with these weights, and an optimizer with the run's learning rates."""
    from delta_trn.models import DeltaForCausalLM

    with torch.device("meta"):
        model = DeltaForCausalLM(run.model.config)
    model.load_state_dict(weights, strict=False, assign=True)
    if run.model.config.tie_word_embeddings:  # saved and trained under one name
        model.lm_head.weight = model.model.embed.weight
    parameters = dict(model.named_parameters())
    if run.config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    groups = [
        {"params": [parameters[name] for name in group["names"]], "names": group["names"], "lr": group["lr"]}
        for group in run.optimizer.param_groups
    ]
    return model, torch.optim.SGD(groups, lr=run.config.optimizer.lr)


def _loss_and_batch(run: Run, model: DeltaForCausalLM) -> tuple[Loss, Batch]:
    """Returns a model's loss, and the held-out batch that one process would have, however many there are."""
    plain = loss_function(model, run.config.model_copy(update={"compile": False}), run.device)
    return plain, held_out_crops(run.config, run.dataset, layout_alone(run.config), at_most=1)[0]


def observers(run: Run) -> list[Observer]:
    """Returns what is to look into this run's model: the probes, where log.probes asks for them."""
    if not run.config.log.probes:
        return []
    return [ProbeObserver(run) if run.team.world == 1 else TeamProbeObserver(run)]


def layer_probes(view: MixerView, stream: Tensor) -> dict[str, float]:
    """Measures one layer; `stream` is its block's input."""
    q, k, v = view.split()
    T = q.shape[1]
    g, beta = view.gates()
    beta = beta / view.mixer.beta_max
    alpha = g.exp()
    za, zb = view.gate_inputs()
    cosine = (normalized(q) * normalized(k)).sum(-1)
    forgets = -torch.expm1(g).mean((0, 1))  # 1 - alpha without its cancellation
    probes = {
        **{name: rms(x) for name, x in {"q": q, "k": k, "v": v, "y": view.y, "out": view.out}.items()},
        "o": rms(view.o) / view.mixer.scale,
        "hidden": rms(stream),
        "beta_mean": float(beta.mean()),
        "beta_std": float(beta.std()),
        "beta_strong": float((beta > 0.5).float().mean()),
        "alpha_mean": float(alpha.mean()),
        "memory": float((1 / forgets.clamp_min(1e-12)).median()),
        "gate_decay_std": float((za - view.mixer.dt_bias).std()),
        "gate_beta_std": float(zb.std()),
        "state": rms(view.state()) * view.mixer.K**0.5,
        "qk_mean": float(cosine.mean()),
        "qk_abs": float(cosine.abs().mean()),
    }
    for i in range(PLACES + 1):
        t = min(i * T // PLACES, T - 1)
        probes[f"qk/{t}"] = float(cosine[:, t].mean())
        if 0 < i < PLACES:
            probes[f"Sk/{t}"] = recall(view.state(t), k[:, t])
    if view.qkv.grad is not None:
        q, k, v = view.qkv.grad.split(view.mixer.sizes, dim=-1)
        gradients = {"q": q, "k": k, "v": v, "y": view.y.grad, "hidden": stream.grad}
        # of S^T q, which o is a multiple of
        gradients["o"] = None if view.o.grad is None else view.o.grad * view.mixer.scale
        probes |= {f"grad_{name}": rms(x) for name, x in gradients.items() if x is not None}
    return probes


def recall(S: Tensor, k: Tensor) -> float:
    """Returns |S^T k| sqrt(K) / |S|_F for unit k, as the root mean square over sequences and heads.

    S [B, HV, K, V]; k [B, H, K] of any length. Averaged over all directions of k it is 1, whatever S is.
    """
    k = normalized(k.float()).repeat_interleave(S.shape[1] // k.shape[1], dim=1)
    values = torch.einsum("bhkv,bhk->bhv", S.float(), k)
    share = values.square().sum(-1) / S.float().square().sum((-2, -1)).clamp_min(1e-30)
    return float((share.mean() * S.shape[2]).sqrt())


def group_of(name: str) -> str:
    """Returns which of GROUPS a parameter belongs to."""
    parts = name.removeprefix("model.").split(".")
    if parts[0] in ("embed", "lm_head"):
        return "embedding"
    if "a_proj" in parts or "b_proj" in parts:
        return "gate_proj"
    if parts[-1] in ("A_log", "dt_bias"):
        return "scalar"
    if "conv" in parts:
        return "conv"
    if any(part == "norm" or part.endswith("_norm") for part in parts):
        return "norm"
    if "mlp" in parts:
        return "mlp"
    return "main_proj" if "mixer" in parts else "residual"


def _square(x: Tensor) -> float:
    return float(x.detach().double().square().sum())
