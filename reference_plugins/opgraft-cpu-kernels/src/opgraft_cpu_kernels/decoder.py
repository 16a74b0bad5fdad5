"""All layers of a decoder in one call, for batches of few tokens.

The limit is that of linear layers: up to so many rows, weights are read as they lie in memory.
Kernels and their order are those of the modules, so that results have the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from opgraft import CustomOp, functional
from opgraft.distributed import get_tp_group
from opgraft.kernels import (
    LARGEST_CODES,
    Binding,
    DecoderParts,
    HasParts,
    adapter_bounds,
    binding_of,
    form_called,
    hidden_by,
    hooks_on_every_module,
    watched,
)
from opgraft.kernels import DecoderPlan as Base
from opgraft.ops import (
    AttentionBatch,
    LayerPages,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    current_batch,
)
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from opgraft_cpu_kernels import attention, kernels, linear, lora, lossless, ops, quantized
from opgraft_cpu_kernels.communicator import SharedMemoryCommunicator
from opgraft_cpu_kernels.kernels import REFUSED
from opgraft_cpu_kernels.library import path_or_none

FORMS: Mapping[Any, Callable[..., Tensor]] = {
    functional.linear: linear.linear,
    functional.quantized_linear: quantized.quantized_linear,
    functional.int8_dynamic_linear: quantized.int8_dynamic_linear,
    functional.lossless_linear: lossless.lossless_linear,
}
"""Form of a linear layer → this plugin's kernel. The library calls these forms itself."""

