"""``DecoderPlan``: one call for all layers of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from opgraft.binding.pluggable_class import PluggableClass
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a decoder layer with attention and a gated feed-forward layer.

    Each of the two follows a norm, and its result is added to the residual stream.

    Attributes:
        before_attention: the norm before attention. The call adds its first argument to the
            residual stream.
        qkv_proj: maps to query, key and value, one after another.
        rotary_emb: rotates query and key.
        attn: the attention layer.
        o_proj: maps the attended values.
        before_mlp: the norm before the feed-forward layer, as ``before_attention``.
        gate_up_proj: maps to gate and up, one after another.
        act_fn: multiplies the activation of gate by up.
        down_proj: maps this product.
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
    """A layer made of ``DecoderParts``."""

    def parts(self) -> DecoderParts | None:
        """Return the parts; ``None`` if the layer has other parts, too."""


@runtime_checkable
class HasPlan(Protocol):
    """A model with a plan for calls."""

    def planned(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor | None:
        """Return the model's result if a ``DecoderPlan`` computes all layers, else ``None``."""


@PluggableClass.register("decoder_plan")
class DecoderPlan(PluggableClass):
    """Computes all layers of a decoder in one call, for platforms with a replacement.

    Without a plan, the call of a layer calls its modules between the kernels. For one token, these
    calls take as long as a read of a part of the weights. A replacement binds the kernels once. The
    results must be those of the modules. In cases that the replacement does not know, the modules
    must run: hooks, replaced modules and methods, gradients, tracers.
    """

    takes_adapters: ClassVar[bool] = False
    """True if ``run`` adds the adapters of the present call; if not, the modules run for them.

    ``adapter_bounds`` tells the rows of each adapter, and ``quant_method.adapters`` of a layer is
    the op with the matrices.
    """

    def run(
        self, layers: nn.ModuleList, positions: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Compute all layers, or return ``None``: then the caller calls the layers one by one.

        Args:
            layers: the layers of the decoder. A layer with known parts is a ``HasParts``.
            positions: ``[tokens]``.
            hidden_states: ``[tokens, hidden_size]``, the input of the first layer.

        Returns:
            The output of the last layer, and the residual stream before the sum of both.
        """
        return None

    def declines(self, layers: nn.ModuleList, positions: Tensor, dtype: torch.dtype) -> bool:
        """Return True if ``run`` would return ``None`` for every input of a dtype.

        Args:
            layers: as for ``run``.
            positions: as for ``run``.
            dtype: the dtype of the input.
        """
        return True

    def remark(self, owner: object) -> str:
        """Describe the use of the plan for ``owner``.

        A replacement counts the calls, and gives the reasons for calls of the modules.
        """
        return "computes nothing, so the modules of layers are called"
