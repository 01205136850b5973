"""Delta-rule language models as `transformers` models; once imported, `AutoModelForCausalLM` knows them."""

from transformers import AutoConfig, AutoModelForCausalLM

from delta_trn.models.cache import DeltaCache
from delta_trn.models.config import DeltaConfig
from delta_trn.models.language_model import DeltaForCausalLM
from delta_trn.models.sizes import named_sizes

__all__ = ["DeltaCache", "DeltaConfig", "DeltaForCausalLM", "named_sizes"]

AutoConfig.register(DeltaConfig.model_type, DeltaConfig, exist_ok=True)
AutoModelForCausalLM.register(DeltaConfig, DeltaForCausalLM, exist_ok=True)
