"""Models that plugins register with vLLM's registry, served by opgraft's engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import LLM, SamplingParams
from opgraft.errors import ModelError, PluginError
from safetensors.torch import load_file, save_file
from support.small_words import word_llama
from support.vllm_plugin import imports_forgotten, install_bridge

ENTRY = """
def register():
    from vllm import ModelRegistry

    ModelRegistry.register_model("LlamaForCausalLM", "acme_models.model:FirstForCausalLM")
    ModelRegistry.register_model("MixedForCausalLM", "acme_models.model:MixedForCausalLM")
    ModelRegistry.register_model("ShortForCausalLM", "acme_models.model:ShortForCausalLM")
    ModelRegistry.register_model("AcmeForCausalLM", "acme_models.model:AcmeForCausalLM")
    ModelRegistry.register_model("FirstForCausalLM", "acme_models.model:FirstForCausalLM")
    ModelRegistry.register_model("LackingForCausalLM", "acme_models.lacking:Lacking")
    ModelRegistry.register_model("UsualForCausalLM", "acme_models.usual:UsualForCausalLM")
    ModelRegistry.register_model("RefusedForCausalLM", "acme_models.usual:UsualForCausalLM")

    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    class Checks(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_config(vllm_config):
            vllm_config.scheduler_config.max_num_seqs = 3

    class Refuses(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_model_config(model_config):
            raise ValueError(f"acme serves no {model_config.dtype}")

    MODELS_CONFIG_MAP["UsualForCausalLM"] = Checks
    MODELS_CONFIG_MAP["RefusedForCausalLM"] = Refuses
"""

MODEL = """
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


class SelfAttention(nn.Module):
    def __init__(self, config, quant_config, prefix):
        super().__init__()
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        size = config.hidden_size // heads
        self.sizes = [heads * size, kv * size, kv * size]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, size, heads, kv, bias=False, quant_config=quant_config, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(
            heads * size, config.hidden_size, bias=False, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )
        self.rotary_emb = get_rope(
            size, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
        )
        self.attn = Attention(
            heads, size, scale=size**-0.5, num_kv_heads=kv, cache_config=get_current_vllm_config().cache_config,
            quant_config=quant_config, prefix=f"{prefix}.attn",
        )

    def forward(self, positions, hidden):
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split(self.sizes, dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class Layer(nn.Module):
    def __init__(self, config, quant_config, prefix):
        super().__init__()
        self.self_attn = SelfAttention(config, quant_config, f"{prefix}.self_attn")
        self.mlp = Mlp(config, quant_config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions, hidden, residual):
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Mlp(nn.Module):
    def __init__(self, config, quant_config, prefix):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.intermediate_size] * 2, bias=False, quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=False, quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.act = SiluAndMul()

    def forward(self, x):
        return self.down_proj(self.act(self.gate_up_proj(x)[0]))[0]


class Inner(nn.Module):
    def __init__(self, vllm_config, prefix):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = self.made_layers(config, vllm_config.quant_config, prefix)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def made_layers(self, config, quant_config, prefix):
        return nn.ModuleList(
            Layer(config, quant_config, f"{prefix}.layers.{index}") for index in range(config.num_hidden_layers)
        )

    def forward(self, input_ids, positions):
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)[0]


class AcmeForCausalLM(nn.Module):
    inner_class = Inner
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.model = self.inner_class(vllm_config, "model")
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states):
        return self.logits_processor(self.lm_head, hidden_states)


class MixedForCausalLM(AcmeForCausalLM):
    packed_modules_mapping = {
        "qkv_proj": ["v_proj", "q_proj", "k_proj"], "gate_up_proj": ["gate_proj", "up_proj"],
        "o_proj": ["o_proj"], "lm_head": ["lm_head"],
    }


class ShortForCausalLM(AcmeForCausalLM):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "kv_proj"]}


class FirstForCausalLM(AcmeForCausalLM):
    # Foretells the first token of the vocabulary, whatever comes before.
    def compute_logits(self, hidden_states):
        logits = super().compute_logits(hidden_states)
        logits.zero_()
        logits[:, 0] += 1.0
        return logits
"""

USUAL = """
from vllm.compilation.decorators import support_torch_compile
from vllm.model_executor.models.interfaces import HasInnerState, SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import (
    PPMissingLayer, WeightsMapper, is_pp_missing_parameter, make_empty_intermediate_tensors_factory, make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from .model import AcmeForCausalLM, Inner, Layer


@support_torch_compile
class UsualInner(Inner):
    def made_layers(self, config, quant_config, prefix):
        self.start_layer, self.end_layer, layers = make_layers(
            config.num_hidden_layers, lambda prefix: Layer(config, quant_config, prefix),
            prefix=maybe_prefix(prefix, "layers"),
        )
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], config.hidden_size
        )
        return layers


