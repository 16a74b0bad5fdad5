"""Experts in a model of transformers: find the modules by a call, and make layers for them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from opgraft.grafting import graft
from opgraft.grafting.experts import experts_recogniser, has_experts
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.moe.fused import TransformersFusedMoE
from opgraft.ops.moe.fused.placement import ExpertSharing
from torch import Tensor, nn

_TENSORS = 3
"""Arguments of experts: hidden states, the chosen ids, and the weights of these."""

_ID_DTYPES = (torch.int32, torch.int64)
"""Dtypes of ids. Experts that take the weights before the ids are of another kind."""


class ExpertsRecorder:
    """Notes how many experts each token visits, by the module of experts.

    Attributes:
        choices: module of experts → experts of a token. A module with another call has no entry.
    """

    def __init__(self, model: nn.Module) -> None:
        self.choices: dict[nn.Module, int] = {}
        for module in model.modules():
            if has_experts(module):
                module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        is_usual = len(given) == _TENSORS and not named
        ids = given[1] if is_usual else None
        if isinstance(ids, Tensor) and ids.dim() == 2 and ids.dtype in _ID_DTYPES:
            self.choices[module] = ids.shape[-1]


class ExpertLayers:
    """Makes layers of experts for the experts of one model.

    Args:
        quant_config: chooses the weight methods.
        sharing: the way in which ranks share the experts.
    """

    def __init__(self, quant_config: QuantizationConfig | None, sharing: ExpertSharing) -> None:
        self._quant_config = quant_config
        self._sharing = sharing
        # Trials of one kind of module hold for the whole model.
        self._recognise = experts_recogniser()

    def layer(self, module: nn.Module, top_k: int, prefix: str) -> TransformersFusedMoE | None:
        """Return the layer for a module, or ``None`` for a module that is none of experts.

        Args:
            module: without memory.
            top_k: experts of a token.
            prefix: the name of the module in the checkpoint.

        Raises:
            LeaveAlone: the module computes something else.
        """
        found = self._recognise(_with_ops(module))
        if found is None:
            return None
        dtype = next(module.parameters()).dtype
        return TransformersFusedMoE(
            found["num_experts"],
            top_k,
            found["hidden_size"],
            found["intermediate_size"],
            params_dtype=dtype,
            reduce_results=True,
            quant_config=self._quant_config,
            prefix=prefix,
            activation=found["activation"],
            has_bias=found["bias"],
            transposed_checkpoint=found["transposed"],
            ep_size=self._sharing.ranks,
            enable_eplb=self._sharing.records,
            num_redundant_experts=self._sharing.redundant,
        )


def _with_ops(module: nn.Module) -> nn.Module:
    """Return a copy of a module of experts with ops as children, such as the activation."""
    children = nn.Module()
    for name, child in module.named_children():
        # A graft replaces the children of children in place, and the module itself may stay.
        children.add_module(name, copy.deepcopy(child))
    graft(children)
    made = copy.copy(module)
    made.__dict__["_modules"] = children._modules
    return made
