"""Delta-rule language models: Gated DeltaNet and Deep Delta Learning on Trainium, GPUs and CPUs.

    name                                        what it is
    gated_delta_rule, gated_delta_rule_step     the scan over time, and one token of it
    kimi_delta_attention, ..._step              the same with a decay for each channel of a key
    delta_residual                              the same rule over depth
    default_backend, checking, describe         which backend runs, whether data is checked, what
                                                runs here
    BackendRefusal                              no backend, or not the one asked for, can run a call
    DeltaConfig, DeltaForCausalLM, DeltaCache   the language model; transformers' Auto classes know
                                                it
    DeltaModel, DeltaForSequenceClassification  its backbone, and a classifier of sequences
    patch_transformers                          computes Qwen3-Next and its like with these
                                                operations
    check_packing                               whether packed sequences see each other in a model
    load_model, save_model                      weights of ours, transformers',
                                                flash-linear-attention's
    complete_weights                            what training left out of a model, put back beside
                                                its weights
    check_weights                               whether a model has dead heads
    separate_numbers                            lets FSDP shard models in bfloat16, whose heads stay
                                                float32
    mup                                         learning rates and initial values of muP for any
                                                model

Importing this package imports neither torch nor transformers: a name is loaded when it is first
used, and the models are registered with `AutoModelForCausalLM` when transformers is loaded.

    >>> import delta_trn
    >>> "chunked" in {row.backend for row in delta_trn.describe()}
    True
"""

from importlib import import_module, metadata

from delta_trn import registration

_BACKENDS = (
    *("gated_delta_rule", "gated_delta_rule_step", "delta_residual", "default_backend", "checking"),
    *("describe", "BackendRefusal", "kimi_delta_attention", "kimi_delta_attention_step"),
)
_MODELS = (
    "DeltaConfig",
    "DeltaForCausalLM",
    "DeltaModel",
    "DeltaForSequenceClassification",
    "DeltaCache",
)
_ECOSYSTEM = (
    *(
        "patch_transformers",
        "check_packing",
        "check_weights",
        "separate_numbers",
        "load_model",
        "save_model",
    ),
    "complete_weights",
)
_HOMES = (
    dict.fromkeys(_BACKENDS, "delta_trn.backends")
    | dict.fromkeys(_MODELS, "delta_trn.models")
    | dict.fromkeys(_ECOSYSTEM, "delta_trn.models.ecosystem")
)

registration.register()
registration.register_targets()


def __getattr__(name: str):
    """Loads a public name from the package that defines it (PEP 562)."""
    if name == "mup":
        return import_module("delta_trn.mup")
    if name == "__version__":
        return metadata.version("delta-trn")
    if name not in _HOMES:
        raise AttributeError(
            f"module 'delta_trn' has no attribute {name!r}; public names: {', '.join(_HOMES)}, mup"
        )
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES, "mup", "__version__"]
