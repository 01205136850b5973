"""Named runs: functions that return a RunConfig. Lists show the first line of the docstring."""

import os
import sys
from collections.abc import Callable
from difflib import get_close_matches

from delta_trn.train.settings.environment import read_variables, with_environment
from delta_trn.train.settings.errors import UsageError
from delta_trn.train.settings.overrides import change
from delta_trn.train.settings.schema import (
    BatchSection,
    CheckpointSection,
    DataSection,
    EvaluationSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    SampleSection,
    ScheduleSection,
)


def quickstart() -> RunConfig:
    """minutes on two CPU cores: a small muP Gated DeltaNet on the text
    of Python's own standard library
    """
    return RunConfig(
        name="quickstart",
        steps=1800,
        model=ModelSection(
            width=192,
            base_width=192,
            layers=4,
            heads=4,
            intermediate_multiple=64,
            mixer_output_init=0.0,
        ),
        optimizer=OptimizerSection(
            name="muon",
            lr=1e-2,
            embedding_lr=4.0,
            vector_lr=4.0,
            momentum=0.95,
            independent_weight_decay=True,
        ),
        schedule=ScheduleSection(warmup=40, min_lr=2e-4),
        batch=BatchSection(sequences=4, length=256),
        data=DataSection(source="python-stdlib", tokenizer="bytebpe", vocab_size=4096),
        evaluation=EvaluationSection(every=300, sequences=64, batch=8, final_tokens=2**19),
        # a method's first line has more to go on than `def`, and what follows reads like Python
        sample=SampleSection(tokens=96, prompt="    def __init__(self", temperature=0.5, top_k=40),
        checkpoint=CheckpointSection(every=200),
        log=LogSection(every=5),
    )


def gdn_mup_adamw() -> RunConfig:
    """the paper's AdamW run (arXiv:2606.04048): FineWeb-Edu, 20,000 steps of 480 x 1024 tokens"""
    return RunConfig(
        name="gdn_mup_adamw",
        steps=20_000,
        precision="bf16",
        model=ModelSection(width=256, base_width=256, layers=8, heads=6),
        optimizer=OptimizerSection(
            lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0
        ),
        schedule=ScheduleSection(warmup=2000, min_lr=5e-5),
        batch=BatchSection(sequences=480, length=1024, micro=60),
        data=DataSection(
            source="HuggingFaceFW/fineweb-edu",
            subset="sample-10BT",
            tokenizer="gpt2",
            val_fraction=0.01,  # 1e8 of 1e10 tokens: the paper holds out one shard of 1e8
            loader="stream",
            boundaries=False,  # as in the paper's code: documents lie end to end
        ),
        evaluation=EvaluationSection(every=1000, sequences=12_000, batch=60),  # 200 batches of 60
        sample=SampleSection(prompt="The"),
        checkpoint=CheckpointSection(every=1000),
    )


def gdn_mup_sgd() -> RunConfig:
    """the paper's SGD run: the same with Nesterov momentum 0.98,
    learning rate 0.4, no weight decay
    """
    optimizer = OptimizerSection(name="sgd", lr=0.4, momentum=0.98, weight_decay=0.0, clip=1.0)
    run = gdn_mup_adamw().model_copy(update={"optimizer": optimizer})
    return change(run, {"name": "gdn_mup_sgd", "batch.micro": "30"})


def gdn_adamw() -> RunConfig:
    """ours: gdn_mup_adamw with mixers from 0, decay independent of the width,
    and a faster embedding
    """
    tuned = {"optimizer.independent_weight_decay": "true", "optimizer.embedding_lr": "4"}
    return change(gdn_mup_adamw(), {"name": "gdn_adamw", "model.mixer_output_init": "0", **tuned})


def tiny() -> RunConfig:
    """seconds: a model of 42 thousand parameters on bytes,
    for tests and for looking at a run's folder
    """
    return RunConfig(
        name="tiny",
        steps=20,
        precision="float32",
        model=ModelSection(width=32, base_width=16, layers=2, heads=2, intermediate_multiple=32),
        # high, so that it knows after 8 steps which bytes are frequent, and what it writes can be
        # read
        optimizer=OptimizerSection(lr=0.1),
        schedule=ScheduleSection(warmup=4, min_lr=1e-3),
        batch=BatchSection(sequences=4, length=32),
        data=DataSection(source="python-stdlib", tokenizer="bytes", max_documents=64),
        evaluation=EvaluationSection(every=10, sequences=4),
        # the most probable tokens: so short a run would else draw bytes that are no text
        sample=SampleSection(tokens=8, prompt="def ", temperature=0.0),
        checkpoint=CheckpointSection(every=5),
        log=LogSection(every=2),
    )


def transfer() -> RunConfig:
    """half a minute on one CPU core at width 128:
    the subject of learning-rate sweeps on Python's library
    """
    return RunConfig(
        name="transfer",
        steps=300,
        precision="float32",
        # multiples of 16: at 256, as elsewhere, the narrow models' SwiGLU would be wider than the
        # wide ones'
        model=ModelSection(
            width=64,
            base_width=64,
            layers=2,
            heads=2,
            intermediate_multiple=16,
            mixer_output_init=0.0,
        ),
        optimizer=OptimizerSection(lr=2**-6, weight_decay=0.1),
        # no floor: it would be above the peak rate at the low end of a sweep
        schedule=ScheduleSection(warmup=30, min_lr=0.0),
        batch=BatchSection(sequences=8, length=128),
        data=DataSection(source="python-stdlib", tokenizer="bytebpe", vocab_size=1024),
        evaluation=EvaluationSection(every=300, sequences=256, batch=16),
        sample=SampleSection(tokens=0),
        checkpoint=CheckpointSection(every=100, keep_last=1, keep_best=False),
        log=LogSection(every=20),
    )


