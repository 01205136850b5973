"""Mistakes, each one line of this project's code, and how a line is replaced while a check runs.

A bug replaces the code of one function, in place: everybody who imported the function runs the
mistake.
"""

from __future__ import annotations
import __future__

import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from types import FunctionType
from typing import Any

import torch


@dataclass(frozen=True)
class Bug:
    """Replaces `line` of a function, "module:name", by `mistake`; `check` must turn red."""

    name: str
    place: str
    line: str
    mistake: str
    check: str


RULE, RESIDUAL = "backends.gated_delta_rule", "backends.delta_residual"
TRITON_BACK = "triton_kernels.gated_delta_rule_bwd"
TRITON_REVERSE = "triton_kernels.gated_delta_rule_reverse"
TRITON_REFINE = "triton_kernels.gated_delta_rule_refine:refine_kernel"
TRITON_CONVOLUTION = "triton_kernels.short_convolution"
SIMULATED_PRODUCTS = "nki_simulator.isa.matmul"
NKI_BACK, NKI_LAYER = "nki_kernels.chunk_gradients", "nki_kernels.gated_delta_layer"
TRITON_SEGMENTS, NKI_STEP = (
    "triton_kernels.segments:chain_kernel",
    "nki_kernels.gated_delta_rule_step",
)
NKI_CONVOLUTION = "nki_kernels.short_convolution"
LAYERS = "backends.layers.pytorch"
PATCHING = "models.ecosystem.patching"
UNTOUCHED = "models.layers:is_untouched"
READOUT, KIMI = "models.language_model", "models.kimi_delta_attention:KimiDeltaAttention"

