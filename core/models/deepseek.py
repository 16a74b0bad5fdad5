"""DeepSeek-V2 and V3: decoders with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.models.decoder import PACKED_MODULES, DecoderForCausalLM
from opgraft.models.decoder_config import DecoderFamily
from opgraft.models.given import GivenSettings
from opgraft.models.names import ShardId


@PluggableClass.register("DeepseekV2ForCausalLM")
class DeepseekV2ForCausalLM(DecoderForCausalLM):
    """DeepSeek-V2 (arXiv:2405.04434): latent attention."""

    family = DecoderFamily(latent=True, qkv_bias=None)
    packed_modules_mapping: ClassVar[Mapping[str, Mapping[str, ShardId]]] = {
        **PACKED_MODULES,
        "fused_qkv_a_proj": {"q_a_proj": 0, "kv_a_proj_with_mqa": 1},
    }

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        # Without a checkpoint there are no tensors to ignore.
        if self.config is None:
            return
        # Checkpoints have further layers after the last one, which predict more tokens in training.
        first = self.stage.num_layers
        further = GivenSettings(self.config).count("num_nextn_predict_layers")
        self.ignored_weights = [
            f"model.layers.{number}.*" for number in range(first, first + further)
        ]


@PluggableClass.register("DeepseekV3ForCausalLM")
class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3 and R1 (arXiv:2412.19437): as DeepSeek-V2."""
