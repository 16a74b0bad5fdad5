"""Layers for Hugging Face's package ``kernels``; ``make test-hosts`` runs them in the package itself."""

from __future__ import annotations

from types import MethodType
from typing import Any

import opgraft
import pytest
import torch
from opgraft.grafting import hub_layers

PLUGIN = """
import opgraft, torch
from opgraft.ops import RMSNorm
platforms = "any"
class Norm(RMSNorm):
    functional_oot = {"rms_norm": lambda x, weight, eps=0.0, variance_size=None: x * weight + eps}
@opgraft.hookimpl
def opgraft_register_ops():
    RMSNorm.register_oot(Norm)
"""


def module_of(name: str) -> Any:
    """A module of transformers that carries the name of the layer."""
    transformers = pytest.importorskip("transformers")
    activations = {
        "SiLU": "silu",
        "GeLU": "gelu",
        "GeluTanh": "gelu_pytorch_tanh",
        "NewGELU": "gelu_new",
        "FastGELU": "gelu_fast",
        "QuickGELU": "quick_gelu",
    }
    if name in activations:
        return transformers.activations.ACT2FN[activations[name]]
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(8, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("layer", hub_layers._LAYERS, ids=lambda layer: layer.__name__)
def test_a_layer_computes_what_the_module_does(fresh_host: None, layer: Any) -> None:
    """The forward, bound to a module of transformers, gives the module's results and gradients."""
    module = module_of(layer.__name__)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    expected = module.double()(x)
    found = MethodType(layer.forward, module)(x)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    (theirs,) = torch.autograd.grad(expected.sum(), x)
    (ours,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_layers_with_kernels_are_offered(site: Any) -> None:
    """Without a plugin there is none; a plugin's form is offered under its name, and runs."""
    assert opgraft.kernel_mapping() == {}
    site.plugin("acme", PLUGIN)
    opgraft.reset()
    mapping = opgraft.kernel_mapping()
    assert mapping.keys() == {"RMSNorm"}
    offered = mapping["RMSNorm"]["cpu"]
    assert "acme" in str(offered)
    norm = module_of("RMSNorm")
    x = torch.randn(3, 8)
    found = MethodType(offered.load().forward, norm)(x)
    torch.testing.assert_close(found, x * norm.weight + 1e-3)
