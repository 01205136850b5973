"""Puts our operations into delta-rule models of transformers, and takes them out again."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from delta_trn.backends.checks import BackendRefusal
from delta_trn.backends.dispatch import Call, choose, describe_choice
from delta_trn.backends.kimi_delta_attention import SAFE
from delta_trn.backends.machine import compute_capability
from delta_trn.models.ecosystem.heads import check_weights, keep_float32, widen
from delta_trn.models.ecosystem.operations import gate_norm, replacements
from delta_trn.models.head_numbers import Float32Numbers, is_in_memory, keep_numbers
from delta_trn.models.sequence import (
    assert_later,
    packed_bounds,
    packed_places,
    places_in_sequences,
)

# the function of transformers by which a layer is known, and which rule of ours computes it
RULES = {
    "torch_chunk_gated_delta_rule": "gated_delta_rule",
    "chunk_kimi_delta_attention": "kimi_delta_attention",
}
FAMILIES = dict.fromkeys(
    ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid"), "gated_delta_rule"
) | dict.fromkeys(("kimi_linear", "bailing_hybrid", "glm5_next"), "kimi_delta_attention")
# the attribute of a patched module's class that has the Patch
PATCH = "delta_trn_patch"
ALREADY = (
    "{} is patched already; call undo() of the earlier Patch first, which Patch.of(model) returns"
)
BY_DEVICE = "the backend of its tensors' device"
# Triton's faster kernel on Hopper takes bounded decays alone
UNBOUNDED = "plain kernel: decay unbounded"
# under which names transformers passes a cache
CACHES = ("past_key_values", "cache", "cache_params")
ABSENT = (
    "its weights are not in memory: A_log and dt_bias are neither checked nor made float32, which "
    "patch_transformers() before the model is loaded does"
)
UNREACHED = (
    "{} of this class were made before, and something else put a forward into them; patch each of "
    "these models first, and wrap or compile it then"
)
NO_CACHE = (
    "packed sequences cannot fill or continue a cache: transformers' attention would mix them. "
    "Pass use_cache=False, or one sequence per row"
)
NO_ROWS = (
    "under torch.compile, transformers' flash attention reads each of several rows as one "
    "sequence, though position_ids may tell of more. Put sequences end to end in one row, or use "
    "another attention"
)
# the family whose attention layers are told nothing but which tokens are padding
INDEXED = "glm5_next"
NO_BOUNDS = (
    "transformers' indexed attention reads a row as one sequence, so that packed ones would see "
    "each other. Give it one sequence per row"
)


@dataclass(frozen=True)
class Row:
    """One layer, or one family: which backend computes each operation, or why none of ours does.

    notes   how the rule is computed where its backend has a slower way, what else was done to the
            layer, and its dead heads, as `check_weights` finds them
    """

    name: str
    kernels: dict[str, str]
    reason: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: left as it is: {self.reason}"
        backends = dict.fromkeys(self.kernels.values())
        parts = (
            f"{backend} for {', '.join(op for op in self.kernels if self.kernels[op] == backend)}"
            for backend in backends
        )
        return "\n    ".join([f"{self.name}: {'; '.join(parts)}", *self.notes])


@dataclass(eq=False)
class Patch:
    """Lists what `patch_transformers` did; `undo`, or the end of a `with` block, takes it back.

    A patched layer has a class of its own, with the name and module of transformers'. Copies have
    that class, too, and `undo` takes the patch back from them as well. What is pickled, as
    torch.save(model) and processes that are spawned do it, is patched where it is loaded, by a
    Patch of its own that `Patch.of(model)` returns; without this package loading fails.
    """

    rows: list[Row] = field(default_factory=list)
    backend: str | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _classes: dict[type, type] = field(default_factory=dict, repr=False)
    _plain: dict[type, Any] = field(default_factory=dict, repr=False)  # the forward of a class
    _is_undone: bool = False

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        """Returns itself: copies of a patched model are undone with it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Patch, (self.rows, self.backend)

    @staticmethod
    def of(model: nn.Module) -> Patch:
        """Returns what patched the model, or patched it when it was loaded.

        Raises ValueError for a model that is not patched by itself.
        """
        for module in model.modules():
            if not (patch := getattr(type(module), PATCH, UNDONE))._is_undone:
                return patch
        raise ValueError(f"this {type(model).__name__} is not patched: patch_transformers(model)")

    def undo(self) -> None:
        """Restores what was replaced; a second call does nothing."""
        self._is_undone = True
        while self._undo:
            self._undo.pop()()

    def add_undo(self, restore: Callable[[], None]) -> None:
        """Adds what `undo` calls, before all that was added earlier."""
        self._undo.append(restore)

    def replace(self, owner: Any, function: Callable[..., Any]) -> None:
        """Makes `function` the `forward` of a class or a module.
        Raises ValueError if it has one of ours, or a module one of somebody else's.
        """
        function.from_delta_trn = True  # type: ignore[attr-defined]
        if isinstance(owner, nn.Module):
            self._replace_in_module(owner, function)
            return
        plain = vars(owner).get("forward")
        if getattr(plain, "from_delta_trn", False):
            raise ValueError(ALREADY.format(owner.__name__))
        self.set(owner, "forward", function)
        self._plain[owner] = plain
        self.set(owner, "__reduce_ex__", _reduce_patched(self))
        if _rule_of(owner) is not None:
            self.set(owner, "__init__", _widen_after(owner.__init__))
            self.set(owner, "_apply", _apply_in_float32(owner._apply))

    def reach_living(self) -> None:
        """Reaches modules of patched classes that were made before and have a forward of their own,
        in which accelerate's hooks keep the method of the class; adds a row for what it cannot reach.
        """
        ours = {owner: vars(owner)["forward"] for owner in self._plain}
        missed = [
            type(module).__name__
            for module, owner, method in _living(ours)
            if getattr(method, "__func__", None) not in (self._plain[owner], ours[owner])
        ]
        for name in dict.fromkeys(missed):
            self.rows.append(Row(name, {}, UNREACHED.format(missed.count(name))))
        self._point_living(ours, self._plain, ours)
        self.add_undo(lambda: self._point_living(ours, ours, self._plain))

    @staticmethod
    def _point_living(kinds: Any, old: Mapping[type, Any], new: Mapping[type, Any]) -> None:
        for module, owner, _ in _living(kinds):
            _point(module, old[owner], new[owner])

    def set(self, owner: type, name: str, value: Any) -> None:
        """Gives a class an attribute, until `undo`."""
        before = vars(owner).get(name)
        setattr(owner, name, value)
        self.add_undo(
            lambda: delattr(owner, name) if before is None else setattr(owner, name, before)
        )

    def _replace_in_module(self, module: nn.Module, function: Callable[..., Any]) -> None:
        kind, name = _kind_of(module), type(module).__name__
        if not getattr(type(module), PATCH, UNDONE)._is_undone:
            raise ValueError(ALREADY.format(name))
        # accelerate puts a hook into `forward`, which calls what it has kept; where the hook was
        # removed, the method itself remains
        calls = {x: vars(module)[x] for x in ("forward", "_old_forward") if x in vars(module)}
        method = calls.get("_old_forward", calls.get("forward"))
        if method is not None and getattr(method, "__func__", None) is not kind.forward:
            raise ValueError(
                f"{name} has a forward that something else put into the module, {method!r}, and "
                "the patch would have no effect; patch the model first, and wrap or compile it then"
            )
        patched = self.class_of(kind, function)
        module.__class__ = patched
        _point(module, kind.forward, function)

        def restore() -> None:
            if type(module) is patched:  # FSDP makes a class of this one, which loses its forward
                module.__class__ = kind
            _point(module, function, kind.forward)

        self.add_undo(restore)

    def class_of(self, kind: type, function: Callable[..., Any]) -> type:
        """Returns the class of patched modules of a kind, whose forward is the function."""
        if kind not in self._classes:
            self._classes[kind] = patched = _make_class(self, kind, function)
            self.add_undo(lambda: delattr(patched, "forward"))
        return self._classes[kind]


