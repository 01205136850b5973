"""Models that were trained before: opened, given adapters where asked, and saved as others can open them.

A model of ours computes as it does in any run. A Gated DeltaNet model of transformers keeps its own layers,
with our operations inside (`delta_trn.patch_transformers`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from delta_trn.models.layers import at_least_float32
from delta_trn.train.checkpoints.contents import without_bars
from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.data.loader import IGNORED
from delta_trn.train.data.packing import ConversationDataset, load_conversations
from delta_trn.train.parallel.sharding import Sharding
from delta_trn.train.parallel.team import Team
from delta_trn.train.run.model import checkpoint_blocks, choose_backend
from delta_trn.train.settings.errors import CheckpointError, ConfigError, TrainError
from delta_trn.train.settings.schema import RunConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RATE = 2e-5  # of models whose own rate is not known
SHARE = 20  # our models begin at their own peak rate over this


def with_folder(config: RunConfig) -> RunConfig:
    """Returns the configuration with whole paths, that of a run's folder replaced by its checkpoint.

    ConfigError if there is no model to begin with, or if a setting asks for what fine-tuning does not have.
    """
    if config.model.pretrained is None:
        raise ConfigError(
            "data.loader=conversations is for fine-tuning: give model.from=DIR, the folder of a model"
        )
    if config.data.loader != "conversations":
        raise ConfigError(
            f"model.from is for fine-tuning on conversations, not for data.loader={config.data.loader}: use "
            "the recipe finetune"
        )
    d = config.distribution
    if d.mode != "ddp" or d.tensor > 1 or d.context > 1:
        raise ConfigError(
            "fine-tuning has whole models in every process: leave distribution.mode, .tensor and .context"
        )
    paths = {
        name: str(Path(value).expanduser().absolute())
        for name in ("source", "validation", "chat_template")
        if (value := getattr(config.data, name)) not in (None, "turns")
    }
    folder = find_model(Path(config.model.pretrained).expanduser().absolute())
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=paths),
            "model": config.model.model_copy(update={"from": str(folder)}),
        }
    )


def find_model(folder: Path) -> Path:
    """Returns the folder of a model: a run's best or newest checkpoint, or else the folder itself."""
    if (folder / "checkpoints").is_dir():
        store = RunFolder(folder).checkpoints
        best, steps = store.require_best(), store.steps()
        if best is None and not steps:
            raise ConfigError(f"model.from={folder} is a run without a checkpoint; let it reach one first")
        folder = best.resolve() if best is not None else store.require_whole(steps[-1])
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"model.from={folder} has adapters and no model; merge them first, with `delta-trn export RUN "
            "--to DIR`, and give DIR"
        )
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is no folder"
        raise ConfigError(
            f"model.from={folder} {what}; give a run's folder, or one with config.json and weights, as "
            "`hf download NAME --local-dir DIR` makes it"
        )
    return folder


def own_rate(folder: Path) -> float:
    """Returns the learning rate with which to fine-tune a model if nobody says another.

    A model of a run of ours gets a twentieth of that run's, for base_width as there: muP's factors apply. A
    model that was fine-tuned here gets the same again.
    """
    path = find_model(folder) / "state.json"
    if not path.is_file():
        return RATE
    config = json.loads(path.read_bytes())["config"]
    if config["model"].get("from") is not None:
        return config["optimizer"]["lr"]
    return config["optimizer"]["lr"] / SHARE


def load_dataset(config: RunConfig) -> ConversationDataset:
    """Renders the conversations of a run. ConfigError if tokenizer or rows do not fit the model's sizes."""
    folder = Path(str(config.model.pretrained))
    dataset = load_conversations(config.data, folder, config.batch.length)
    sizes = _sizes(folder)
    rows, ids = sizes.vocab_size, dataset.tokenizer.size
    if rows < ids:
        raise ConfigError(
            f"the tokenizer in {folder} has {ids} ids, and the model {rows} rows for them: they do not "
            "belong together; copy the model's own tokenizer there"
        )
    longest = getattr(sizes, "max_position_embeddings", None)
    if sizes.model_type == "delta_trn" and sizes.positions == "rope":
        longest = None  # RoPE of our models has no table
    if longest is not None and config.batch.length > longest:
        raise ConfigError(
            f"batch.length={config.batch.length} is above the model's max_position_embeddings={longest}; "
            "give that or less"
        )
    return dataset


