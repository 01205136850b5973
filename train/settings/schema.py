"""The configuration of a run: one frozen tree, every key documented where it is declared, nothing
outside it.

A key is a dotted path such as `optimizer.lr`. `delta-trn run RECIPE --all-keys` prints all.
Importing this costs a tenth of a second, so that a mistyped key is reported before torch is loaded.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from delta_trn.models.mup import Parametrization
from delta_trn.models.settings import (
    Count,
    CountOrNone,
    Fraction,
    ModelSettings,
    NotNegative,
    Positive,
    Real,
    Section,
    explain,
)
from delta_trn.train.settings.errors import ConfigError

Share = Annotated[float, Field(gt=0, le=1)]


class ModelSection(ModelSettings):
    """The language model: Gated DeltaNet (arXiv:2412.06464) or attention over time,
    a residual over depth.
    """

    vocab_size: CountOrNone = None
    """number of rows of the embedding; none: what the data's tokenizer says"""


class OptimizerSection(Section):
    """The rule that updates parameters. Per-parameter factors come from models.mup's table."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """AdamW, SGD with Nesterov momentum, or Muon for hidden matrices, head by head, and AdamW for the rest"""
    lr: Positive = 1e-3
    """peak learning rate at base_width; a parameter's own rate is this times its factor"""
    embedding_lr: Positive = 1.0
    """factor on the rate of the embedding, at every width, whether or not the readout is tied to it"""
    readout_lr: Positive = 1.0
    """factor on the rate of an untied readout, at every width"""
    gate_lr: Positive = 1.0
    """factor on the rate of the projections of decay and beta, and of whatever gives one number a
    head, at every width
    """
    scalar_lr: Positive = 1.0
    """factor on the rate of A_log and dt_bias, at every width"""
    vector_lr: Positive = 1.0
    """factor on the rate of norm gains and convolution taps, at every width"""
    weight_decay: Real = 0.1
    """decoupled for AdamW, times the learning rate; models.mup's table says which parameters decay"""
    independent_weight_decay: bool = False
    """weight decay without a parameter's own factor, so that wide matrices decay as fast as narrow"""
    memory: Positive = 1.0
    """sgd: memory length of the heads over the base model's; divides the rates of what they store"""
    beta1: Fraction = 0.9
    """adamw and muon's rest: decay of the gradient's mean"""
    beta2: Fraction = 0.95
    """adamw and muon's rest: decay of the gradient's second moment"""
    eps: Positive = 1e-8
    """adamw, muon's rest: added to the root of the second moment at base_width; models.mup scales it"""
    momentum: Fraction = 0.98
    """sgd, muon: Nesterov momentum, without dampening"""
    clip: Positive | None = 1.0
    """largest global gradient norm, after accumulation and reduction; none: no clipping"""
    clip_norm: Literal["global", "width"] = "global"
    """norm that clip limits: plain, or with weights that make it of one size at every width (models.mup)"""


class ScheduleSection(Section):
    """lr(i) = lr i / warmup for i < warmup, then half a cosine down to min_lr.
    i counts finished steps.
    """

    warmup: NotNegative = 0
    """steps of linear warmup; the first step's learning rate is 0 if there are any"""
    min_lr: Real = 0.0
    """learning rate at the end, before a parameter's own factor"""
    decay_steps: CountOrNone = None
    """step at which min_lr is reached; none: steps"""


class BatchSection(Section):
    """What one optimizer step sees."""

    sequences: Count = 8
    """sequences per step, over all devices and micro-batches"""
    length: Count = 512
    """tokens per sequence"""
    micro: CountOrNone = None
    """sequences per forward pass of a device; none: its whole share of a step"""


class DataSection(Section):
    """The text, and how it becomes tokens. The same settings find what was prepared before."""

    source: str = "python-stdlib"
    """folder, .txt, .jsonl, .csv, .parquet file, python-stdlib, site-packages, HF dataset, prepared folder"""
    folder: str | None = None
    """where prepared shards are written or found; none: data/NAME-TOKENIZER-HASH"""
    tokenizer: str = "bytebpe"
    """gpt2, bytebpe (trained on the training documents), bytes, or the path of a tokenizer.json"""
    vocab_size: CountOrNone = None
    """rows of the embedding; none: 4096 for bytebpe, else its size up to a multiple of 64"""
    subset: str | None = None
    """subset of a Hugging Face dataset, such as sample-10BT"""
    split: str = "train"
    """split of a Hugging Face dataset"""
    revision: str | None = None
    """commit or tag of a Hugging Face dataset"""
    text_field: str = "text"
    """field or column of the source that has the text"""
    validation: str | None = None
    """held-out text: a path, or a split of the same dataset; none: val_fraction of the documents"""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """share of documents held out where validation is none"""
    shard_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = 100_000_000
    """tokens in a shard, whose header counts them in an int32"""
    max_documents: CountOrNone = None
    """how many documents of the source are read; none: all"""
    max_tokens: CountOrNone = None
    """how many tokens are enough: no further document is written; none: no limit"""
    seed: int = 0
    """seed of the choice of held-out documents"""
    loader: Literal["random_crop", "stream"] = "random_crop"
    """training batches: random_crop draws crops with replacement, stream reads every token in turn"""
    boundaries: bool = True
    """every document begins with an empty state, as it would alone; false: the one before reaches it"""