UNDONE = Patch(_is_undone=True)


def _living(kinds: Container[type]) -> Iterator[tuple[nn.Module, type, Any]]:
    """Yields every module of these classes in this process that has a forward of its own and no
    Patch of its own, with the class and what is called in the end.
    """
    for module in gc.get_objects():
        # not isinstance, which asks what objects stand for
        if not issubclass(type(module), nn.Module):
            continue
        owner = next((kind for kind in type(module).__mro__ if kind in kinds), None)
        method = vars(module).get("_old_forward", vars(module).get("forward"))
        if owner is None or method is None or hasattr(type(module), PATCH):
            continue
        yield module, owner, method


def _make_class(patch: Patch, kind: Any, forward: Callable[..., Any]) -> type:
    """Returns a class for patched modules of a kind, with its name and module, by which FSDP and
    others know it.
    """

    @functools.wraps(kind.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = kind  # type(model)(config) makes what transformers makes
        kind.__init__(self, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        if type(self) is not patched:  # a class that FSDP made cannot be pickled
            return object.__reduce_ex__(self, protocol)
        active = None if patch._is_undone else patch
        return (_revive, (kind, active), *object.__reduce_ex__(self, max(protocol, 2))[2:])

    members = {"__init__": __init__, "__reduce_ex__": __reduce_ex__, "forward": forward}
    members |= {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (kind,) if _rule_of(kind) is None else (Float32Numbers, kind)
    patched = type(kind)(kind.__name__, bases, {**members, PATCH: patch})
    return patched


def _reduce_patched(patch: Patch) -> Callable[..., Any]:
    """Returns how modules of a class that is patched in this process are pickled."""

    def reduce(self: Any, protocol: Any) -> Any:
        return (_revive, (type(self), patch), *object.__reduce_ex__(self, max(protocol, 2))[2:])

    return reduce


def _revive(kind: Any, patch: Patch | None) -> nn.Module:
    """Returns a module of a kind without its contents, patched as where it was copied or pickled.

    Raises ValueError for a class that cannot be patched here.
    """
    here = any(getattr(vars(x).get("forward"), "from_delta_trn", False) for x in kind.__mro__)
    if patch is not None and not patch._is_undone and not here:
        kind = patch.class_of(kind, _forward_for(kind, patch.backend))
    return kind.__new__(kind)


def _kind_of(module: nn.Module) -> Any:
    """Returns the class that a module had before it was patched;
    its class, where it is not patched or patched now.
    """
    patch, kind = getattr(type(module), PATCH, UNDONE), type(module)
    if patch._is_undone:
        return next((x for x, made in patch._classes.items() if made is kind), kind)
    return kind


def _point(module: nn.Module, old: Any, new: Any) -> None:
    """Lets methods that others, such as accelerate, keep in a module be of another function."""
    for name in ("forward", "_old_forward"):
        if getattr(vars(module).get(name), "__func__", None) is old:
            setattr(module, name, types.MethodType(new, module))


def _widen_after(init: Callable[..., None]) -> Callable[..., None]:
    """Returns a layer's __init__ that leaves A_log and dt_bias in float32, in whatever dtype models
    are made.
    """

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        widen(self)

    return __init__


def _apply_in_float32(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a layer's _apply, which casts it, that leaves A_log and dt_bias in float32."""

    @functools.wraps(plain)
    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return plain(self, keep_numbers(self, fn), recurse)

    return _apply


def patch_transformers(model: nn.Module | None = None, backend: str | None = None) -> Patch:
    """Computes the delta-rule layers of transformers' models with this package's operations.

        model     a model of Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-Hybrid, ...) or Kimi Delta
                  Attention (Kimi Linear, GLM-5 Next, Bailing Hybrid), of which every such layer is
                  patched; None: every model of these families in this process, those made later
                  included
        backend   the backend of every operation; None: the one for the device of the tensors
        returns   a Patch, whose rows say which layer or family got which kernel, or why it did not;
                  they are printed, too. It is a context manager, and `undo()` takes the patch back

    Replaced are the delta rule, its step of one token, the short convolution, and behind Kimi Delta
    Attention the gated norm; caches and the rest of a layer stay. Where a model's config bounds the
    decay to -5 or more, as that of GLM-5 Next and Bailing Hybrid may, the rule is promised so, and a
    faster kernel computes it on Hopper; else the row says that the plain one does. A_log and
    dt_bias in half precision become float32, and remain so after `undo`; without a model,
    from_pretrained keeps them in float32 from now on. Dead heads are reported (`check_weights`).

    Packed sequences are kept apart in every layer, attention too, whether `position_ids` start
    again at 0, `cu_seq_lens_q`, `seq_idx` or numbers in the mask tell of them; they cannot use a
    cache, and GLM-5 Next's indexed attention refuses them. Raises ValueError for a model without
    such a layer or patched already, and BackendRefusal, with the reasons, if no layer can be
    computed. An exception leaves nothing patched.

        >>> from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
        >>> from delta_trn import patch_transformers
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 50, "num_experts": 0}
        >>> layers = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
        >>> model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **layers))
        >>> with patch_transformers(model, backend="chunked"):
        ...     loss = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
        model.layers.0.linear_attn: chunked for gated_delta_rule, gated_delta_rule_step,
        short_convolution
    """
    patch = Patch(backend=backend)
    try:
        if model is None:
            _patch_families(patch, backend)
        else:
            _patch_model(patch, model, backend)
    except BaseException:
        patch.undo()
        raise
    print(patch)
    return patch


def _patch_families(patch: Patch, backend: str | None) -> None:
    for name, rule in FAMILIES.items():
        path = f"transformers.models.{name}"
        if find_spec(path) is None:
            patch.rows.append(Row(name, {}, "this transformers does not have it"))
        else:
            module = import_module(f"{path}.modeling_{name}")
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            for layer in filter(_rule_of, classes):
                patch.replace(layer, _forward_for(layer, backend))
            for norm in filter(_is_gated_norm, classes):
                patch.replace(norm, _forward_for(norm, backend))
            for base in classes:
                if PreTrainedModel in base.__bases__:
                    patch.add_undo(keep_float32(base))
            for stack in filter(_is_stack, classes):
                patch.replace(stack, _forward_for(stack, backend))
            kernels = dict.fromkeys(_operations(rule), backend or BY_DEVICE)
            by_config = f"{UNBOUNDED}, unless a model's config bounds it"
            notes = (by_config,) if _may_be_plain(rule, kernels) else ()
            patch.rows.append(Row(name, kernels, notes=notes))
    patch.reach_living()


def _patch_model(patch: Patch, model: nn.Module, backend: str | None) -> None:
    for name, layer in model.named_modules():
        kind = _kind_of(layer)
        if (rule := _rule_of(kind)) is None:
            continue
        try:
            kernels = _choose_kernels(layer, rule, backend)
        except BackendRefusal as refusal:
            patch.rows.append(Row(name, {}, str(refusal)))
            continue
        patch.replace(layer, _forward_for(kind, backend))
        norm = getattr(layer, "o_norm", None)
        if isinstance(norm, nn.Module) and _is_gated_norm(_kind_of(norm)):
            patch.replace(norm, _forward_for(_kind_of(norm), backend))
        plain = _may_be_plain(rule, kernels) and not _is_bounded(layer)
        if not all(map(is_in_memory, layer.parameters())):
            notes: tuple[str, ...] = (ABSENT,)
        else:
            notes = (
                *_describe_rule(layer, rule, kernels),
                *widen(layer),
                *map(str, check_weights(layer).dead),
            )
        patch.rows.append(Row(name, kernels, notes=(UNBOUNDED, *notes) if plain else notes))
    if not patch.rows:
        raise ValueError(_explain_no_layer(model))
    if not any(row.kernels for row in patch.rows):
        raise BackendRefusal(f"no layer of this {type(model).__name__} can be computed:\n{patch}")
    for module in model.modules():
        if _is_stack(kind := _kind_of(module)):
            patch.replace(module, _forward_for(kind, backend))


def _describe_rule(layer: Any, rule: str, kernels: dict[str, str]) -> list[str]:
    """Returns a line that says how the rule is computed;
    none where its backend has one way only.
    """
    device = layer.conv1d.weight.device.type
    how = describe_choice(kernels[rule], _dtype(layer), device, rule)
    return [] if how == kernels[rule] else [f"{rule} by {how}"]


def _explain_no_layer(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} has no Gated DeltaNet or Kimi Delta Attention layer of "
        f"transformers; pass a model of one of the families {', '.join(FAMILIES)}"
    )


def _choose_kernels(layer: Any, rule: str, backend: str | None) -> dict[str, str]:
    """Returns the backend of each operation. Raises BackendRefusal
    if there is none for one of them.
    """
    weight, operations = layer.conv1d.weight, _operations(rule)
    if not is_in_memory(weight):  # nobody knows yet where it will be computed
        return dict.fromkeys(operations, backend or BY_DEVICE)
    if rule == "gated_delta_rule":
        sizes = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    else:
        sizes = layer.num_heads, layer.num_heads, layer.head_dim, layer.head_dim
    heads: dict[str, Any] = dict(zip(("H", "HV", "K", "V"), sizes, strict=True))
    convolution = {"C": weight.shape[0], "W": weight.shape[-1]}
    fused = layer.conv1d.bias is None and layer.activation in ("silu", "swish")
    sizes_of = {"short_convolution": convolution, "gated_rms_norm": {"N": heads["V"]}}
    options_of = {
        "short_convolution": ("silu" if fused else "linear",),
        "gated_rms_norm": ("sigmoid",),
    }
    kernels = {}
    for op in operations:
        gradients = torch.is_grad_enabled() and not op.endswith("_step")
        call = Call(
            op,
            weight.device.type,
            _dtype(layer),
            sizes_of.get(op, heads),
            options_of.get(op, ()),
            gradients,
            compute_capability(weight.device.type, weight.device.index),
        )
        kernels[op] = choose(call, backend).name
    return kernels


def _operations(rule: str) -> tuple[str, ...]:
    norm = ("gated_rms_norm",) if rule == "kimi_delta_attention" else ()
    return rule, f"{rule}_step", "short_convolution", *norm


def _may_be_plain(rule: str, kernels: dict[str, str]) -> bool:
    """Returns whether it matters to the rule's kernel that decays are bounded."""
    return rule == "kimi_delta_attention" and kernels[rule] in ("triton", BY_DEVICE)


def _is_bounded(layer: Any) -> bool:
    """Returns whether a layer's config bounds its decay so that safe_gate promises it."""
    gate = getattr(layer, "forget_gate", None)
    bound = getattr(gate, "safe_gate_lower_bound", None)  # of GLM-5 Next
    if getattr(gate, "safe_gate", False):  # of Bailing Hybrid
        bound = getattr(gate, "lower_bound", None)
    return bound is not None and SAFE <= bound < 0


def _is_gated_norm(kind: type) -> bool:
    """Returns whether a class is a norm of transformers that a gate's activation multiplies."""
    return {"activation", "variance_epsilon"} <= set(_names(kind))


def _gate_by_sigmoid(forward: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    """Returns a norm's forward by our operation, for a module whose gate is a sigmoid."""

    @functools.wraps(forward)
    def normalize(self: Any, hidden_states: Tensor, gate: Any = None) -> Tensor:
        if self.activation != "sigmoid" or gate is None:
            return forward(self, hidden_states, gate)
        return gate_norm(self, hidden_states, gate, backend=backend)

    return normalize


def _forward_of(kind: type, rule: str, backend: str | None) -> Callable[..., Any]:
    """Returns a layer's forward with our functions, which promise bounded decays where its config
    bounds them.
    """
    own: Any = vars(kind)["forward"]
    plain = _rebind(own, replacements(backend), backend or "by_device")
    if rule != "kimi_delta_attention":
        return plain
    name = f"{backend or 'by_device'}__bounded"
    bounded = _rebind(own, replacements(backend, safe=True), name)

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (bounded if _is_bounded(self) else plain)(self, *args, **kwargs)

    return forward


def _dtype(layer: Any) -> torch.dtype:
    """Returns the dtype in which a layer computes:
    some models keep a convolution's weight in float32.
    """
    return getattr(layer, "o_norm", layer.conv1d).weight.dtype


def _rule_of(kind: type) -> str | None:
    """Returns which rule a class computes, if it is a layer of transformers that does."""
    return next((RULES[name] for name in _names(kind) if name in RULES), None)


def _is_stack(kind: type) -> bool:
    """Returns whether a class is the model that runs the layers, which knows the tokens' places."""
    return (
        "layers" in _names(kind)
        and "position_ids" in inspect.signature(vars(kind)["forward"]).parameters
    )


def _names(kind: type) -> tuple[str, ...]:
    """Returns the names that the own forward of a kind of module looks up."""
    forward = vars(kind).get("forward") if issubclass(kind, nn.Module) else None
    return () if forward is None else inspect.unwrap(forward).__code__.co_names


def _forward_for(kind: type, backend: str | None) -> Callable[..., Any]:
    """Returns the forward that patched modules of a class have. Raises ValueError if there is none."""
    forward = getattr(kind, "forward", None)
    owner = next((x for x in kind.__mro__ if vars(x).get("forward") is forward), kind)
    if (rule := _rule_of(owner)) is not None:
        return _forward_of(owner, rule, backend)
    if _is_gated_norm(owner):
        return _gate_by_sigmoid(owner.forward, backend)
    if _is_stack(owner):
        return _keep_apart(owner.forward)
    raise ValueError(
        f"{kind.__name__} was patched where it was pickled, and has a forward of its own that "
        "calls transformers'; call patch_transformers() before it is loaded"
    )


def _rebind(forward: Callable[..., Any], ours: dict[str, Any], suffix: str) -> Callable[..., Any]:
    """Returns the same forward, which looks our functions up where it looked up transformers'.

    A copy of the function with globals of its own needs no switch, so that threads, torch.compile
    and checkpointed backward passes see what this layer was patched with. torch.compile finds the
    globals of a function by the name of its module, so they are those of a module that can be
    imported under that name.
    """
    inner: Any = inspect.unwrap(forward)
    name = f"{inner.__globals__['__name__']}__delta_trn_{suffix}"
    module = types.ModuleType(name)
    vars(module).update({**inner.__globals__, **ours, "__name__": name})
    module = sys.modules.setdefault(name, module)
    copy = types.FunctionType(
        inner.__code__, vars(module), inner.__name__, inner.__defaults__, inner.__closure__
    )
    copy.__kwdefaults__, copy.__doc__ = inner.__kwdefaults__, inner.__doc__
    hooks = inner.__globals__.get("force_accelerate_hooks")
    return hooks("conv1d")(copy) if hooks is not None and inner is not forward else copy


def _keep_apart(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a model's forward that keeps packed sequences apart, however it is told of them.

    transformers tells only attention layers, and only where it finds position_ids that start again,
    no mask and no cache. So the layers with a state are given the bounds, and attention layers are
    told in that way.
    """
    names = list(inspect.signature(inspect.unwrap(forward)).parameters)[1:]
    indexed = f".{INDEXED}." in inspect.unwrap(forward).__module__

    @functools.wraps(forward)
    def keep_apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        shape = tuple((kwargs["inputs_embeds"] if tokens is None else tokens).shape[:2])
        told = {name: kwargs.get(name) for name in ("cu_seq_lens_q", "seq_idx", "position_ids")}
        continues = any(kwargs.get(name) is not None for name in CACHES)
        caches = kwargs.get("use_cache") or continues
        refusal = NO_BOUNDS if indexed else NO_CACHE if caches else None
        if not torch.compiler.is_compiling():
            bounds = packed_bounds(told, mask, shape, continues=continues)
            if bounds is not None and refusal:
                raise ValueError(refusal)
            if bounds is not None:
                places, longest = places_in_sequences(bounds, shape), int(bounds.diff().max())
                lengths = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds.int())
                kwargs |= _tell_attention(kwargs, places)
                kwargs |= {**lengths, "max_length_q": longest, "max_length_k": longest}
        elif (found := packed_places(told, mask, shape, continues=continues)) is not None:
            # whether rows are packed is not known while torch.compile traces: one sequence is read
            # alike
            places, is_packed = found
            if shape[0] > 1 and "flash" in str(self.config._attn_implementation):
                raise ValueError(NO_ROWS)
            if refusal:
                assert_later(~is_packed, refusal)
            else:
                kwargs |= {**_tell_attention(kwargs, places), "cu_seq_lens_q": places}
        return forward(self, **kwargs)

    return keep_apart


def _tell_attention(given: dict[str, Any], places: Tensor) -> dict[str, Any]:
    """Returns the arguments by which attention layers of transformers keep sequences apart."""
    axes = given.get("position_ids")
    if axes is None or axes.dim() == 2:
        positions = places
    else:  # of text, time, height and width; transformers looks at the first, which may be left out
        positions = torch.cat([places[None], axes[-3:].expand(-1, *places.shape)])
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        mask = None  # padding is a sequence of its own
    return {"use_cache": False, "position_ids": positions, "attention_mask": mask}
