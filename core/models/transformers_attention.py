"""Attention of transformers' models in ``Attention`` layers.

A call without memory records the arguments of each module. The modules look their attention
function up in transformers' registry. In a model of ours they find a view of the registry that
returns the layer for every implementation, as ``opgraft.grafting.attention`` does for its op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from opgraft.errors import ModelError
from opgraft.grafting.attention import CHILD, REGISTRY, is_attention
from opgraft.grafting.forwards import (
    Substitution,
    check_forward,
    restore_forward,
    substitute,
    substitutions_of,
)
from opgraft.ops.attention import Attention, MMEncoderAttention
from opgraft.ops.attention.batch import current_boundaries
from torch import Tensor, nn

_NOT_ASKED = ("position_ids", "s_aux")
"""Tensors among the arguments that change nothing here, or that the layers take."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a module's call of its attention function.

    Attributes:
        num_heads: query heads of all ranks.
        num_kv_heads: key and value heads of all ranks.
        head_size: elements of a head.
        scale: multiplies the scores.
        causal: a token sees no later token.
        sliding_window: tokens that a token sees, with itself.
        soft_cap: bound of the scores.
        sinks: name of the module's parameter with one more score per head.
        refused: the reasons why the layers cannot compute the call; empty without a reason.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    causal: bool
    sliding_window: int | None
    soft_cap: float | None
    sinks: str | None
    refused: str

    def check(self, ranks: int, path: str) -> None:
        """Raise ``ModelError`` if the heads do not divide by the ranks."""
        for kind, heads in (("attention", self.num_heads), ("key", self.num_kv_heads)):
            if heads % ranks:
                raise ModelError(
                    f"{path}: {heads} {kind} heads do not divide by {ranks} ranks, which the plan "
                    "of transformers needs: choose another parallel.tensor"
                )

    def layer(self, ranks: int, sinks: Tensor | None, prefix: str) -> nn.Module:
        """Construct the layer, with this rank's share of the heads."""
        heads = self.num_heads // ranks
        kv_heads = self.num_kv_heads // ranks
        # Attention without a cache, as no later token is computed with these keys.
        if not self.causal:
            return MMEncoderAttention(heads, self.head_size, self.scale, kv_heads, prefix=prefix)
        return Attention(
            heads,
            self.head_size,
            self.scale,
            kv_heads,
            self.sliding_window,
            self.soft_cap,
            sinks,
            prefix=prefix,
        )


