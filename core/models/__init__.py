"""Models made of opgraft's layers. Checkpoints are checked, read in pieces and loaded."""

from opgraft.config.checkpoints import find_checkpoint
from opgraft.models.bamba import BambaForCausalLM
from opgraft.models.build import load_model
from opgraft.models.config import load_tokenizer, read_config
from opgraft.models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from opgraft.models.description import architecture_config, joined, part_of, quantization_config
from opgraft.models.encoder import (
    BertForSequenceClassification,
    BertModel,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)
from opgraft.models.families import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GemmaForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    OlmoeForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)
from opgraft.models.files import Weights, open_weights
from opgraft.models.hybrid import Lfm2ForCausalLM, Mamba2ForCausalLM, MambaForCausalLM
from opgraft.models.load import LoadReport, load_weights
from opgraft.models.model import Model, model_class, model_classes
from opgraft.models.names import WeightsMapper
from opgraft.models.plamo2 import Plamo2ForCausalLM
from opgraft.models.through_transformers import TransformersForCausalLM, TransformersModel
from opgraft.models.transformers_report import TransformersReport

__all__ = [
    "BambaForCausalLM",
    "BertForSequenceClassification",
    "BertModel",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "Lfm2ForCausalLM",
    "LlamaForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "LoadReport",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Model",
    "Olmo2ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Plamo2ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "RobertaForSequenceClassification",
    "RobertaModel",
    "TransformersForCausalLM",
    "TransformersModel",
    "TransformersReport",
    "Weights",
    "WeightsMapper",
    "XLMRobertaForSequenceClassification",
    "XLMRobertaModel",
    "architecture_config",
    "find_checkpoint",
    "joined",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "model_class",
    "model_classes",
    "open_weights",
    "part_of",
    "quantization_config",
    "read_config",
]