class UsualForCausalLM(AcmeForCausalLM, SupportsLoRA, SupportsPP):
    inner_class = UsualInner
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"language.": "model.", "unused.": None}, orig_to_new_substr={".attention.": ".self_attn."},
    )

    def forward(self, input_ids, positions, intermediate_tensors: IntermediateTensors | None = None):
        assert intermediate_tensors is None
        layers = self.model.layers
        assert (self.model.start_layer, self.model.end_layer) == (0, len(layers))
        assert not any(isinstance(layer, PPMissingLayer) for layer in layers)
        assert not is_pp_missing_parameter("model.norm.weight", self)
        return super().forward(input_ids, positions)
"""

LACKING = """
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.opt import OPTForCausalLM


class Lacking(OPTForCausalLM, SupportsPP):
    pass
"""

PROMPTS = [{"prompt_token_ids": [5, 9, 4, 7]}, {"prompt_token_ids": [8, 3]}]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def registered(site: Any) -> Any:
    """A plugin with models, installed beside the bridge."""
    install_bridge(site)
    files = {
        "acme_models/__init__.py": ENTRY,
        "acme_models/model.py": MODEL,
        "acme_models/lacking.py": LACKING,
        "acme_models/usual.py": USUAL,
    }
    points = {"vllm.general_plugins": ["acme_models = acme_models:register"]}
    site.install("acme-models", files, points, requires=())
    with imports_forgotten():
        yield site


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small Llama with random weights."""
    return word_llama(tmp_path)


def answered(checkpoint: Path, architecture: str) -> list[list[int]]:
    """The greedy tokens of a checkpoint under another architecture."""
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [architecture]}))
    settings = {"load.progress": False, "cache.num_blocks": 100}
    with LLM(str(checkpoint), dtype="float32", **settings) as llm:
        return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY)]


def test_a_model_of_a_plugin_is_served(registered: Any, checkpoint: Path) -> None:
    """A Llama of vLLM's layers answers as opgraft's own Llama does, of the same checkpoint."""
    own = answered(checkpoint, "LlamaForCausalLM")
    assert answered(checkpoint, "AcmeForCausalLM") == own
    assert answered(checkpoint, "FirstForCausalLM") == [[0] * 6, [0] * 6]


def test_an_architecture_of_opgraft_keeps_its_model(
    registered: Any, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A plugin's model for it is left out with a warning, and the models after it are registered."""
    own = answered(checkpoint, "LlamaForCausalLM")
    assert own != [[0] * 6, [0] * 6]
    assert "a plugin for 'LlamaForCausalLM' is left out, as the architecture has one" in caplog.text
    assert answered(checkpoint, "AcmeForCausalLM") == own


def test_the_table_of_merged_layers(registered: Any, checkpoint: Path) -> None:
    """Its layers of attention may have any order, a row may merge nothing, and two layers are refused."""
    own = answered(checkpoint, "LlamaForCausalLM")
    assert answered(checkpoint, "MixedForCausalLM") == own
    with pytest.raises(ModelError, match="has 2 layers for 'qkv_proj', a QKVParallelLinear"):
        answered(checkpoint, "ShortForCausalLM")


def test_a_model_with_the_usual_helpers(
    registered: Any, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bases, helpers and names of weights, as models of vLLM have them; its checks change nothing and may refuse."""
    own = answered(checkpoint, "LlamaForCausalLM")
    file = checkpoint / "model.safetensors"
    renamed = {
        name.replace("model.", "language.").replace(".self_attn.", ".attention."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed | {"unused.weight": torch.zeros(3)}, file)
    assert answered(checkpoint, "UsualForCausalLM") == own
    words = "plugin of the model 'UsualForCausalLM' sets scheduler_config.max_num_seqs to 3, to no effect"
    assert words in caplog.text
    with pytest.raises(PluginError, match=r"acme serves no torch\.float32"):
        answered(checkpoint, "RefusedForCausalLM")


def test_a_model_with_missing_names_says_so(registered: Any, checkpoint: Path) -> None:
    """Registered, it costs nothing. Asked for, it is an error with file and line."""
    words = (
        r"makes an instance of Lacking, a class that derives from "
        r"vllm\.model_executor\.models\.opt\.OPTForCausalLM"
    )
    with pytest.raises(PluginError, match=words):
        answered(checkpoint, "LackingForCausalLM")
