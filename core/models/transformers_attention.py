"""Attention of transformers' models in ``Attention`` layers: what each module asks for, found by a call without memory.

The modules find their function in transformers' registry. In a model of ours they find a view of it that gives the
layer, whatever implementation the config names, as ``opgraft.grafting.attention`` does for its op.
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
"""Tensors among the arguments of attention functions that change nothing here, or that the layers take."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments with which a module calls its attention function.

    Attributes:
        num_heads: query heads of all ranks.
        num_kv_heads: key and value heads of all ranks.
        head_size: elements of a head.
        scale: multiplies the scores.
        causal: a token sees none after it.
        sliding_window: tokens that a token sees, with itself.
        soft_cap: bound of the scores.
        sinks: name of the module's parameter with one more score per head.
        refused: what the layers do not do, in words; empty where they do all.
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
        for what, heads in (("attention", self.num_heads), ("key", self.num_kv_heads)):
            if heads % ranks:
                raise ModelError(
                    f"{path}: {heads} {what} heads do not divide by {ranks} ranks, which the plan of transformers "
                    "needs: choose another parallel.tensor"
                )

    def layer(self, ranks: int, sinks: Tensor | None, prefix: str) -> nn.Module:
        """Construct the layer, with this rank's share of the heads."""
        heads, kv_heads = self.num_heads // ranks, self.num_kv_heads // ranks
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
    """Collects the calls of attention functions, by the module that makes them."""

    mask: Tensor | None
    calls: dict[nn.Module, AttentionCall] = field(default_factory=dict)

    def attach(self, model: nn.Module) -> None:
        """Have the attention modules of a model without memory call this."""
        for module in list(model.modules()):
            if is_attention(module) and not check_forward(module):
                place = _Place(self)
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
        """Note a call, and return a result of the right shape."""
        size = query.shape[-1]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        refused = []
        if attention_mask is not None and attention_mask is not self.mask:
            refused.append("it makes a mask of its own")
        if value.shape[-1] != size or key.shape[1] != value.shape[1]:
            refused.append("its values have other heads than its keys")
        refused += [
            f"it passes {n}"
            for n, v in others.items()
            if isinstance(v, Tensor) and n not in _NOT_ASKED
        ]
        if not causal and (
            others.get("sliding_window") or others.get("softcap") or others.get("s_aux") is not None
        ):
            refused.append("it is bidirectional with a window, a cap or sinks")
        sinks = [
            name
            for name, p in module._parameters.items()
            if p is not None and p is others.get("s_aux")
        ]
        if module in self.calls:
            refused.append("it calls its attention function more than once")
        self.calls[module] = AttentionCall(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=size,
            scale=size**-0.5 if scaling is None else float(scaling),
            causal=bool(causal),
            sliding_window=others.get("sliding_window"),
            soft_cap=others.get("softcap"),
            sinks=sinks[0] if sinks else None,
            refused=", ".join(refused),
        )
        return query.new_empty(
            query.shape[0], query.shape[2], query.shape[1], value.shape[-1]
        ), None


class _Place(nn.Module):
    """Stands where the layer is going to be."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder


_OWN: ContextVar[bool] = ContextVar("opgraft_own_attention", default=False)


@contextmanager
def own_attention() -> Iterator[None]:
    """Have attention modules call the functions of transformers within the block, not the layers that they have."""
    token = _OWN.set(True)
    try:
        yield
    finally:
        _OWN.reset(token)


@dataclass(frozen=True, eq=False)
class _Registry(Mapping[str, Callable[..., Any]]):
    """transformers' registry of attention functions, which gives one function under every name."""

    registry: Any
    function: Callable[..., Any]

    def get_interface(
        self, attn_implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
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
    return _Registry(registry, partial(_attend, layer))


def attach_layer(module: nn.Module, layer: nn.Module) -> None:
    """Have an attention module call a layer, as a child of it, in place of any function of transformers, for good."""
    substitute(module, layer, Substitution(REGISTRY, CHILD, _attended, permanent=True))


def detach_layer(module: nn.Module) -> None:
    """Take back ``attach_layer``: the module calls the functions of transformers again."""
    kept = tuple(each for each in substitutions_of(module) if each.child != CHILD)
    restore_forward(module, kept)


def _attend(
    layer: nn.Module,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:
    """Attend over ``(1, heads, tokens, head size)``; return ``(1, tokens, heads, head size)``, and no weights."""
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    if isinstance(layer, Attention):
        return layer(*(x[0] for x in rows))[None], None
    flat = [x.flatten(2) for x in rows]
    return layer(*flat, current_boundaries()).unflatten(-1, rows[0].shape[2:]), None