def _sizes(folder: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    import delta_trn  # noqa: F401 - registers our models

    try:
        return AutoConfig.from_pretrained(folder).get_text_config()
    except (ValueError, KeyError, OSError):
        content = json.loads((folder / "config.json").read_bytes())
        if "vocab_size" not in content:
            raise ConfigError(
                f"model.from={folder}: transformers does not know this model, model_type="
                f"{content.get('model_type')!r}; give another"
            ) from None
        from transformers import PretrainedConfig

        return PretrainedConfig(**content)


def load(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Returns the model of a folder, in a dtype or as stored. ConfigError if there is none that fits."""
    from delta_trn.models.ecosystem.weights import load_model

    try:
        with without_bars():
            return load_model(folder, dtype)
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise ConfigError(f"model.from={folder} cannot be loaded: {error}") from error


def prepare(
    model: nn.Module, config: RunConfig, device: torch.device, precision: str
) -> tuple[str, Callable[..., Tensor]]:
    """Chooses who computes a model's operations. Returns the backend, and the function of its loss.

    Raises BackendRefusal, with every reason, if there is nobody.
    """
    from delta_trn.models import DeltaForCausalLM
    from delta_trn.models.ecosystem import patch_transformers

    if isinstance(model, DeltaForCausalLM):
        backend = choose_backend(model.config, config, device, precision)
        return backend, model.loss
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{type(model).__name__} does not run on {device.type}: there our kernels cover our own models, "
            "and the rest of this model's layers is transformers'; use a GPU or a CPU"
        )
    named = None if config.backend == "auto" else config.backend
    try:
        patch = patch_transformers(model, backend=named)
    except ValueError as error:
        raise ConfigError(f"model.from={config.model.pretrained}: {error}") from error
    kernels = next(row.kernels for row in patch.rows if row.kernels)

    def loss(inputs: Tensor, targets: Tensor, position_ids: Tensor, noise: Tensor | None = None) -> Tensor:
        # logits take more memory than all the rest: only those that are scored
        scored = (targets != IGNORED).any(0).nonzero().flatten()
        output = model(
            input_ids=inputs, position_ids=position_ids.long(), use_cache=False, logits_to_keep=scored
        )
        goals = targets[:, scored].flatten()
        total = F.cross_entropy(
            at_least_float32(output.logits.flatten(0, 1)), goals, ignore_index=IGNORED, reduction="sum"
        )
        return total / (goals != IGNORED).sum().clamp(min=1)

    return kernels["gated_delta_rule"], loss


def adapt(model: nn.Module, config: RunConfig) -> nn.Module:
    """Returns the model with adapters, which alone are trained. ConfigError if no layer has the names."""
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError:
        raise TrainError("lora.rank needs the package peft: pip install peft") from None
    lora = config.lora
    everywhere = lora.targets == ("all-linear",)
    settings = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules="all-linear" if everywhere else list(lora.targets),
        lora_dropout=0.0,
    )
    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    head = cast(Any, model).get_output_embeddings()
    linear -= {name for name, m in model.named_modules() if m is head}
    if not everywhere and (unknown := set(lora.targets) - linear):
        raise ConfigError(
            f"lora.targets={','.join(lora.targets)}: {', '.join(sorted(unknown))} is no linear layer that "
            f"can have an adapter; this model has {', '.join(sorted(linear))}"
        )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT warns that its own settings for experts match nothing in a model without them
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        torch.manual_seed(config.seed)
        return get_peft_model(model, settings)  # type: ignore[arg-type]


def make_sharding(config: RunConfig, device: torch.device, team: Team) -> tuple[RunConfig, Pretrained]:
    """Returns the model of `model.from`, ready to train, and the configuration with the backend's name."""
    folder = Path(str(config.model.pretrained))
    # autocast rounds frozen weights anyway: they may stay as they are stored
    frozen = config.lora.rank > 0 and config.precision == "bf16"
    model = load(folder, None if frozen else torch.float32)
    model.to(device)
    if team.world > 1 and device.type == "xla":
        raise ConfigError("fine-tuning on Trn1 is for one process: several are not tied in yet; start one")
    cast(Any, model).tie_weights()  # moving to XLA makes two matrices of one that has two names
    backend, loss = prepare(model, config, device, config.precision)
    if config.gradient_checkpointing:
        checkpoint_blocks(model, device)
    if config.lora.rank:
        model = adapt(model, config)
    model.train()
    return config.model_copy(update={"backend": backend}), Pretrained(model, team, loss)


class Pretrained(Sharding):
    """A pretrained model, whole in every process; the leader writes what is saved of it.

    With adapters, only they are saved, in PEFT's files.
    """

    leader_saves = True
    may_lack_memory = True  # no gradient reaches the indexer of some models, and so no memory of one

    def __init__(self, model: nn.Module, team: Team, loss: Callable[..., Tensor]):
        super().__init__(cast(Any, model), team, loss)
        self.adapters = hasattr(model, "peft_config")
        if team.mesh is not None:
            self._replicate(team.mesh["replica"].get_group(), find_unused_parameters=True)

    def tensors(self) -> dict[str, Tensor]:
        if self.adapters:
            return {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return super().tensors()

    def whole(self, name: str, x: Tensor) -> Tensor:
        return x.detach()

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        options: Any = {"save_embedding_layers": False} if self.adapters else {}
        self.model.save_pretrained(folder, state_dict=weights, **options)

    def load(self, folder: Path) -> None:
        """Puts saved weights, or adapters, into the model, bit for bit."""
        if self.adapters:
            load_adapters(self.model, folder)
            return
        saved = load(folder, torch.float32).state_dict()
        try:
            self.model.load_state_dict(saved)
        except RuntimeError as error:
            raise CheckpointError(f"the weights in {folder} are not this model's: {error}") from error


def load_adapters(model: nn.Module, folder: Path) -> None:
    """Puts saved adapters into a model that has them. CheckpointError unless they are those of this model."""
    from peft import load_peft_weights, set_peft_model_state_dict
    from peft.utils import get_peft_model_state_dict

    saved = load_peft_weights(str(folder), device="cpu")
    own = get_peft_model_state_dict(model, save_embedding_layers=False)  # type: ignore[arg-type]
    shapes = [{name: tuple(x.shape) for name, x in tensors.items()} for tensors in (saved, own)]
    if shapes[0] != shapes[1]:
        raise CheckpointError(f"the adapters in {folder} are not this run's; begin a new run")
    set_peft_model_state_dict(model, saved)


def open_result(folder: Path, base: str, device: torch.device) -> nn.Module:
    """Returns a model that was fine-tuned into a checkpoint's folder, adapters merged into its weights.

    base    the folder of the model that adapters belong to
    """
    adapters = (folder / "adapter_config.json").is_file()
    model = load(Path(base) if adapters else folder, torch.float32).to(device)
    patch_quietly(model)
    if adapters:
        from peft import PeftModel

        model = cast(Any, PeftModel.from_pretrained(cast(Any, model), folder)).merge_and_unload()
    return model.eval()


def patch_quietly(model: nn.Module) -> None:
    """Computes a model of transformers with our operations, without the report: output is a text."""
    import contextlib
    import io

    from delta_trn.models import DeltaForCausalLM
    from delta_trn.models.ecosystem import patch_transformers

    if not isinstance(model, DeltaForCausalLM):
        with contextlib.redirect_stdout(io.StringIO()):
            patch_transformers(model)