# fmt: off
BUGS = (
    Bug("chunked: o is not scaled", f"{RULE}.chunked:compute",
        "call.scale * o", "o", "chunked"),
    Bug("chunked: erasures do not decay", f"{RULE}.chunked:compute_chunk",
        "(k @ k.mT * D)", "(k @ k.mT)", "chunked"),
    Bug("chunked: dL has the wrong sign", f"{RULE}.chunked:Solve.backward",
        "-(dR @ U.mT)", "(dR @ U.mT)", "chunked"),
    Bug("chunked: dR by the inverse, not by its transpose", f"{RULE}.chunked:Solve.backward",
        "T.mT @ dU", "T @ dU", "chunked"),
    Bug("chunked: the carried state does not decay", f"{RULE}.chunked:compute_chunk",
        "gam[..., -1:, :] * S", "S", "chunked"),
    Bug("chunked: value heads take the keys in turns", f"{RULE}.chunked:compute",
        "repeat_interleave(groups, 2)", "repeat(1, 1, groups, 1)", "chunked"),
    Bug("chunked: a packed sequence has the state of the first", f"{RULE}.chunked:compute_packed",
        "call.initial_state[n : n + 1]", "call.initial_state[0:1]", "chunked, packed"),
    Bug("chunked: the state is handed on in bfloat16", f"{RULE}.chunked:compute",
        "outputs.append(o)", "outputs.append(o); S = S.bfloat16().to(dtype)", "chunked, carry"),
    Bug("chunked: the inverse is a power series", f"{RULE}.chunked:Solve.forward",
        "T = triangular_inverse(L)",
        "power, T = -L, torch.eye(L.shape[-1], dtype=L.dtype) - L\n    for _ in range(5):\n"
        "        power = power @ power; T = T + T @ power", "chunked, equal keys"),
    Bug("chunked: decays are masked after exp", f"{RULE}.chunked:decays",
        "return sums.to(dtype).exp().tril()", "b = g.cumsum(-1).to(dtype)\n"
        "    return (b[..., :, None] - b[..., None, :]).exp() * torch.ones_like(sums, "
        "dtype=dtype).tril()",
        "chunked, strong decay"),
    Bug("chunked: dg is a difference of large sums", f"{RULE}.chunked:decays",
        "behind = pad(g[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)",
        "b = g.to(dtype).cumsum(-1); behind = b[..., -1:] - b", "chunked, strong decay"),
    Bug("chunked: decays are differences of float32 sums", f"{RULE}.chunked:decays",
        "return sums.to(dtype).exp().tril()", "b = g.to(dtype).cumsum(-1)\n"
        "    return (b[..., :, None] - b[..., None, :]).tril().exp().tril()", "chunked, wide gates"),
    Bug("gates: sigmoid of beta in bfloat16", f"{RULE}.contract:write_strength",
        "_full(z).sigmoid()", "z.bfloat16().sigmoid().to(_full(z).dtype)", "gates"),
    Bug("gates: no bias", f"{RULE}.contract:log_decay",
        "x = a if bias is None else a + bias", "x = a", "gates"),
    Bug("gates: a tensor's last tokens are computed one by one", f"{RULE}.contract:_in_whole_vectors",
        "-len(rows) % VECTORS", "0", "gates' bits"),
    Bug("gates: threads divide what is left of a vector", f"{RULE}.contract:_in_whole_vectors",
        "whole.split(size)", "whole.split(size - 1)", "gates' bits"),
    Bug("states: a position has the next sequence's state", f"{RULE}.states:compute_states",
        "cu_seqlens[1:] < last", "cu_seqlens[:-1] < last", "states"),
    Bug("states: every piece begins with the first state", f"{RULE}.states:compute_states",
        "replace(piece, initial_state=S)", "piece", "states"),
    Bug("states: gradients of short parameters are rounded once a piece", f"{RULE}:run",
        "call = _widen_parameters(call)", "pass", "short parameters"),
    Bug("bounds: a CPU's are those of a call before", f"{RULE}.once:_keeps",
        'x.device.type != "cpu"', "True", "bounds written anew"),
    Bug("projections: how they are computed depends on the batch", "models.layers:_can_join",
        "not _is_short(x.shape[-2])", "x[..., 0].numel() >= 64", "rows of a batch"),
    Bug("replaced layers: a subclass computes what its class does", UNTOUCHED,
        "forward = forwards.get(type(m))",
        "forward = next((f for kind, f in forwards.items() if isinstance(m, kind)), None)",
        "replaced layers, subclass's call"),
    Bug("replaced layers: a class computes what it did", UNTOUCHED,
        "or forward is not type(m).forward ", "", "replaced layers, class"),
    Bug("replaced layers: a module has the forward of its class", UNTOUCHED,
        ' or "forward" in vars(m)', "", "replaced layers, own forward"),
    Bug("replaced layers: hooks are not called", UNTOUCHED,
        "m._forward_hooks or ", "", "replaced layers, hook"),
    Bug("replaced layers: hooks before a call are not called", UNTOUCHED,
        "m._forward_pre_hooks or ", "", "replaced layers, pre-hook"),
    Bug("replaced layers: hooks of gradients are not called", UNTOUCHED,
        "m._backward_hooks or ", "", "replaced layers, backward hook"),
    Bug("replaced layers: hooks before gradients are not called", UNTOUCHED,
        " or m._backward_pre_hooks", "", "replaced layers, backward pre-hook"),
    Bug("replaced layers: hooks of all modules are not called", UNTOUCHED,
        " or _has_any_global_hook()", "", "replaced layers, global hook"),
    Bug("replaced layers: a bias is left out", "models.layers:multiplies",
        " and m.bias is None", "", "replaced layers, bias"),
    Bug("replaced layers: every weight can be put beside others", "models.layers:is_linear",
        "return type(m.weight) in (Tensor, nn.Parameter)", "return True", "replaced layers, stored"),
    Bug("replaced layers: inputs are rounded to stored integers", "models.layers:in_dtype_of",
        "dtype.is_floating_point and ", "", "replaced layers, int32"),
    Bug("replaced layers: inputs are rounded to stored 8-bit numbers", "models.layers:in_dtype_of",
        " and dtype.itemsize > 1", "", "replaced layers, float8"),
    Bug("replaced layers: a loss reads the readout's weight", f"{READOUT}:DeltaForCausalLM._cross_entropy",
        "not multiplies(self.lm_head)", "not isinstance(self.lm_head, torch.nn.Linear)",
        "replaced layers, readout"),
    Bug("replaced layers: a new readout's rows are all that is taken",
        f"{READOUT}:DeltaForCausalLM.set_output_embeddings",
        "or multiplies(new_embeddings)", "or True", "replaced layers, new readout"),
    Bug("replaced layers: a sum's norm is never called", "models.backbone:Block.forward",
        " and is_untouched(self.mlp_norm, NORM_FORWARDS)", "", "replaced layers, norm"),
    Bug("replaced layers: a kernel computes a convolution that was replaced",
        "models.gated_deltanet:GatedDeltaNet._find_kernel",
        "(self.conv, self.o_norm)", "(self.o_norm,)", "replaced layers, convolution"),
    Bug("replaced layers: a kernel computes a norm that was replaced",
        "models.gated_deltanet:GatedDeltaNet._find_kernel",
        "(self.conv, self.o_norm)", "(self.conv,)", "replaced layers, norm after the readout"),
    Bug("gates: softplus in float64 is the identity above 20", f"{RULE}.contract:log_decay",
        "threshold=40.0", "threshold=20.0", "gates in float64"),
    Bug("judge: a sigmoid's derivative of 1 - s", f"{RULE}.recurrent:_gradients_of_gates",
        "torch.sigmoid(z) * torch.sigmoid(-z)", "torch.sigmoid(z)", "gates"),
    Bug("operation: the default scale is 1 / K", f"{RULE}:scale_of",
        "float(q.shape[-1]) ** -0.5", "float(q.shape[-1]) ** -1.0", "chunked"),
    Bug("operation: the final state's gradient is lost", "backends.operator:Operator.differentiate",
        "function(*douts, call, saved)", "function(*[dy if i == 0 else None for i, dy in enumerate(douts)], "
        "call, saved)", "chunked"),
    Bug("operation: dk and dv change places", "backends.operator:Operator.spread",
        "for i in self.places]", "for i in (0, 2, 1, *self.places[3:])]", "chunked"),
    Bug("triton: the first state's carry is not corrected", f"{TRITON_REVERSE}:reverse_scan_kernel",
        "(b_initial - b_S) * b_first", "(b_S - b_S) * b_first", "triton's carry"),
    Bug("triton: the first state's gradient is taken as rounded", f"{TRITON_REVERSE}:reverse_scan_kernel",
        "b_lost += b_initial * tl.load(", "b_lost += 0 * b_initial * tl.load(", "triton's carry"),
    Bug("triton: keys do not erase the state's gradient", f"{TRITON_REVERSE}:reverse_scan_kernel",
        "round_to(-b_dY, ", "round_to(0 * b_dY, ", "triton"),
    Bug("triton: dbeta without the state", f"{TRITON_BACK}:gradients_kernel",
        "b_dbeta -= b_kYS", "b_dbeta -= 0 * b_kYS", "triton"),
    Bug("triton: dbeta is not divided by beta", f"{TRITON_BACK}:gradients_kernel",
        "b_written / b_beta", "b_written", "triton"),
    Bug("triton: dg without the state carried through", f"{TRITON_BACK}:gradients_kernel",
        "b_dg += tl.exp2(b_last) * b_carry", "b_dg += 0 * b_carry", "triton"),
    Bug("triton: dg with a token's own write", f"{TRITON_BACK}:gradients_kernel",
        "b_dg += tl.sum(tl.where(strict, b_writes", "b_dg += tl.sum(tl.where(lower, b_writes", "triton"),
    Bug("triton: decays of the inverse are left out", "triton_kernels.gated_delta_rule_fwd:prepare_kernel",
        "b_L = tl.where(strict, b_L, 0.0)", "b_L = tl.where(strict, b_L / b_D, 0.0)", "triton"),
    Bug("triton: dY is refined away from its solution",
        "triton_kernels.gated_delta_rule_refine:refine_kernel",
        "b_dY - multiply(b_X", "b_dY + multiply(b_X", "triton, equal keys"),
    Bug("triton: a tile of the convolution keeps its first tokens", f"{TRITON_CONVOLUTION}:forward_kernel",
        "before + (b_x[BT + n],)", "before + (b_x[n],)", "triton's convolution"),
    Bug("triton: dx without the tile behind", f"{TRITON_CONVOLUTION}:backward_kernel",
        "behind + (dz[n],)", "behind + (0 * dz[n],)", "triton's convolution"),
    Bug("nki: dg carries the first 128 of K", f"{NKI_BACK}:sum_decay_gradient",
        "for part in range(len(parts)):", "for part in range(1):", "nki, K = 256"),
    Bug("nki: dg without what tokens read from the state", f"{NKI_BACK}:multiply_terms",
        "add(reads_sb, dots_sb[:, :, 0], dots_sb[:, :, 1])",
        "nisa.memset(dst=reads_sb, value=0.0)", "nki"),
    Bug("nki: dbeta is multiplied by beta, not divided", f"{NKI_BACK}:compute_writes",
        "U_ps, chunk.inverse_beta", "U_ps, chunk.value_scale", "nki"),
    Bug("nki: dg counts a token's own write", f"{NKI_BACK}:sum_decay_gradient",
        'table["strict_upper"], chunk.writes', 'table["lower"], chunk.writes', "nki"),
    Bug("nki: every value head reads the first one's state in dq", f"{NKI_BACK}:read_states",
        "chunk.S_t, lane, lane)", "chunk.S_t, lane, 0)", "nki"),
    Bug("nki: the layer's convolution reads no prefix", f"{NKI_LAYER}.fwd:open_window",
        'call["prefix"], call["continued"]', 'call["prefix"], False', "nki, layer"),
    Bug("nki: the layer keeps q for k", f"{NKI_LAYER}.fwd:load_layer",
        "store_keys(q, k,", "store_keys(k, q,", "nki, layer's gradients"),
    Bug("nki: what leaves a chunk of the layer is lost", f"{NKI_LAYER}.convolution:multiply_taps",
        "own.index + 1 < len(stream.own)", "False", "nki, layer's gradients"),
    Bug("nki: what taps leave lies at the same place", f"{NKI_LAYER}.convolution:find_row",
        "j * (W - 1) - j * (j - 1) // 2", "0", "nki, layer's gradients"),
    Bug("nki: every sequence of a call has the first one's dx", f"{NKI_LAYER}.convolution:store_channels",
        'dst=dst[n, start', "dst=dst[0 * n, start", "nki, layer's sequences"),
    Bug("nki: all sequences of a call have one's state", "nki_kernels.gated_delta_rule_fwd:view_state",
        'bundle["n"] * HV + ', "", "nki, layer's sequences"),
    Bug("nki: a packed token gives to the sequence before", f"{NKI_LAYER}.convolution:multiply_taps",
        'if call["packed"]:', "if False:", "nki, layer's gradients"),
    Bug("layers: a packed token sees the sequence before", f"{LAYERS}:_convolve",
        "position >= W - 1 - j", "position >= W - 2 - j", "convolution"),
    Bug("layers: dx of the norm keeps its part along x", f"{LAYERS}:_norm",
        "x.square().mean(", "x.detach().square().mean(", "norm"),
    Bug("layers: a gate's sigmoid is its SiLU", f"{LAYERS}:_gated_norm",
        "z.sigmoid() if", "F.silu(z) if", "norm's sigmoid"),
    Bug("layers: the sum's own gradient is lost", f"{LAYERS}:add_rms_norm_backward",
        "(dtotal + dx).to(total.dtype)", "dx.to(total.dtype)", "sum"),
    Bug("layers: ignored targets have gradients", f"{LAYERS}:_softmax_",
        "log_p.exp_().mul_(keep)", "log_p.exp_()", "cross-entropy"),
    Bug("delta residual: dk along k is not removed", f"{RESIDUAL}.pytorch:backward",
        "dbeta - (p * s).sum(-1)", "dbeta", "residual"),
    Bug("delta residual: dx is the gradient of X'", f"{RESIDUAL}.pytorch:backward",
        "value=-1", "value=0", "residual"),
    Bug("muP: initial values do not shrink with width", "models.parameters:initial_std",
        "tag.ratio(config) ** power", "1.0", "muP"),
    Bug("muP: rates do not shrink with width", "models.parameters:scaled_parameters",
        "factor = m ** rule.lr(optimizer)", "factor = 1.0", "muP"),
    Bug("muP: independent weight decay follows the rate", "models.parameters:scaled_parameters",
        "decay / factor if independent_weight_decay else decay", "decay", "muP"),
    Bug("muP: the logits are not scaled", "models.config:DeltaConfig.logit_scale",
        "[role].multiplier", "[role].init_std", "muP"),
    Bug("muP: base multipliers of rates are forgotten", "models.parameters:scaled_parameters",
        "(rates or {}).get(tag.role, 1.0)", "1.0", "muP"),
    Bug("muP: a named convolution takes m from its taps", "models.ecosystem.layouts:find_layout",
        "return Layout(inputs=1, outputs=0)", "return MATRIX", "named roles"),
    Bug("muP: Muon's factor is that of any adjustment", "models.ecosystem.widths:muon_factor",
        'original = adjust_lr_fn == "original"', "original = True", "Muon's groups"),
    Bug("muP: a tied readout is not scaled", "models.ecosystem.roles:TiedReadout.forward",
        "x * self.multiplier", "x * 1.0", "tied readout"),
    Bug("muP: one law of width is known", "models.ecosystem.widths:_law",
        "min((1.0, m**0.5)", "min((1.0, 1.0)", "initial sizes"),
    Bug("loss: labels are not shifted", f"{READOUT}:_next_tokens",
        "targets = labels.roll(-1, dims=1)", "targets = labels.clone()", "loss"),
    Bug("loss: the readout's multiplier is forgotten", f"{READOUT}:linear_cross_entropy",
        "hidden = hidden * multiplier", "hidden = hidden * 1.0", "loss"),
    Bug("models: padding decays and writes", "models.gated_deltanet:GatedDeltaNet._gate_inputs",
        "both = both.masked_fill(~sequences.real, CLOSED)", "both = both * 1.0", "padding"),
    Bug("kimi: decays have no bias", "models.gated_deltanet:GatedDeltaNet._options",
        '"dt_bias": self.dt_bias', '"dt_bias": 0 * self.dt_bias', "kimi"),
    Bug("kimi: the output's gate has no bias", f"{KIMI}._project",
        "apply_linear(g1, gate)", "apply_linear(g1, gate) - g1.bias", "kimi"),
    Bug("kimi: the output's gate is SiLU", f"{KIMI}._gate_output",
        'gate, "sigmoid"', 'gate, "swish"', "kimi"),
    Bug("kimi: heads lie inside of channels", f"{KIMI}._gate_inputs",
        "a.unflatten(-1, (-1, self.K))", "a.unflatten(-1, (self.K, -1)).mT", "kimi"),
    Bug("kimi: decays have no bound", f"{KIMI}._options", "self.bound}", "None}", "kimi"),
    Bug("kimi: a packed sequence only decays from the one before", f"{RULE}.contract:spread_places",
        "-torch.inf", "-5.0", "kimi, packed"),
    Bug("kimi: a packed softplus only decays from the one before", f"{RULE}.contract:spread_places",
        "min(FORGET", "min(5.0", "kimi, packed"),
    Bug("optimizer: every group has the run's rate", "train.run.optimizer:set_learning_rate",
        'lr * group["factor"]', "lr", "rates"),
    Bug("optimizer: warm-up begins a step early", "train.run.optimizer:learning_rate",
        "peak * finished / warmup", "peak * (finished + 1) / warmup", "rates"),
    Bug("data: ranks have the same samples", "train.data.loader:Loader.next_batch",
        "self._samples + self.rank * self.batch", "self._samples", "data order"),
    Bug("data: samples of other ranks come again", "train.data.loader:Loader.next_batch",
        "self.world * self.batch", "self.batch", "data order"),
    Bug("resume: data begins anew", "train.data.loader:Loader.load_state_dict",
        "self._samples = samples", "self._samples = 0", "data order"),
    Bug("agreement: two values are one", "train.parallel.agreement:require_same",
        "if len(groups) > 1", "if len(groups) > 2", "same run"),
    Bug("agreement: a path here is any name there", "train.parallel.agreement:require_same",
        "all(key in ranks", "any(key in ranks", "same run"),
    Bug("agreement: every key may name a path", "train.parallel.agreement:given",
        "OF_ONE_NODE & values.keys()", "values.keys()", "same run"),
    Bug("agreement: what is no key is not compared", "train.parallel.agreement:given",
        "{**values, **also}", "values", "same run"),
    Bug("agreement: who cannot train is not heard", "train.parallel.agreement:given",
        "failure and picklable(failure)", "None", "same run"),
    Bug("dropout: ranks have the same masks", "train.data.loader:Loader.noise",
        "first = self._samples + self.rank * self.batch", "first = self._samples", "data order"),
    Bug("resume: the CPU's generator goes on where it is", "train.checkpoints.contents:set_random_states",
        'torch.set_rng_state(states["cpu"])', 'states["cpu"]', "generator"),
    Bug("optimizer: the cosine ends where the run does", "train.run.optimizer:learning_rate",
        "config.schedule.decay_steps or config.steps", "config.steps", "decay steps"),
    Bug("models: streams before blocks keep padding to the left", "models.backbone:DeltaModel.hidden",
        "streams.append(x if padding is None else padding.restore(x))\n        x = block",
        "streams.append(x)\n        x = block", "hidden states"),
    Bug("models: the last stream keeps padding to the left", "models.backbone:DeltaModel.hidden",
        "streams.append(x if padding is None else padding.restore(x))\n    x = self.read",
        "streams.append(x)\n    x = self.read", "hidden states"),
    Bug("loss: a first sequence of one token predicts the next sequence", f"{READOUT}:_next_tokens",
        "ends >= 0", "ends > 0", "packed loss"),
    Bug("models: dt_bias is cast", "models.head_numbers:keep_numbers",
        "for name in NUMBERS)", "for name in NUMBERS[:1])", "casts"),
    Bug("patch: compiled flash attention takes several rows for one sequence each",
        "models.ecosystem.patching:_keep_apart", '"flash" in str(self.config._attn_implementation)', "False",
        "compiled flash attention"),
    Bug("patch: indexed attention reads packed sequences as one", "models.ecosystem.patching:_keep_apart",
        "refusal = NO_BOUNDS if indexed else", "refusal =", "indexed attention"),
    Bug("models: separate numbers have other names in files", "models.head_numbers:_name_as_before",
        'state[f"{prefix}{name}"] = state.pop(key)', "pass", "separate numbers"),
    Bug("models: a constant value does not grow with width", "models.residual:Value.forward",
        "self.constant * self.multiplier", "self.constant", "constant values"),
    Bug("cache: beams keep each other's embeddings", "models.cache:DeltaCache._all",
        "self.first, *self.memory", "*self.memory", "beams"),
    Bug("cache: beams keep each other's last streams", "models.cache:DeltaCache._all",
        "*self.memory, self.last", "*self.memory", "beams"),
    Bug("patch: only the first row tells whether rows are packed", "models.sequence:_mark",
        "begins[:, 1:].any()", "begins[:1, 1:].any()", "packed rows and a cache"),
    Bug("bounds: they begin anywhere", "models.sequence:_check_numbers",
        "bounds[0] != 0 or ", "", "bounds"),
    Bug("bounds: they end anywhere", "models.sequence:_check_numbers",
        " or bounds[-1] != tokens", "", "bounds"),
    Bug("bounds: they fall", "models.sequence:_check_numbers",
        "before > bound", "False", "bounds"),
    Bug("bounds: their numbers are not read", "models.sequence:check_bounds",
        "elif stand_ins.may_read(bounds):", "elif False:", "bounds"),
    Bug("bounds: a graph asserts nothing", "models.sequence:check_bounds",
        "assert_later(rises,", "str(", "bounds of a graph"),
    Bug("packing: only a place of 0 begins a sequence", "models.sequence:_begins",
        "if text is None or continues:", "if True:", "packing by steps"),
    Bug("packing: places of a cache's tokens begin sequences", "models.sequence:_begins",
        "if text is None or continues:", "if text is None:", "steps after a cache"),
    Bug("packing: padding that places leave out begins a sequence", "models.sequence:_begins",
        "text - text.gather(1, last.clamp(min=0)) != 1", "True", "steps around padding"),
    Bug("packing: a mask of blocks says nothing", "models.sequence:_blocks",
        "    return mask\n", "    return None\n", "masks of blocks"),
    Bug("packing: a mask may contradict the places", "models.sequence:_begins_of_blocks",
        "elif bool(across):", "elif False:", "masks that contradict"),
    Bug("patch: what is unpickled is not patched", f"{PATCHING}:_revive",
        "kind = patch.class_of(kind, _forward_for(kind, patch.backend))", "pass", "pickled models"),
    Bug("patch: a copy stays patched", f"{PATCHING}:Patch.class_of",
        'delattr(patched, "forward")', "None", "copied models"),
    Bug("patch: a process hands on no patch", f"{PATCHING}:Patch.replace",
        'self.set(owner, "__reduce_ex__", _reduce_patched(self))', "pass", "pickled from a process"),
    Bug("patch: a hook calls what it kept", f"{PATCHING}:Patch._replace_in_module",
        "_point(module, kind.forward, function)", "pass", "patched after an offload"),
    Bug("patch: undo leaves what a hook kept", f"{PATCHING}:Patch._replace_in_module",
        "_point(module, function, kind.forward)", "pass", "patched before an offload"),
    Bug("patch: a forward that others put there is passed by", f"{PATCHING}:Patch._replace_in_module",
        "is not kind.forward:", "is None and False:", "others' forward"),
    Bug("patch: numbers of a part of a layer are cast", "models.head_numbers:keep_numbers",
        "for m in layer.modules()", "for m in [layer]", "casts of a patched model"),
    Bug("patch: new layers of a process are in half precision", f"{PATCHING}:Patch.replace",
        'self.set(owner, "__init__", _widen_after(owner.__init__))', "pass", "casts of a process"),
    Bug("initial values: a module's are transformers' own",
        "models.backbone:DeltaPreTrainedModel._init_weights",
        "initialize_module(self, module)", "PreTrainedModel._init_weights(self, module)",
        "values module by module"),
    Bug("initial values: a tied readout draws the embedding again", "models.parameters:_owned_parameters",
        "if parameter not in seen:", "if True:", "values of a tied readout"),
    Bug("initial values: what has no elements is drawn", "models.parameters:_draw",
        "if parameter.numel() == 0:", "if False:", "values of no elements"),
    Bug("maps: they are a class of ours", "models.layers:make_linear",
        "made.__class__ = nn.Linear", "pass", "maps"),
    Bug("maps: tags are looked for at the map alone", "models.parameters:_tag_of",
        "for depth in reversed(range(len(parts))):", "for depth in (len(parts) - 1,):", "swapped maps"),
    Bug("maps: a wrapper hides a tag", "models.parameters:_tag_of",
        " if part not in WRAPPED", "", "wrapped maps"),
    Bug("lengths: a graph's choice is one of a length", "models.layers:_is_short",
        "if not torch.compiler.is_compiling():", "if True:", "lengths"),
    Bug("lengths: limits are asked where no backend is offered", "backends.dispatch:is_offered",
        "return any(", "return True or any(", "lengths"),
    Bug("lengths: limits of a backend that is offered are not asked", "backends.dispatch:is_offered",
        "return any(", "return False and any(", "lengths of a backend"),
    Bug("bounds: places within a sequence start again", "models.sequence:_check_agreement",
        "told &= ~begins &", "told &= False &", "contradicting places"),
    Bug("bounds: padding contradicts", "models.sequence:_check_agreement",
        "(text == 0) &", "False &", "contradicting places"),
    Bug("patch: models that were offloaded before are passed by", f"{PATCHING}:Patch.reach_living",
        "self._point_living(ours, self._plain, ours)", "pass", "offloaded before"),
    Bug("notes: Kimi Delta Attention names the gated rule's kernel", f"{RULE}.chunked:note",
        'op.startswith("kimi_delta_attention")', "False", "notes"),
    Bug("files: a link is followed", "models.ecosystem.files:write_text",
        "with replaced(path) as beside:", "for beside in [path]:", "files"),
    Bug("weights: tensors of no elements are in memory", "models.head_numbers:is_in_memory",
        " and x.numel() > 0", "", "no elements"),
    # second turns of loops, tails, seams, groups, and what one dtype alone computes
    Bug("chunked: a packed sequence begins a token late", f"{RULE}.chunked:compute_packed",
        "slice(bounds[n], bounds[n + 1])", "slice(max(0, bounds[n] - 1), max(0, bounds[n + 1] - 1))",
        "chunked, packed"),
    Bug("chunked: float64 decays from a token to itself", f"{RULE}.chunked:decays",
        ".tril(-1).cumsum(-2)", ".tril().cumsum(-2)", "chunked, float64"),
    Bug("chunked: a write decays by its own token's decay", f"{RULE}.chunked:decays",
        "g[..., 1:], (0, 1)", "g, (0, 0)", "chunked"),
    Bug("chunked: the final state's gradient is lost", f"{RULE}.chunked:backward",
        "if dy is not None", "if y is outputs[0]", "chunked"),
    Bug("chunked: decoded value heads take the keys in turns", f"{RULE}.chunked:step",
        "repeat_interleave(groups, 1)", "repeat(1, groups, 1)", "chunked's decoding"),
    Bug("chunked: a decoded token's state does not decay", f"{RULE}.chunked:step",
        "(decay if call.has_channels else decay[..., None])", "1", "chunked's decoding"),
    Bug("triton: a chain of segments reads the first 32 of K", TRITON_SEGMENTS,
        "range(0, tl.cdiv(K, BK))", "range(0, 1)", "triton's segments"),
    Bug("triton: a chain of segments leaves out what K has beyond whole tiles", TRITON_SEGMENTS,
        "tl.cdiv(K, BK)", "K // BK", "triton's segments"),
    Bug("triton: the chain of gradients is not transposed", TRITON_SEGMENTS,
        "o_k[:, None] + o_i[None, :] * K if REVERSE else ", "", "triton's segments"),
    Bug("triton: the chain of gradients begins with the first segment", TRITON_SEGMENTS,
        "count - 1 - r if REVERSE else r", "r", "triton's segments"),
    Bug("triton: dq reads the last tile of V alone", f"{TRITON_BACK}:gradients_kernel",
        "m_v[None, :], other=0.0)\n            b_dq = accumulate(b_dq,",
        "m_v[None, :], other=0.0)\n            b_dq = accumulate(0 * b_dq,", "triton's wide heads"),
    Bug("triton: dg's carry is of the last tile of V alone", f"{TRITON_BACK}:gradients_kernel",
        "b_SdS += ", "b_SdS = ", "triton's wide heads"),
    Bug("triton: writes of a first tile of V stand for all", f"{TRITON_BACK}:gradients_kernel",
        "(tile * TILES + i_tile) * C", "(tile * TILES) * C", "triton's wide heads"),
    Bug("triton: the carry of a first tile of V stands for all", f"{TRITON_BACK}:gradients_kernel",
        "carry + tile * TILES + i_tile", "carry + tile * TILES", "triton's carry"),
    Bug("triton: a second tile of V stores its carry over the first one's",
        f"{TRITON_REVERSE}:reverse_scan_kernel",
        "carry + tile * NV + i_v", "carry + tile * NV", "triton's carry"),
    Bug("triton: only the first tile of V is refined", TRITON_REFINE,
        "o_v = i_v * BV + ", "o_v = ", "triton's refined heads"),
    Bug("triton: a second group of heads refines those of the first", TRITON_REFINE,
        "i_h = first + i", "i_h = i", "triton's refined heads"),
    Bug("triton: a sum over value heads begins with the second", f"{TRITON_BACK}:sum_heads_kernel",
        "range(0, HV // H)", "range(1, HV // H)", "triton's pairs"),
    Bug("triton: states are computed again without the first one", f"{RULE}.triton_adapter:scan_backward",
        "*prepared, initial_state, o=None", "*prepared, None, o=None", "triton's states, not kept"),
    Bug("triton: dU keeps float16's unit", f"{TRITON_REVERSE}:reverse_scan_kernel",
        "b_dU *= unit", "b_dU *= 1.0", "triton, float16"),
    Bug("triton: values are not in float16's unit of states",
        "triton_kernels.gated_delta_rule_fwd:scan_kernel",
        "b_beta *= invert_power(state_unit)", "b_beta *= 1.0", "triton, float16's states"),
    Bug("triton: a state's gradient is not in float16's unit", f"{TRITON_REVERSE}:reverse_scan_kernel",
        "b_dS *= inverse_unit", "b_dS *= 1.0", "triton, float16's states"),
    Bug("triton: dv is left in the unit of gradients", f"{TRITON_BACK}:gradients_kernel",
        "b_strength = b_beta * gradient_unit", "b_strength = b_beta", "triton, float16's states"),
    Bug("triton: dbeta by dY and v is not in the unit of states", f"{TRITON_BACK}:gradients_kernel",
        "b_dbeta *= invert_power(state_unit)", "b_dbeta *= 1.0", "triton, float16's states"),
    Bug("triton: a second tile of the vocabulary keeps the first one's maximum",
        "triton_kernels.cross_entropy:softmax_kernel",
        "b_sum = b_sum * tl.exp(b_max - b_base)", "b_sum = b_sum", "triton's vocabulary"),
    Bug("triton: a tile of rows forgets dw of the one before", "triton_kernels.rms_norm:backward_kernel",
        "b_dw += ", "b_dw = ", "triton's many rows"),
    Bug("triton: a gate's sigmoid is its SiLU", "triton_kernels.rms_norm:forward_kernel",
        "else tl.sigmoid(b_z)", "else b_z * tl.sigmoid(b_z)", "triton's sigmoid norm"),
    Bug("triton: a sigmoid rises as if it had no end", "triton_kernels.rms_norm:backward_kernel",
        "b_s * tl.sigmoid(-b_z)", "b_s", "triton's sigmoid norm"),
    Bug("triton: behind a sigmoid, dx is that behind SiLU", "triton_kernels.rms_norm:backward_kernel",
        "b_z * b_s if SILU else b_s", "b_z * b_s", "triton's sigmoid norm"),
    Bug("triton: the sum's own gradient is lost", "triton_kernels.rms_norm:backward_kernel",
        "b_dx += tl.load(dtotal", "b_dx += 0 * tl.load(dtotal", "triton's sum"),
    Bug("triton: ignored targets have gradients", "triton_kernels.cross_entropy:softmax_kernel",
        "(o_v == i_goal, 1.0, 0.0)) * counts", "(o_v == i_goal, 1.0, 0.0))", "triton's ignored words"),
    Bug("triton: a packed token sees the sequence before", f"{TRITON_CONVOLUTION}:_read",
        "place >= back, ", "place >= back - 1, ", "triton's convolution"),
    Bug("triton: dtaps of a span are those before its last tile", f"{TRITON_CONVOLUTION}:backward_kernel",
        "dw[j], mask", "sums[j], mask", "triton's spans"),
    Bug("triton: a residual is projected on its last block of D",
        "triton_kernels.delta_residual:forward_kernel", "b_p += ", "b_p = ", "triton's residual"),
    Bug("triton: a key has the length of its last block of D",
        "triton_kernels.delta_residual:forward_kernel", "b_kk += ", "b_kk = ", "triton's residual"),
    Bug("triton: a residual's gradient is projected on its last block of D",
        "triton_kernels.delta_residual:backward_kernel", "b_s += ", "b_s = ", "triton's residual"),
    Bug("triton: every tile of a decoded token's values is the first one",
        "triton_kernels.gated_delta_rule_step:step_kernel", "o_v = i_v * BV + ", "o_v = ",
        "triton's decoding"),
    Bug("triton: a decoded token reads the first key head",
        "triton_kernels.gated_delta_rule_step:step_kernel", "i_hk = i_h // (HV // H)", "i_hk = 0",
        "triton's decoding"),
    Bug("nki: a decoded token writes the first line of a partition", f"{NKI_STEP}:update_states",
        "begin = i * heads * K + j", "begin = i * heads * K", "nki, decoding"),
    Bug("nki: a second group of decoded heads is stored over the first", f"{NKI_STEP}:gated_delta_rule_step",
        "new_lines, first * parts, heads", "new_lines, 0, heads", "nki, decoding"),
    Bug("nki: a state's second 128 of K gets the first ones' writes", "nki_kernels.chunk:decay_and_add",
        "x_sb[:, lane, start:stop]", "x_sb[:, lane, 0:stop - start]", "nki, K = 256"),
    Bug("nki: dx of a second block of words replaces the first one's", "nki_kernels.cross_entropy:add_dx",
        "if first:", "if True:", "nki, words"),
    Bug("nki: dW of later tokens replaces the earlier", "nki_kernels.cross_entropy:differentiate_tokens",
        "columns, first == 0)", "columns, True)", "nki, tokens"),
    Bug("nki: later tokens have the first ones' targets", "nki_kernels.cross_entropy:differentiate_tokens",
        "load(goal[first + start : first + stop, :]", "load(goal[start:stop, :]", "nki, tokens"),
    Bug("nki: long sequences have as many lanes as short ones", "nki_kernels.plan:choose_layer",
        "T > LONG and", "False and", "nki, long sequences"),
    Bug("lazy gates: the slope of softplus is softplus", f"{RULE}.contract:LazyDecay.backward",
        "rate * x.sigmoid()", "decay", "lazy gates"),
    Bug("lazy gates: nothing reaches dt_bias", f"{RULE}.contract:LazyDecay.backward",
        "dbias = dx", "dbias = (0 * dx)", "lazy gates"),
    Bug("lazy products: dW is that of a square W", "models.layers:LazyProducts.backward",
        "torch.mm(dy.t(), rows)", "torch.mm(rows.t(), dy).reshape(-1, rows.shape[1])", "lazy products"),
    Bug("lazy products: dx is that of the first", "models.layers:LazyProducts.backward",
        "sum(others, dx.to(ctx.dtype))", "dx.to(ctx.dtype)", "lazy products"),
    Bug("lazy rows: also where a study looks", "models.backbone:Block.takes_rows",
        "and not watched", "", "lazy rows"),
    Bug("lazy rows: they are one sequence", "models.gated_deltanet:in_sequences",
        "y.view(-1, sequences.position.shape[-1], y.shape[-1])", "y[None]", "lazy rows"),
    Bug("micro-batches: the last gradient is the sum", "models.layers:LazyProducts.backward",
        "if key in sums:", "if False:", "micro-batches"),
    Bug("micro-batches: what is no leaf is kept", "models.layers:LazyProducts.forward",
        "if all(W.is_leaf for W in weights) else None", "", "micro-batches"),
    Bug("nki: ignored targets count", "nki_kernels.cross_entropy:silence",
        "op0=nl.less, operand0=0.0", "op0=nl.less, operand0=-2.0", "nki's ignored words"),
    Bug("nki: resets reach the kernels as they are", f"{RULE}.nki_adapter:_prepare",
        "g = call.g.clamp(min=RESET)", "g = call.g", "nki, resets"),
    Bug("nki: a state leaks into the next packed sequence", f"{RULE}.nki_adapter:_prepare",
        "call.cu_seqlens), RESET)", "call.cu_seqlens), -1.0)", "nki, packed"),
    Bug("nki: dg without erasures", f"{NKI_BACK}:sum_crossing_pairs",
        'add_transposed(sums_ps, chunk.erasures_t[:, lane, :], table["strict_upper"], True)', "pass", "nki"),
    Bug("nki: dk without what goes through the norm", f"{NKI_BACK}:finish_key_gradients",
        "if l2norm:", "if l2norm and side == 0:", "nki"),
    Bug("nki: a token erases itself", f"{NKI_BACK}:compute_pair_gradients",
        "weighted_Z_t, 1, 1)", "weighted_Z_t, 1, 0)", "nki, ragged"),
    Bug("nki: every decoded value head reads the first key", f"{NKI_STEP}:load_key_rows",
        "row = (start + i) // shared", "row = 0", "nki, decoding"),
    Bug("nki: decoded keys are as long as rsqrt's scale leaves them", f"{NKI_STEP}:normalize",
        'factor * norm["scale"]', "factor", "nki, decoding, normalized"),
    Bug("nki: decoded states leak into each other", f"{NKI_STEP}:build_block_diagonal",
        "cmp_op=nl.equal", "cmp_op=nl.greater_equal", "nki, decoding"),
    Bug("nki: packed sequences see their neighbors", f"{NKI_CONVOLUTION}:build_masks",
        "if not packed:", "if True:", "nki's convolution"),
    Bug("nki: taps of the convolution are reversed", f"{NKI_CONVOLUTION}:slice_window",
        "slices.append(window_sb[:, j : j + count])",
        "slices.append(window_sb[:, W - 1 - j : W - 1 - j + count])", "nki's convolution"),
    Bug("nki: a cell continues the beginning of the one before", f"{NKI_CONVOLUTION}:copy_tail",
        "before[:, columns - count : columns]", "before[:, 0:count]", "nki's convolution"),
    Bug("nki: the prefix has no gradient", "nki_kernels.tiles:count_prefix_rows",
        "W - 1 if continued else 0", "0", "nki's convolution"),
    Bug("nki: dx keeps its part along x", "nki_kernels.gated_rms_norm:project",
        "operand0=-1.0 / nh_sb.shape[2]", "operand0=0.0", "nki's norm"),
    Bug("nki: a sigmoid rises as if it had no end", "backends.layers.nki_adapter:gated_rms_norm_backward",
        "opened * (-z).sigmoid()", "opened", "nki's sigmoid norm"),
    Bug("nki: rows of a partition have the norm of its first", "nki_kernels.gated_rms_norm:scale_rows",
        "r_sb[:, i : i + 1]", "r_sb[:, 0:1]", "nki's norm"),
    Bug("nki: a projection sums over the last block alone", "nki_kernels.delta_residual:add_projection",
        "if d0 > 0:", "if d0 < 0:", "nki's residual"),
    Bug("nki: X s is added to dk", "nki_kernels.delta_residual:build_diagonal",
        "x_sb, sign)", "x_sb, 1.0)", "nki's residual"),
    Bug("nki: dk keeps its part along k", "nki_kernels.delta_residual:delta_residual_bwd",
        "data=k_sb[:, d0 + low : d0 + high], op0=nl.multiply, operand0=along_sb",
        "data=k_sb[:, d0 + low : d0 + high], op0=nl.multiply, operand0=0.0", "nki's residual"),
    Bug("nki: dX of a second of two blocks is computed from the first one",
        "nki_kernels.delta_residual:delta_residual_bwd",
        "resident[0]\n            if len(resident) > 1:", "resident[0]\n            if len(resident) > 2:",
        "nki's residual in two blocks"),
    Bug("nki: dx of a wide row is that of the first tile", "nki_kernels.gated_rms_norm:gated_rms_norm_bwd",
        "store_results(dx, rest[i], r[i], cuts[i])", "store_results(dx, rest[0], r[0], cuts[i])",
        "nki's norm"),
    Bug("nki: dstate is enlarged with a tiny scale", f"{RULE}.nki_adapter:backward",
        "dstate, replace(call, scale=1.0), saved)", "dstate / power, replace(call, scale=1.0), saved)",
        "nki, tiny scale"),
    Bug("simulator: a moving tile may hold anything", f"{SIMULATED_PRODUCTS}:_check_onezero",
        "if declared and", 'if declared and role == "stationary" and', "simulator's products"),
    Bug("simulator: products add to what another engine wrote in part", f"{SIMULATED_PRODUCTS}:_accumulates",
        "if BY_OTHER in writers and", "if writers == {BY_OTHER} and", "simulator's products"),
    Bug("simulator: a release has the order of the next", "nki_simulator.core.releases:orders_of",
        "release <= last", "release < last", "simulator's releases"),
    Bug("simulator: what repeats counts as all", "nki_simulator.core.memory:Storage.mark",
        " and 0 not in view.strides", "", "simulator's releases"),
    Bug("simulator: each block of rows goes to the first", "nki_simulator.language:load_transpose2d",
        "out[:, start : start + block.shape[0]]", "out[:, : block.shape[0]]", "simulator's releases"),
    Bug("simulator: GpSimd multiplies tiles on Trn1", "nki_simulator.core.machine:Machine.refuse_on_chip",
        "if rule in self.chip_rules:", 'if rule in self.chip_rules and rule != "gpsimd products":',
        "simulator's chip"),
    Bug("simulator: sums share a PSUM tensor", "nki_simulator.core.machine:Machine.follow_product",
        "own[3] == 2 and", "own[3] == 99 and", "simulator's chip"),
    Bug("simulator: a sum goes on when it was read", "nki_simulator.core.machine:Machine.follow_product",
        "own[1] < sums.last_read < index", "own[1] > sums.last_read > index", "simulator's chip"),
    Bug("simulator: a sum begins again nowhere", "nki_simulator.core.chip:Sums.begin_again",
        "if not overlap(own[0], place)", "if True", "simulator's chip"),
    Bug("simulator: an access has any number of dimensions",
        "nki_simulator.core.instruction:Instruction._count_dimensions",
        "wide > 3 and", "wide > 99 and", "simulator's chip"),
    Bug("simulator: a copy takes a tile as bias", "nki_simulator.isa.activation:_activate",
        'function.name == "copy" and', 'function.name == "exp" and', "simulator's chip"),
    Bug("simulator: DMA transposes within SBUF", "nki_simulator.core.machine:Machine.refuse_on_chip",
        "if rule in self.chip_rules:", 'if rule in self.chip_rules - {"transposition within SBUF"}:',
        "simulator's chip"),
    Bug("simulator: array tiles are as small as one likes",
        "nki_simulator.core.machine:Machine.refuse_on_chip",
        "if rule in self.chip_rules:", 'if rule in self.chip_rules - {"tiles of 32 columns"}:',
        "simulator's chip"),
    Bug("simulator: a sum of a row is NumPy's", "nki_simulator.core.operators:add_in_order",
        "np.add.accumulate(values, axis=-1, dtype=values.dtype)[..., -1]",
        "values.sum(axis=-1, dtype=values.dtype)", "simulator's numbers"),
    Bug("simulator: measured errors have one sign", "nki_simulator.core.function_errors:err",
        "1 + sign * LARGEST", "1 + LARGEST", "simulator's numbers"),
    Bug("simulator: exp has no least argument", "nki_simulator.core.function_errors:err",
        'function == "exp"', 'function == "none"', "simulator's numbers"),
    Bug("simulator: waiting is free", "nki_simulator.cost:Costs.wait",
        "waits.get(engine, 0.0)", "0.0", "simulator's costs"),
    Bug("simulator: engines wait for slices", "nki_simulator.cost:list_dependencies",
        "for users in (writers[key], readers[key]):", "for users in ():", "simulator's costs"),
    Bug("simulator: reads wait for slices", "nki_simulator.cost:list_dependencies",
        "needs.update(j for other, j in writers[key].items() if other != queue)", "pass",
        "simulator's costs"),
    Bug("simulator: a tile in PSUM costs as one in SBUF", "nki_simulator.cost:instruction_cost",
        "any(o.buffer is PSUM for o in record.reads)", "False", "simulator's costs"),
    Bug("simulator: few rows are cheap", "nki_simulator.cost:Costs.product",
        "1 + self.tensor_short * (128 - rows)", "1 - self.tensor_short * (128 - rows)",
        "simulator's costs"),
    Bug("operation: values come first only of a state that is given", f"{RULE}:run",
        "if v_first else", "if v_first and call.initial_state is not None else", "values first"),
    Bug("operation: make_fx sees what a kernel leaves behind", "backends.stand_ins:is_recorded",
        "any(map(torch._C._get_dispatch_mode, MODES))", "False", "recorded calls"),
    Bug("operation: make_fx before dispatch is forgotten", "backends.stand_ins:is_recorded",
        "torch._C._dispatch_tls_is_dispatch_key_included(PRE_DISPATCH)", "False", "calls recorded early"),
    Bug("operation: a backward pass of its own is not recorded", "backends.operator:_Eager.backward",
        "operator._is_eager(douts, ctx.backend)", "True", "recorded gradients"),
    Bug("operation: bounds in a graph are those of a call before", f"{RULE}:bounds_of",
        "not stand_ins.may_read(cu_seqlens)", "False", "recorded bounds"),
    Bug("operation: slots of a graph are looked at", "backends.stand_ins:may_read",
        "torch._C._is_tracing() or not is_recorded()", "True", "recorded pools"),
    Bug("operation: a class with its own dispatch is taken for memory", "backends.stand_ins:is_plain",
        "any(map(has_own_dispatch, present))", "False", "plain tensors"),
    Bug("operation: a fake tensor is taken for a wrapper", "backends.stand_ins:find_wrapper",
        " and type(x) is not FakeTensor", "", "plain tensors"),
    Bug("operation: a lazy sign is lost", "backends.stand_ins:is_plain",
        "True not in map(Tensor.is_neg, present)", "True", "plain tensors"),
    Bug("operation: a DTensor is left to torch", "backends.operator:Operator._refuse_divided",
        "divided is not None", "False", "DTensors"),
    Bug("operation: gradients of many at a time reach a kernel", "backends.stand_ins:is_batched",
        "is_legacy_batchedtensor(x)", "False", "gradients of many"),
    Bug("operation: tangents are dropped", "backends.stand_ins:has_tangents",
        "forward_ad._current_level < 0", "True", "tangents"),
    Bug("nki: keys are as long as rsqrt's scale leaves them", "nki_kernels.tiles:invert_norms",
        'operand0=norm["scale"]', "operand0=1.0", "nki's residual"),
)
# fmt: on
BY_NAME = {bug.name: bug for bug in BUGS}