LINEAR = (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SETTINGS = (
    "eps",
    "variance_epsilon",
    "variance_size_override",
    "head_size",
    "is_neox_style",
    "scale",
    "sliding_window",
    "logits_soft_cap",
    "sinks",
    "tp_size",
    "skip_bias_add",
    "return_bias",
    "_packed",
    "gather_output",
    "input_is_parallel",
    "reduce_results",
)
"""The attributes of parts that are read when the parts are bound."""


class DecoderPlan(Base):
    """Binds the layers of a decoder to the library at the first call, and again after a change."""

    takes_adapters: ClassVar[bool] = True
    _bound: _Bound | None = None
    _next_hook = 0
    _unseen = True
    _computed = 0

    @cached_property
    def _left(self) -> Counter[str]:
        """The number of calls that the modules computed, by reason."""
        return Counter()

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a copy binds its own layers."""
        return {}

    def run(
        self, layers: nn.ModuleList, positions: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        if is_dynamo_compiling():
            return None
        batch = current_batch()
        reason = self._reason(layers, hidden_states, hidden_states.dtype)
        if batch is not None and self._bound is not None and not reason:
            try:
                result = self._bound.run(batch, positions, hidden_states)
            # The modules raise the error that users of opgraft know.
            except REFUSED:
                reason = "the library refuses an argument"
            else:
                self._computed += 1
                return result
        self._left[reason] += 1
        return None

    def declines(self, layers: nn.ModuleList, positions: Tensor, dtype: torch.dtype) -> bool:
        reason = self._reason(layers, positions, dtype)
        if reason:
            self._left[reason] += 1
        return bool(reason)

    def _reason(self, layers: nn.ModuleList, given: Tensor, dtype: torch.dtype) -> str:
        """Return the reason why the modules compute a call, or "" if the library does.

        Args:
            layers: of the decoder. Without another reason, the layers are bound.
            given: a tensor with a row for each token.
            dtype: of the hidden states.
        """
        batch = current_batch()
        # The modules may compute the first step of a request, of many tokens. Then the next step
        # must look at the modules, though that step continues.
        self._unseen = self._unseen or batch is None or not batch.continues
        reason = _obstacle(batch, given, dtype)
        if batch is None or reason:
            return reason
        return self._bind(layers).obstacle(batch, dtype)

    def _bind(self, layers: nn.ModuleList) -> _Bound:
        """Return the bound layers, bound again if something has changed."""
        # A look at every module takes a twentieth of a step. torch numbers hooks: if the next
        # number is the same, no hook was added.
        unseen = self._unseen or self._next_hook != RemovableHandle.next_id
        bound = self._bound
        if bound is None or bound.layers is not layers or (unseen and not bound.holds()):
            bound = _Bound(layers)
            self._bound = bound
        if unseen:
            bound.additions.forget()
        self._next_hook = RemovableHandle.next_id
        self._unseen = False
        return bound

    def remark(self, owner: object) -> str:
        calls = self._computed + self._left.total()
        if not calls:
            return "not called yet"
        left = []
        for reason, count in self._left.most_common():
            left.append(f"{count} by the modules, as {reason}")
        return "; ".join([f"{self._computed} of {calls} calls computed in one", *left])


def _obstacle(batch: AttentionBatch | None, given: Tensor, dtype: torch.dtype) -> str:
    """Return the reason why the modules compute such a call, whatever the layers are, or ""."""
    # The library computes no gradients.
    if torch.is_grad_enabled():
        return "gradients are recorded"
    # A subclass of tensors, or a mode, would miss the operators of the modules.
    if type(given) is not Tensor or watched():
        return "something of torch follows the operators that run"
    if hooks_on_every_module():
        return "a hook is set on every module"
    path = path_or_none()
    limit = linear.FEW.get((path, dtype), 0)
    if not limit:
        return f"the path {path} has no kernel for few rows of {dtype}"
    if len(given) > limit:
        return f"they have more than {limit} tokens"
    return "" if batch is not None else "no batch is set"


class _Additions:
    """The adapters that the library adds to the maps of the layers.

    Attributes:
        bounds: the rows of each adapter in this call; ``None`` if no adapter applies.
        matrices: two for each map, ``None`` for a map without an adapter.
    """

    def __init__(self, maps: Sequence[Any]) -> None:
        self.bounds: Tensor | None = None
        self._maps = maps
        self._reason = ""
        self.forget()

    def forget(self) -> None:
        """Drop the matrices, so that adapters that have left do not stay in memory."""
        self._ops: Sequence[Any] = []
        self.matrices: Sequence[Tensor | None] = []

    def bind(self) -> str:
        """Note the adapters of this call.

        Returns:
            The reason why the library does not add the adapters, or "".
        """
        self.bounds = adapter_bounds()
        if self.bounds is None:
            return ""
        ops = [layer.quant_method.adapters for layer in self._maps]
        # Most steps have the ops of the step before.
        if ops != self._ops:
            self._ops = ops
            self._reason = next(filter(None, map(_no_adapters, ops)), "")
            matrices: list[Tensor | None] = []
            for op in ops:
                matrices += (None, None) if op is None else (op.a, op.b)
            self.matrices = matrices
        return self._reason


class _Bound:
    """The layers of a decoder in the library, with notes of the modules' state at that time."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.layers = layers
        parts = [layer.parts() if isinstance(layer, HasParts) else None for layer in layers]
        known = [part for part in parts if part is not None]
        self.prefixes = [part.attn.prefix for part in known]
        self.ropes = [part.rotary_emb._buffers for part in known]
        self._note_modules(known)
        self.hooked = self._has_hooks()
        self.shared = any(map(_is_shared, known))
        self.reason = self._obstacle(parts)
        self.decoder: Any = None
        self.maps: list[Any] = []
        if not self.reason:
            self.decoder = _decoder(known)
            for part in known:
                self.maps += _maps(part)
        self.methods = self._own_methods()
        self.additions = _Additions(self.maps)
        self.pages: Mapping[str, LayerPages] | None = None
        """The pages of the last call. ``run`` keeps tensors of these pages."""

    def _note_modules(self, parts: Sequence[DecoderParts]) -> None:
        """Note the modules and the state that ``holds`` compares."""
        leaves: set[nn.Module] = set()
        for part in parts:
            leaves.update(getattr(part, field.name) for field in fields(part))
        self.modules = list(_reached(self.layers, leaves))
        self.types = list(map(type, self.modules))
        self.attributes = list(map(vars, self.modules))
        self.lengths = list(map(len, self.attributes))
        self.places: list[tuple[dict[str, Any], str]] = []
        for module in self.modules:
            self.places += _places(module, module in leaves)
        # Held, so that no other object gets the id of one of these.
        self.values = [holder[name] for holder, name in self.places]
        self.ids = list(map(id, self.values))

    def _own_methods(self) -> Sequence[object]:
        """Return the weight method of each map, without adapters."""
        return [layer.quant_method.own for layer in self.maps]

    def _has_hooks(self) -> bool:
        return any(attributes[name] for attributes in self.attributes for name in HOOKS)

    def _obstacle(self, parts: Sequence[DecoderParts | None]) -> str:
        """Return the reason why the library does not compute the layers, or ""."""
        if self.hooked:
            return f"layers.{self._path_with_hook()} has a hook"
        for number, part in enumerate(parts):
            if part is None:
                return f"layers.{number} is made of other parts"
            for name, check in CHECKS.items():
                reason = check(getattr(part, name))
                if reason:
                    return f"{name} of layers.{number} {reason}"
            if len({layer.tp_size for layer in _maps(part)}) > 1:
                return f"ranks share some maps of layers.{number} and not others"
            if part.rotary_emb.head_size != part.attn.head_size:
                return f"rotary_emb of layers.{number} rotates a part of each head"
        return ""

    def _path_with_hook(self) -> str:
        """Return the path of the first module with a hook."""
        hooked = set()
        for module in self.modules:
            if any(vars(module)[name] for name in HOOKS):
                hooked.add(id(module))
        path: str = next(
            path for path, module in self.layers.named_modules() if id(module) in hooked
        )
        return path

    def holds(self) -> bool:
        """Return True if modules, parameters, settings and hooks are those that were bound."""
        try:
            ids = [id(holder[name]) for holder, name in self.places]
        # A parameter or a setting was deleted.
        except KeyError:
            return False
        if ids != self.ids or list(map(type, self.modules)) != self.types:
            return False
        # A new attribute of a module may hide a method, such as forward.
        if list(map(len, self.attributes)) != self.lengths:
            return False
        return self._has_hooks() == self.hooked and self._own_methods() == self.methods

    def obstacle(self, batch: AttentionBatch, dtype: torch.dtype) -> str:
        """Return the reason why the modules compute a call of these layers, or ""."""
        if self.reason:
            return self.reason
        if self.shared and _group() is None:
            return "ranks share them, and have no memory in common"
        if batch.block_size % attention.GROUP:
            return f"blocks have {batch.block_size} tokens, no multiple of {attention.GROUP}"
        reason = self.additions.bind()
        if reason:
            return reason
        # Steps of one shape have the same pages, which passed the checks below.
        if batch.pages is self.pages:
            return ""
        for prefix in self.prefixes:
            if prefix not in batch.pages:
                return f"the batch has no pages for {prefix}"
            cached = batch.pages[prefix].cache.dtype
            if cached is not dtype and cached not in LARGEST_CODES:
                return f"the cache of {prefix} is of {cached}"
        return ""

    def run(
        self, batch: AttentionBatch, positions: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the layers.

        Raises:
            REFUSED: the library refuses an argument.
        """
        if batch.pages is not self.pages:
            pages = [batch.pages[prefix] for prefix in self.prefixes]
            self.caches = [each.cache for each in pages]
            self.slots = [each.slots for each in pages]
            self.tables = [each.block_table for each in pages]
            self.pages = batch.pages
        ropes = [buffers["cos_sin_cache"] for buffers in self.ropes]
        group = _group() if self.shared else None
        return self.decoder.run(  # type: ignore[no-any-return]
            positions,
            hidden_states,
            ropes,
            self.caches,
            self.slots,
            self.tables,
            batch.query_start_loc,
            batch.seq_lens,
            group,
            [] if self.additions.bounds is None else self.additions.matrices,
            self.additions.bounds,
        )


def _group() -> Any:
    """Return the library's group of tensor-parallel ranks, ``None`` if ranks share no memory."""
    communicator = get_tp_group().communicator
    return communicator.shared if isinstance(communicator, SharedMemoryCommunicator) else None


def _maps(part: DecoderParts) -> tuple[Any, ...]:
    return part.qkv_proj, part.o_proj, part.gate_up_proj, part.down_proj


def _is_shared(part: DecoderParts) -> bool:
    return any(getattr(layer, "tp_size", 1) > 1 for layer in _maps(part))


def _reached(module: nn.Module, leaves: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module and the modules within, down to the parts of layers."""
    yield module
    if module not in leaves:
        for child in module.children():
            yield from _reached(child, leaves)


def _places(module: nn.Module, is_leaf: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield a dictionary and a key for each object that must stay the same."""
    attributes = vars(module)
    held = module._parameters if is_leaf else module._modules
    for name in held:
        yield held, name
    for name in SETTINGS:
        if name in attributes:
            yield attributes, name


def _decoder(parts: Sequence[DecoderParts]) -> Any:
    """Make the library's decoder of layers without an obstacle."""
    decoder = torch.classes.opgraft_cpu_kernels.Decoder()
    for part in parts:
        attn = part.attn
        norms = (*_norm(part.before_attention), *_norm(part.before_mlp))
        maps = [_map(layer) for layer in _maps(part)]
        sizes = [attn.num_heads, attn.num_kv_heads, attn.head_size]
        settings = attn.scale, attn.sliding_window, attn.logits_soft_cap, attn.sinks
        decoder.add_layer(
            *norms, maps, sizes, *settings, part.rotary_emb.is_neox_style, _is_shared(part)
        )
    return decoder


def _norm(norm: Any) -> tuple[Tensor, float]:
    return norm.weight, norm.variance_epsilon


def _map(layer: Any) -> tuple[str, list[Tensor | None]]:
    """Return the form of a linear layer, and the tensors behind the input, the bias last."""
    # Not None: _no_map has asked before.
    called: Any = form_called(layer, adds_adapters=True)
    form, tensors = called
    # The results of ranks are summed, so that one rank alone adds the bias.
    bias = None if isinstance(layer, RowParallelLinear) and layer.tp_rank else layer.bias
    return form.name, [*tensors, bias]


def _changed(op: Any) -> str:
    """Return a reason if a part may compute anything, or ""."""
    if not isinstance(op, CustomOp):
        return f"is a {_name(op)}"
    hidden = hidden_by(op)
    return f"was changed: {hidden}" if hidden else ""


def _name(thing: object) -> str:
    return type(thing).__qualname__


def _runs_another(op: Any, form: str) -> str:
    """Return a reason if a part does not run this plugin's kernel of a form, or ""."""
    reason = _changed(op)
    if reason:
        return reason
    known = op.binding.function(form, compiled=False) is getattr(kernels, form)
    return "" if known else _running(op.binding)


def _running(binding: Binding) -> str:
    return f"runs {binding.kernel_name} of {binding.provider}"


def _no_adapters(op: Any) -> str:
    """Return the reason why the library does not add the adapters of an op, or ""."""
    if op is None:
        return ""
    if any(vars(op)[name] for name in HOOKS):
        return "an op of adapters has a hook"
    known = op.binding.function("add_lora_", compiled=False) is lora.add_lora_
    reason = _changed(op) or ("" if known else _running(op.binding))
    return f"an op of adapters {reason}" if reason else ""


def _no_norm(op: Any) -> str:
    reason = _runs_another(op, "fused_add_rms_norm")
    if reason:
        return reason
    return "" if op.variance_size_override is None else "looks at a part of what it normalises"


def no_attention(op: Any) -> str:
    """Return the reason why the library does not compute an attention layer, or ""."""
    reason = _changed(op)
    if reason:
        return reason
    if op.op_class is not ops.Attention:
        return f"is of {op.binding.provider}"
    if op.head_size % attention.GROUP:
        return f"has heads of {op.head_size}, no multiple of {attention.GROUP}"
    return ""


def _no_map(layer: Any) -> str:
    """Return the reason why the library does not compute a linear layer, or ""."""
    reason = _changed(layer)
    if reason:
        return reason
    if layer.op_class not in LINEAR:
        return f"is a {_name(layer)} of {layer.binding.provider}"
    if layer.skip_bias_add or layer.return_bias:
        return "returns its bias"
    if layer.tp_size > 1 and not _ends_at_rank(layer):
        return "gathers or cuts what ranks have"
    called = form_called(layer, adds_adapters=True)
    if called is None:
        is_packed = layer._packed is not None
        return "has a packed weight" if is_packed else f"has a {_name(layer.quant_method)}"
    form, tensors = called
    kernel = FORMS.get(form)
    binding = binding_of(form)
    # Another plugin may have replaced the kernel of the form.
    if kernel is None or binding.function(form.name, compiled=False) is not kernel:
        return f"calls the form {form.name}, which {_running(binding)}"
    if form is functional.quantized_linear:
        # The first two are weight and scales, and never None.
        given: Any = tensors
        if not quantized.in_lanes(layer.input_size_per_partition, *given[:2]):
            return "has groups of weights that the kernel does not take"
    return ""


def _ends_at_rank(layer: Any) -> bool:
    """Return True if ranks hold parts of the rows between two maps, and sum after the second."""
    if isinstance(layer, RowParallelLinear):
        return layer.input_is_parallel and layer.reduce_results
    return not layer.gather_output


CHECKS: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), _no_map),
    **dict.fromkeys(("before_attention", "before_mlp"), _no_norm),
    "attn": no_attention,
    "act_fn": partial(_runs_another, form="silu_and_mul"),
    "rotary_emb": partial(_runs_another, form="rotary_embedding"),
}
"""Part of a layer → the function for the reason why the library does not compute it, or ""."""
