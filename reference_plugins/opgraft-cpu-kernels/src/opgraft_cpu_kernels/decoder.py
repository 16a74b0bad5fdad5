"""All layers of a decoder in one call, for batches of a few tokens, for which most of the time the weights are read.

The kernels and their order are those that the modules of the layers would call, so that the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from opgraft import CustomOp, functional
from opgraft.binding.functional import binding_of
from opgraft.compat.hooks import hooks_on_every_module
from opgraft.ops.attention.batch import AttentionBatch, current_batch
from opgraft.ops.decoder_plan import DecoderParts, HasParts
from opgraft.ops.decoder_plan import DecoderPlan as Base
from opgraft.ops.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from opgraft.ops.linear.weight_cache import watched
from opgraft.registry.op_classes import definer
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from opgraft_cpu_kernels import attention, kernels, linear, ops, quantized
from opgraft_cpu_kernels.kernels import REFUSED
from opgraft_cpu_kernels.library import path_or_none

FORMS: Mapping[Any, Callable[..., Tensor]] = {
    functional.linear: linear.linear,
    functional.quantized_linear: quantized.quantized_linear,
    functional.int8_dynamic_linear: quantized.int8_dynamic_linear,
}
"""Forms of linear layers that the library calls itself, with the kernels that it then runs."""

LINEAR = (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SETTINGS = (
    *("variance_epsilon", "variance_size_override", "head_size", "is_neox_style", "scale", "sliding_window"),
    *("logits_soft_cap", "sinks", "quant_method", "tp_size", "skip_bias_add", "return_bias", "_packed"),
)
"""The attributes of parts that are read when they are bound."""


class DecoderPlan(Base):
    """Binds the layers of a decoder to the library when it is called first, and anew when something has changed."""

    _bound: _Bound | None = None
    _next_hook = 0

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle as one that has bound nothing yet."""
        return {}

    def run(self, layers: nn.ModuleList, positions: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor] | None:
        if is_dynamo_compiling() or torch.is_grad_enabled() or type(hidden_states) is not Tensor:
            return None
        batch, limit = current_batch(), linear.FEW.get((path_or_none(), hidden_states.dtype), 0)
        if batch is None or len(hidden_states) > limit or watched() or hooks_on_every_module():
            return None
        # To look at every module takes a twentieth of a step. Hooks are numbered: the next number tells of new ones.
        unseen = not batch.continues or self._next_hook != RemovableHandle.next_id
        if self._bound is None or self._bound.layers is not layers or (unseen and not self._bound.holds()):
            self._bound = _Bound(layers)
        self._next_hook = RemovableHandle.next_id
        return self._bound.run(batch, positions, hidden_states)


class _Bound:
    """The layers as the library holds them, if it can, with what must not have changed since they were bound."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.layers = layers
        parts = [layer.parts() if isinstance(layer, HasParts) else None for layer in layers]
        known = [part for part in parts if part is not None]
        self.prefixes = [part.attn.prefix for part in known]
        self.ropes = [part.rotary_emb._buffers for part in known]
        leaves = {getattr(part, field.name) for part in known for field in fields(part)}
        self.modules = list(_reached(layers, leaves))
        self.types = list(map(type, self.modules))
        self.attributes = list(map(vars, self.modules))
        self.lengths = list(map(len, self.attributes))
        self.places = [place for module in self.modules for place in _places(module, module in leaves)]
        self.values = [holder[name] for holder, name in self.places]  # which keeps their ids theirs
        self.ids = list(map(id, self.values))
        self.hooked = self._has_hooks()
        self.decoder = None if self.hooked or len(known) < len(parts) else _decoder(known)

    def _has_hooks(self) -> bool:
        return any(attributes[name] for attributes in self.attributes for name in HOOKS)

    def holds(self) -> bool:
        """Tell whether modules, parameters, settings and hooks are those that were bound."""
        try:
            same = [id(holder[name]) for holder, name in self.places] == self.ids
        except KeyError:
            return False
        same = same and list(map(type, self.modules)) == self.types
        return same and list(map(len, self.attributes)) == self.lengths and self._has_hooks() == self.hooked

    def run(self, batch: AttentionBatch, positions: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor] | None:
        """Compute the layers; ``None`` where that is not for the library, or where it refuses."""
        if self.decoder is None or batch.block_size % attention.GROUP:
            return None
        try:
            pages = [batch.pages[prefix] for prefix in self.prefixes]
        except KeyError:
            return None
        caches = [each.cache for each in pages]
        if any(cache.dtype is not hidden_states.dtype for cache in caches):
            return None
        slots, tables = [each.slots for each in pages], [each.block_table for each in pages]
        ropes = [buffers["cos_sin_cache"] for buffers in self.ropes]
        try:
            return self.decoder.run(  # type: ignore[no-any-return]
                positions, hidden_states, ropes, caches, slots, tables, batch.query_start_loc, batch.seq_lens
            )
        except REFUSED:  # the modules say what is wrong
            return None


def _reached(module: nn.Module, leaves: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module and what it would call, as far as the parts of layers."""
    yield module
    if module not in leaves:
        for child in module.children():
            yield from _reached(child, leaves)


