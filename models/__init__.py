"""Delta-rule language models as `transformers` models. `AutoModelForCausalLM` knows them once this is imported."""

from transformers import AutoConfig, AutoModelForCausalLM

from models.cache import DeltaCache
from models.config import SIZES, DeltaConfig, named_size
from models.language_model import DeltaForCausalLM

__all__ = ["SIZES", "DeltaCache", "DeltaConfig", "DeltaForCausalLM", "named_size"]

AutoConfig.register(DeltaConfig.model_type, DeltaConfig, exist_ok=True)
AutoModelForCausalLM.register(DeltaConfig, DeltaForCausalLM, exist_ok=True)