@dataclass(eq=False)
class Recorder:
    """Records the calls of attention functions in a model without memory.

    Attributes:
        mask: the mask that the model is called with.
        calls: the call of each module.
    """

    mask: Tensor | None
    calls: dict[nn.Module, AttentionCall] = field(default_factory=dict)

    def attach(self, model: nn.Module) -> None:
        """Make the attention modules of a model call ``record`` as their attention function."""
        # A list, as each substitution adds a module.
        for module in list(model.modules()):
            if is_attention(module) and not check_forward(module):
                place = _Placeholder(self)
                substitute(module, place, Substitution(REGISTRY, CHILD, _recorded))

    def record(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Note a call, and return a result ``[batch, tokens, heads, head_size]`` without values."""
        batch, heads, tokens, size = query.shape
        # As functions of transformers do: an argument wins over the module's attribute.
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        refused = self._reasons(attention_mask, key, value, size)
        refused += _unserved_arguments(causal, others)
        if module in self.calls:
            refused.append("it calls its attention function more than once")
        self.calls[module] = AttentionCall(
            num_heads=heads,
            num_kv_heads=key.shape[1],
            head_size=size,
            scale=size**-0.5 if scaling is None else float(scaling),
            causal=bool(causal),
            sliding_window=others.get("sliding_window"),
            soft_cap=others.get("softcap"),
            sinks=_name_of_parameter(module, others.get("s_aux")),
            refused=", ".join(refused),
        )
        return query.new_empty(batch, tokens, heads, value.shape[-1]), None

    def _reasons(self, mask: Tensor | None, key: Tensor, value: Tensor, size: int) -> list[str]:
        """Return the reasons why the layers cannot compute a call with such tensors."""
        reasons = []
        # A mask has no numbers here, so nobody can tell which tokens it hides.
        if mask is not None and mask is not self.mask:
            reasons.append("it makes a mask of its own")
        if value.shape[-1] != size or key.shape[1] != value.shape[1]:
            reasons.append("its values have other heads than its keys")
        return reasons


def _unserved_arguments(causal: bool, others: Mapping[str, Any]) -> list[str]:
    """Return the reasons why the layers cannot compute a call with further arguments."""
    reasons = []
    for name, value in others.items():
        if isinstance(value, Tensor) and name not in _NOT_ASKED:
            reasons.append(f"it passes {name}")
    has_sinks = others.get("s_aux") is not None
    is_limited = others.get("sliding_window") or others.get("softcap") or has_sinks
    if not causal and is_limited:
        reasons.append("it is bidirectional with a window, a cap or sinks")
    return reasons


def _name_of_parameter(module: nn.Module, tensor: Tensor | None) -> str | None:
    """Return the name of a module's parameter; ``None`` if the tensor is no parameter of it."""
    if tensor is None:
        return None
    for name, parameter in module._parameters.items():
        if parameter is tensor:
            return name
    return None


class _Placeholder(nn.Module):
    """Stands in the place of the layer while calls are recorded."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder


_OWN: ContextVar[bool] = ContextVar("opgraft_own_attention", default=False)


@contextmanager
def own_attention() -> Iterator[None]:
    """Make attention modules call the functions of transformers, not our layers, in the block."""
    token = _OWN.set(True)
    try:
        yield
    finally:
        _OWN.reset(token)


@dataclass(frozen=True, eq=False)
class _Registry(Mapping[str, Callable[..., Any]]):
    """A view of transformers' registry of attention functions with one function for every name."""

    registry: Any
    function: Callable[..., Any]

    def get_interface(
        self, attn_implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        # Own functions run while results are compared with transformers'.
        if not _OWN.get():
            return self.function
        own: Callable[..., Any] = self.registry.get_interface(attn_implementation, default)
        return own

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self.registry[name] if _OWN.get() else self.function

    def __iter__(self) -> Iterator[str]:
        return iter(self.registry)

    def __len__(self) -> int:
        return len(self.registry)


def _recorded(place: Any, registry: Any) -> _Registry:
    return _Registry(registry, place.recorder.record)


def _attended(layer: nn.Module, registry: Any) -> _Registry:
    return _Registry(registry, partial(_attend_one_batch, layer))


def attach_layer(module: nn.Module, layer: nn.Module) -> None:
    """Make an attention module call a layer instead of any function of transformers, for good.

    The layer becomes a child of the module.
    """
    substitute(module, layer, Substitution(REGISTRY, CHILD, _attended, permanent=True))


def detach_layer(module: nn.Module) -> None:
    """Undo ``attach_layer``: the module calls the functions of transformers again."""
    kept = tuple(each for each in substitutions_of(module) if each.child != CHILD)
    restore_forward(module, kept)


def _attend_one_batch(
    layer: nn.Module,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:
    """Attend with tensors ``[1, heads, tokens, head_size]``.

    Returns:
        ``[1, tokens, heads, head_size]``, and ``None`` for the weights.
    """
    # Transformers has heads before tokens, and a batch of one: the tokens of all sequences.
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    if isinstance(layer, Attention):
        attended = layer(*(x[0] for x in rows))
        return attended[None], None
    # The other kind of layer takes rows of all heads, and keeps the dimension of the batch.
    flat = [x.flatten(2) for x in rows]
    attended = layer(*flat, current_boundaries())
    return attended.unflatten(-1, rows[0].shape[2:]), None
