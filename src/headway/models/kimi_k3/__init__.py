"""Kimi-K3, as a model of transformers: importing this makes its Auto classes know `kimi_k3`.

Text only: the tower for images is left. What Kimi-K3 shares with Kimi-Linear (KDA, latent attention, the router) is
transformers' own; what it adds stands in `modeling`. Published checkpoints load by the names in `weights`.
"""

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from headway.models.kimi_k3.configuration import KimiK3Config
from headway.models.kimi_k3.modeling import KimiK3ForCausalLM, KimiK3Model
from headway.models.kimi_k3.weights import published_names

__all__ = ["KimiK3Config", "KimiK3ForCausalLM", "KimiK3Model"]

AutoConfig.register(KimiK3Config.model_type, KimiK3Config, exist_ok=True)
AutoModelForCausalLM.register(KimiK3Config, KimiK3ForCausalLM, exist_ok=True)
register_checkpoint_conversion_mapping(KimiK3Config.model_type, published_names(), overwrite=True)
