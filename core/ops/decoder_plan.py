"""``DecoderPlan``, by which the layers of a decoder may be computed as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from opgraft.binding.pluggable_class import PluggableClass
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a layer that adds attention and a gated feed-forward layer, each after a norm, to the residual.

    Attributes:
        before_attention: the norm of the residual stream, called with what is to be added to it.
        qkv_proj: maps to query, key and value, one after another.
        rotary_emb: rotates query and key.
        attn: the attention layer.
        o_proj: maps what it returns.
        before_mlp: as ``before_attention``.
        gate_up_proj: maps to gate and up, one after another.
        act_fn: multiplies them.
        down_proj: maps their product.
    """

    before_attention: Any
    qkv_proj: Any
    rotary_emb: Any
    attn: Any
    o_proj: Any
    before_mlp: Any
    gate_up_proj: Any
    act_fn: Any
    down_proj: Any


@runtime_checkable
class HasParts(Protocol):
    """A layer that is made of such parts."""

    def parts(self) -> DecoderParts | None:
        """Return the parts, where there are no others."""


@runtime_checkable
class HasPlan(Protocol):
    """A model that may compute a call by a plan."""

    def planned(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor | None:
        """Return what the model does, where a ``DecoderPlan`` computes all layers in one call; else ``None``."""


@PluggableClass.register("decoder_plan")
class DecoderPlan(PluggableClass):
    """Computes all layers of a decoder in one call, where a platform has a way to do so; here there is none.

    Between the kernels of a layer its modules are called, which for one token takes as long as a part of the weights
    takes to be read. A replacement binds what the modules compute once. It has to compute what they would, and to leave
    to them what it did not foresee: hooks, replaced modules and methods, gradients, tracers.
    """

    def run(
        self, layers: nn.ModuleList, positions: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return the output of the last layer and the residual stream that it is still to be added to.

        Args:
            layers: of the decoder. Those that have parts say so by ``HasParts``.
            positions: ``[tokens]``.
            hidden_states: ``[tokens, hidden_size]``, the input of the first layer.

        Returns:
            ``None`` where the layers are to be called one after another.
        """
        return None

    def declines(self, layers: nn.ModuleList, positions: Tensor, dtype: torch.dtype) -> bool:
        """Tell whether it is known before there is an input that ``run`` would leave a call to the layers.

        Args:
            layers: as of ``run``.
            positions: as of ``run``.
            dtype: of the input.
        """
        return True

    def remark(self, owner: object) -> str:
        """Say for whom the layers are computed in one call; a replacement, also how often and why not more often."""
        return "computes nothing, so the modules of layers are called"