class EvaluationSection(Section):
    """Loss on fixed crops of held-out text: the same at every evaluation
    and for every batch size.
    """

    every: Count = 1000
    """steps between evaluations; there is always one after the last step"""
    sequences: Count = 64
    """crops of held-out text in one evaluation"""
    batch: CountOrNone = None
    """crops in one forward pass, a divisor of evaluation.sequences; none: at most a step's micro-batch"""
    seed: int = 0
    """seed of the choice of held-out crops"""
    final_tokens: NotNegative = 0
    """held-out tokens to measure in order after the last step; 0: the summary has the crops' loss"""


class SampleSection(Section):
    """Text written to samples.txt at every evaluation,
    without a change to the run's random numbers.
    """

    tokens: NotNegative = 64
    """tokens of each sample; 0: no samples"""
    prompt: str = ""
    """text that a sample continues"""
    temperature: Real = 0.8
    """sampling temperature; 0: the most probable token each time"""
    top_k: CountOrNone = 50
    """sample from the k most probable tokens; none: from all"""
    top_p: Share | None = None
    """sample from the most probable tokens that make up this probability; none: from all"""


class CheckpointSection(Section):
    """When to write checkpoints/step-XXXXXXXX, and which of them to keep."""

    every: Count = 1000
    """steps between checkpoints; the last step and every stop have one, too"""
    keep_last: Count = 3
    """number of newest checkpoints to keep"""
    keep_best: bool = True
    """also save the weights with the lowest validation loss, and keep them as checkpoints/best"""


class DistributionSection(Section):
    """How the processes that torchrun started share the work. One process needs none of it."""

    mode: Literal["ddp", "fsdp", "zero1"] = "ddp"
    """what each process has only a part of: nothing (ddp), optimizer (zero1), weights too (fsdp)"""
    tensor: Count = 1
    """processes that divide each layer's heads and inner sizes; a divisor of the heads"""
    context: Count = 1
    """processes that divide each sequence, and pass the delta rule's states on"""
    timeout_minutes: Positive = 30.0
    """minutes that a process waits for another before it ends with a message"""


class LogSection(Section):
    """What is shown and sent elsewhere; metrics.jsonl always has one line per step."""

    every: Count = 10
    """steps between fetches of losses from the device; each fetch waits for it"""
    probes: bool = False
    """measure sizes, gradients and updates inside the model at every evaluation, for `plot`"""
    wandb: bool = False
    """send metrics to Weights & Biases, too"""
    wandb_project: str = "delta-trn"
    """project at Weights & Biases"""