def ddl_residuals() -> RunConfig:
    """a minute on two CPU cores: attention over time, a residual stream to compare over depth"""
    model = ModelSection(
        width=96,
        base_width=96,
        layers=4,
        heads=3,
        head_dim_k=32,
        expand_v=1.0,
        intermediate_multiple=16,
        attention_layers=(0, 1, 2, 3),
        use_qk_rmsnorm=True,
        rms_norm_eps=1e-5,
        initializer_range=0.05,
    )
    run = transfer().model_copy(update={"model": model})
    return change(
        run, {"name": "ddl_residuals", "optimizer.lr": "2**-8", "checkpoint.every": "300"}
    )


def ddl_small() -> RunConfig:
    """Deep Delta Learning's small model (DDL-CC, 124M) on FineWeb-Edu:
    100,000 steps of 480 x 1024 tokens
    """
    return RunConfig(
        name="ddl_small",
        steps=100_000,
        precision="bf16",
        parametrization="sp",
        model=ModelSection(
            width=768,
            base_width=768,
            layers=12,
            heads=6,
            head_dim_k=128,
            expand_v=1.0,
            intermediate_multiple=1,
            attention_layers=tuple(range(12)),
            use_qk_rmsnorm=True,
            rms_norm_eps=1e-5,
            initializer_range=0.5 * 768**-0.5,
            residual="ddl",
            ddl_value_channels=4,
            ddl_compressor="channel",
            input_embed_shortconv_kernel_size=4,
            depth_scaled_init=True,
        ),
        optimizer=OptimizerSection(lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0),
        schedule=ScheduleSection(warmup=2000),
        batch=BatchSection(sequences=480, length=1024, micro=30),
        data=gdn_mup_adamw().data.model_copy(update={"subset": "sample-100BT"}),
        evaluation=EvaluationSection(every=1000, sequences=1200, batch=30),
        sample=SampleSection(prompt="The"),
        checkpoint=CheckpointSection(every=1000),
    )


def ddl_medium() -> RunConfig:
    """Deep Delta Learning's medium model (DDL-CC, 354M), otherwise as ddl_small"""
    run = ddl_small()
    sizes = {"width": 1024, "base_width": 1024, "layers": 24, "heads": 8}
    sizes |= {"attention_layers": tuple(range(24)), "initializer_range": 0.5 * 1024**-0.5}
    run = run.model_copy(update={"model": run.model.model_copy(update=sizes)})
    return change(run, {"name": "ddl_medium", "batch.micro": "15", "evaluation.batch": "15"})


def ddl_lm_tinystories() -> RunConfig:
    """Deep Delta Learning LM, 35M, on TinyStories or a text or parquet file;
    also set by environment
    """
    run = RunConfig(
        name="ddl_lm_tinystories",
        steps=172_000,  # 3 epochs of 4.7e8 tokens
        parametrization="sp",
        max_minutes=300,
        model=ModelSection(
            width=384, base_width=384, layers=8, heads=8, head_dim_k=48, expand_v=1.0,
            intermediate_size=4 * 384, attention_layers=tuple(range(8)), positions="learned",
            max_position_embeddings=512, norm="layer", mlp="gelu", rms_norm_eps=1e-5, dropout=0.1,
            residual="ddl_lm", ddl_beta_init=0.23840584404423526,  # 2 sigmoid(-2)
        ),
        optimizer=OptimizerSection(lr=3e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0),
        schedule=ScheduleSection(min_lr=3e-4),
        batch=BatchSection(sequences=16, length=512),
        # packed: documents end to end, each with its end token, which is therefore learned
        data=DataSection(
            source="roneneldan/TinyStories", tokenizer="gpt2", val_fraction=0.01, boundaries=False
        ),
        evaluation=EvaluationSection(every=1000, sequences=128),
        sample=SampleSection(tokens=50, prompt="Once upon a ", temperature=0.7, top_k=15),
        checkpoint=CheckpointSection(every=1000),
    )  # fmt: skip
    return with_environment(run, os.environ)


RECIPES: dict[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        quickstart,
        gdn_adamw,
        gdn_mup_adamw,
        gdn_mup_sgd,
        ddl_lm_tinystories,
        ddl_small,
        ddl_medium,
        ddl_residuals,
        transfer,
        tiny,
    )
}


def recipe(name: str) -> RunConfig:
    """Returns the configuration of a named recipe. UsageError lists the known ones."""
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]}? known" if near else "known"
        raise UsageError(f"unknown recipe {name!r}; {hint}: {', '.join(RECIPES)}")
    return RECIPES[name]()


def announce(name: str) -> RunConfig:
    """Returns a recipe as `recipe` does, and prints on stderr
    which environment variables have changed it.
    """
    config = recipe(name)
    if names := variables(name):
        print(f"variables  {' '.join(names)} from the environment", file=sys.stderr)
    return config


def summary(name: str) -> str:
    """Returns one line about a recipe."""
    return (RECIPES[name].__doc__ or "").strip().splitlines()[0]


def variables(name: str) -> list[str]:
    """Returns NAME=value of every environment variable that has changed a recipe."""
    return read_variables(os.environ) if name == ddl_lm_tinystories.__name__ else []
