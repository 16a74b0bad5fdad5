"""Models that are written against the layers, and their loading."""

from opgraft.models.encoder import BertModel, RobertaModel, XLMRobertaModel
from opgraft.models.families import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GemmaForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from opgraft.models.model import Model, model_class, model_classes

__all__ = [
    "BertModel",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Model",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "RobertaModel",
    "XLMRobertaModel",
    "model_class",
    "model_classes",
]