class RunConfig(Section):
    """The whole configuration of a run. Recipes are functions that return one."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "run"
    """name of the run"""
    out: str | None = None
    """folder of the run; none: runs/NAME, or the first free runs/NAME-2, runs/NAME-3, ..."""
    steps: Count = 1000
    """optimizer steps"""
    epochs: Positive | None = None
    """passes over the training tokens, in place of steps; none: steps"""
    seed: int = 42
    """seed of initial weights and training batches"""
    device: str = "auto"
    """device to train on: auto, cpu, cuda, cuda:1, xla, ..."""
    backend: str = "auto"
    """backend of the delta rule (`delta-trn backends` lists them); auto: chosen by device"""
    precision: Literal["auto", "float32", "bf16", "bf16_products"] = "auto"
    """precision of products; auto: bf16, on a CPU with AMX bf16_products, otherwise float32"""
    parametrization: Parametrization = "mup"
    """how initialization, multipliers and learning rates scale with width"""
    compile: bool = False
    """compile the model with torch.compile"""
    gradient_checkpointing: bool = False
    """recompute activations in backward instead of keeping them"""
    deterministic: bool = False
    """refuse operations whose result varies from run to run"""
    max_minutes: Positive | None = None
    """minutes of training in this process, then a checkpoint and a stop; none: no limit"""
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    batch: BatchSection = BatchSection()
    data: DataSection = DataSection()
    evaluation: EvaluationSection = EvaluationSection()
    sample: SampleSection = SampleSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    distribution: DistributionSection = DistributionSection()

    @model_validator(mode="after")
    def _go_together(self) -> "RunConfig":
        micro, batch = self.batch.micro, self.batch.sequences
        if micro is not None and batch % micro:
            raise ValueError(f"batch.micro={micro} does not divide batch.sequences={batch}")
        crops, size = self.evaluation.sequences, self.evaluation.batch
        if size is not None and crops % size:
            raise ValueError(
                f"evaluation.batch={size} does not divide evaluation.sequences={crops}"
            )
        m, d = self.model, self.distribution
        if m.positions == "learned" and self.batch.length > m.max_position_embeddings:
            raise ValueError(
                f"batch.length={self.batch.length} is above "
                f"model.max_position_embeddings={m.max_position_embeddings}"
            )
        if self.out is not None and "://" in self.out:
            raise ValueError(
                f"out={self.out}: a run's folder is on this machine; give out=DIR, and copy it "
                "when it has ended, such as with aws s3 sync DIR s3://BUCKET"
            )
        alone = (
            "use_qk_rmsnorm",
            "use_k_shift",
            "use_v_shift",
            "using_groupnorm",
            "use_output_gate",
        )
        if (
            d.tensor > 1
            and m.attention_layers
            and (given := [name for name in alone if getattr(m, name)])
        ):
            raise ValueError(
                f"model.{given[0]}=true is not divided among processes; leave distribution.tensor "
                "at 1"
            )
        if self.optimizer.name == "muon" and (d.mode != "ddp" or d.tensor > 1):
            raise ValueError(
                "optimizer.name=muon needs whole matrices on every process; give "
                "distribution.mode=ddp and distribution.tensor=1, or optimizer.name=adamw"
            )
        if m.residual != "additive" and (d.tensor > 1 or d.context > 1):
            raise ValueError(
                f"model.residual={m.residual} is not divided among processes; leave "
                "distribution.tensor and distribution.context at 1"
            )
        decay = self.schedule.decay_steps
        if decay is not None and decay <= self.schedule.warmup:
            raise ValueError(
                f"schedule.decay_steps={decay} is not above schedule.warmup={self.schedule.warmup}"
            )
        return self

    def fingerprint(self) -> str:
        """Returns 16 hex digits of the keys that decide what is learned:
        equal digits, the same curve.
        """
        mathematics = {
            key: value for key, value in flatten(self) if not is_one_of(key, NOT_MATHEMATICS)
        }
        return hashlib.sha256(json.dumps(mathematics, sort_keys=True).encode()).hexdigest()[:16]


# Keys and sections that change where, how fast and how visibly a run happens, not what it computes.
NOT_MATHEMATICS = frozenset(
    (
        *("name", "out", "device", "backend", "compile", "gradient_checkpointing", "deterministic"),
        *("max_minutes", "batch.micro", "data.folder", "evaluation", "sample"),
        *("checkpoint", "log", "distribution"),
    )
)
# Keys that may name a path of one node's own. Processes with other paths there compare the tokens
# instead.
OF_ONE_NODE = frozenset(("data.source", "data.validation", "data.tokenizer"))
# Keys that `resume` may change. With other crops the validation losses of one run could not be
# compared.
RESUMABLE = (NOT_MATHEMATICS | {"steps", "epochs"}) - {"name", "out"}
NOT_RESUMABLE = frozenset(("evaluation.sequences", "evaluation.seed"))


def is_one_of(key: str, keys: frozenset[str]) -> bool:
    """Whether the key or one of its sections is listed."""
    parts = key.split(".")
    return any(".".join(parts[:n]) in keys for n in range(1, len(parts) + 1))


def may_change_on_resume(key: str) -> bool:
    return is_one_of(key, RESUMABLE) and key not in NOT_RESUMABLE


def flatten(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value as JSON has it) of every leaf, in order of declaration."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value


def declaration(key: str) -> Any:
    """Returns pydantic's record of a key: its type is `annotation`, its meaning `description`."""
    section: Any = RunConfig
    *path, name = key.split(".")
    for part in path:
        section = section.model_fields[part].annotation
    return section.model_fields[name]


def differences(saved: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns key -> (saved, now) wherever two configurations differ."""
    mine = dict(flatten(now))
    return {key: (value, mine[key]) for key, value in flatten(saved) if mine[key] != value}


def validate(tree: dict[str, Any], where: str = "") -> RunConfig:
    """Returns the configuration of a nested dictionary.
    ConfigError names every wrong key and value.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(where + explain(error)) from None
