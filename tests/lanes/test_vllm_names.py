"""The names of vLLM that have counterparts, compared with a vLLM that is installed, whose source is only read.

'make test-vllm-bridge' installs one.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import runpy

import pytest
from support.vllm_plugin import BRIDGE
from support.vllm_source import definition, needs_vllm, parameters

# The file is run by itself: an import would leave the bridge's package to every other test of this process.
_TABLES = runpy.run_path(str(BRIDGE / "src/opgraft_vllm_bridge/counterparts.py"))
COUNTERPARTS, HINTS, PLATFORM = (_TABLES[name] for name in ("COUNTERPARTS", "HINTS", "PLATFORM"))
ROWS = [
    (module, name, home) for module, names in COUNTERPARTS.items() for name, home in names.items()
]

OTHER_VERSIONS = {
    "vllm.attention.Attention",
    "vllm.attention.layer.Attention",
    "vllm.attention.layer.MLAAttention",
    "vllm.attention.layers.mm_encoder_attention.MMEncoderAttention",
    "vllm.model_executor.layers.fused_moe.FusedMoE",
    "vllm.model_executor.layers.fused_moe.layer.FusedMoE",
    "vllm.model_executor.layers.fused_moe.layer.UnquantizedFusedMoEMethod",
    "vllm.utils.direct_register_custom_op",
}
"""Names at which plugins for other versions find them."""

ATTENTION = {
    *(
        "alibi_slopes",
        "use_alibi_sqrt",
        "cache_config",
        "quant_config",
        "per_layer_sliding_window",
        "attn_type",
    ),
    *(
        "kv_sharing_target_layer_name",
        "mm_prefix_clamp_sliding_window",
        "attn_backend",
        "head_size_v",
    ),
}
LATENT = {
    *(
        "dcp_q_replicate",
        "attn_backend",
        "use_sparse",
        "indexer",
        "topk_indices_buffer",
        "index_group_builder",
    ),
    *("non_causal_multi_token_decode", "sliding_window", "prefill_backend_cls"),
}
DIFFERENT = {
    "Attention": ATTENTION,
    "LinearBase": {"bias", "tp_rank", "tp_size"},
    "MLAAttention": LATENT,
    "MultiHeadLatentAttentionWrapper": {"fuse_qkv_rmsnorm"},
    "ParallelLMHead": {"quant_method"},
    "VocabParallelEmbedding": {"reduce_results", "quant_method", "parallel_group"},
    "maybe_get_oot_by_class": {"class_type"},  # given by position
    "set_weight_attrs": {"weight_attrs"},  # likewise
}
"""Parameters that a counterpart does not take by these names."""


@needs_vllm
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}.{row[1]}")
def test_a_counterpart_takes_what_the_name_takes(row: tuple[str, str, str]) -> None:
    """Each name is where the table says, and its counterpart takes its parameters, but for those listed here."""
    module, name, home = row
    found = definition(module, name)
    if f"{module}.{name}" in OTHER_VERSIONS:
        assert found is None
        return
    assert found is not None
    ours = getattr(importlib.import_module(home), name)
    taken = inspect.signature(ours).parameters if callable(ours) else {}
    if callable(ours) and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        assert set(parameters(*found)) - taken.keys() == DIFFERENT.get(name, set())


@needs_vllm
@pytest.mark.parametrize("name", PLATFORM)
def test_attributes_of_platforms(name: str) -> None:
    """vLLM's platforms have them."""
    found = definition("vllm.platforms.interface", "Platform")
    assert found is not None
    assert isinstance(found[1], ast.ClassDef)
    names = {
        node.target.id
        for node in found[1].body
        if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")
    }
    assert name in names | {
        node.name for node in found[1].body if isinstance(node, ast.FunctionDef)
    }


def test_counterparts_are_there() -> None:
    """Every name of the table is one of opgraft, and no hint speaks of a name that has a counterpart."""
    for module, name, home in ROWS:
        assert hasattr(importlib.import_module(home), name), (module, name)
    assert not {f"{module}.{name}" for module, name, _ in ROWS} & HINTS.keys()