def _places(module: nn.Module, is_leaf: bool) -> Iterator[tuple[dict[str, Any], str]]:
    attributes = vars(module)
    held = module._parameters if is_leaf else module._modules
    yield from ((held, name) for name in held)
    yield from ((attributes, name) for name in SETTINGS if name in attributes)


def _decoder(parts: Sequence[DecoderParts]) -> Any:
    """Make the library's decoder of the layers; ``None`` where a part runs something that is not of the library."""
    decoder = torch.classes.opgraft_cpu_kernels.Decoder()
    for part in parts:
        maps = [_map(layer) for layer in (part.qkv_proj, part.o_proj, part.gate_up_proj, part.down_proj)]
        norms, attn = (part.before_attention, part.before_mlp), part.attn
        if not all(maps) or not all(map(_is_norm, norms)) or not _is_attention(attn):
            return None
        if not _runs(part.act_fn, "silu_and_mul") or not _runs(part.rotary_emb, "rotary_embedding"):
            return None
        if part.rotary_emb.head_size != attn.head_size:
            return None
        before = [value for norm in norms for value in (norm.weight, norm.variance_epsilon)]
        sizes = [attn.num_heads, attn.num_kv_heads, attn.head_size]
        settings = attn.scale, attn.sliding_window, attn.logits_soft_cap, attn.sinks
        decoder.add_layer(*before, maps, sizes, *settings, part.rotary_emb.is_neox_style)
    return decoder


def _is_unchanged(op: Any) -> bool:
    return isinstance(op, CustomOp) and type(op) is op.binding.specialisation and "forward" not in vars(op)


def _runs(op: Any, form: str) -> bool:
    """Tell whether an op runs the kernel of that form."""
    return _is_unchanged(op) and op.binding.kernel.winner.functional(form) is getattr(kernels, form)


def _is_norm(op: Any) -> bool:
    return _runs(op, "fused_add_rms_norm") and op.variance_size_override is None


def _is_attention(op: Any) -> bool:
    return _is_unchanged(op) and op.op_class is ops.Attention and op.head_size % attention.GROUP == 0


def _map(layer: Any) -> tuple[str, list[Tensor | None]] | None:
    """Return the form of a linear layer and its tensors: weight, scales, offsets and bias."""
    if not _is_unchanged(layer) or layer.op_class not in LINEAR or layer.tp_size > 1:
        return None
    if layer.skip_bias_add or layer.return_bias:
        return None
    method = layer.quant_method
    found = method.form_of(layer)
    # A class that overrides only `apply` computes something else than the form that it inherits.
    if found is None or definer(type(method), "apply") is not definer(type(method), "form_of"):
        return None
    form, (weight, *others) = found
    kernel = FORMS.get(form)
    if kernel is None or binding_of(form).kernel.winner.functional(form.name) is not kernel:
        return None
    if form is functional.quantized_linear and not quantized.in_lanes(
        layer.input_size_per_partition, weight, others[0]
    ):
        return None
    scales, offsets = (*others, None, None)[:2]
    return form.name, [weight, scales, offsets, layer.bias]