def function_of(bug: Bug) -> FunctionType:
    """Returns the function itself, below a decorator of Triton, the NKI simulator, or Python."""
    thing = _thing_of(bug)
    for hidden in ("fn", "function", "__func__", "fget"):
        thing = getattr(thing, hidden, thing)
    return thing


def _thing_of(bug: Bug) -> Any:
    module, _, name = bug.place.partition(":")
    package = "" if module.startswith("nki_simulator") else "delta_trn."
    return reduce(getattr, name.split("."), import_module(package + module))


def _in_any_layout(line: str) -> str:
    """Returns a pattern of code that matches it however a formatter breaks it into lines."""
    pattern, before = "", ""
    for token in re.findall(r"\w+|\s+|[^\w\s]", line):
        if token.isspace():
            before = " "
            continue
        words = pattern and pattern[-1].isalnum() | (pattern[-1] == "_") and token[0].isalnum()
        gap = r"\s+" if before and words else r"\s*"
        pattern += (
            (gap if pattern else "") + (r",?\s*" if token in ")]}" else "") + re.escape(token)
        )
        before = ""
    return pattern


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Replaces the bug's line for a block.
    Raises ValueError unless the function has it exactly once.
    """
    function = function_of(bug)
    source = textwrap.dedent(inspect.getsource(function))
    found = list(re.finditer(_in_any_layout(bug.line), source))
    if len(found) != 1:
        raise ValueError(f"{bug.place} has {bug.line!r} {len(found)} times, not once: name it anew")
    begin, end = found[0].span()
    source = source[:begin] + bug.mistake + source[end:]
    source = source[source.index("def ") :]
    file, code = f"<{bug.name}>", function.__code__
    # for Triton's interpreter, which reads the source of a function
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    flags = __future__.annotations.compiler_flag
    names: dict[str, Any] = {}
    text = source
    if code.co_freevars:  # such as __class__, where a method calls super()
        closed = f"def close({', '.join(code.co_freevars)}):\n"
        text = f"{closed}{textwrap.indent(source, '    ')}\n    return {function.__name__}"
    exec(compile(text, file, "exec", flags=flags, dont_inherit=True), function.__globals__, names)
    if code.co_freevars:
        names[function.__name__] = names["close"](*code.co_freevars)
    kernel = _thing_of(bug)
    before, deterministic = getattr(kernel, "src", ""), torch.are_deterministic_algorithms_enabled()
    # so new memory is NaN: what a mistake leaves out could hold the right values of the run before
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        function.__code__ = names[function.__name__].__code__
        _read_again(kernel, source)
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        function.__code__ = code
        _read_again(kernel, before)
        del linecache.cache[file]


def _read_again(kernel: Any, source: str) -> None:
    """Makes Triton forget what it made of a kernel's source, and of kernels that may call it."""
    if hasattr(kernel, "_unsafe_update_src"):
        kernel._unsafe_update_src(source)
        for module in [
            x for name, x in sys.modules.items() if name.startswith("delta_trn.triton_kernels.")
        ]:
            for compiled in [x for x in vars(module).values() if hasattr(x, "device_caches")]:
                compiled.hash = None
                compiled.device_caches.clear()
    elif type(kernel).__name__ == "InterpretedFunction":
        type(kernel).rewritten_fn.pop(kernel.fn, None)
