"""Attention of transformers' models: an op in the place of transformers' own function for ``"sdpa"``.

The forward of an attention module looks its function up in a registry. In a grafted module it finds a view of that
registry that gives the op where transformers' own sdpa would be. The configuration keeps its name, and whoever reads
it, such as the code that makes masks, sees what it saw before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from opgraft.grafting.forwards import Substitution, check_forward, plain_forward
from opgraft.registry.adapter import LeaveAlone
from torch import nn

CHILD = "opgraft_attention"
ADAPTER = "transformers attention interface"
REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_SDPA = "sdpa"
_SDPA_MODULE = "transformers.integrations.sdpa_attention"
_OURS = frozenset(
    (
        "module",
        "query",
        "key",
        "value",
        "attention_mask",
        "dropout",
        "scaling",
        "is_causal",
        "args",
        "kwargs",
    )
)


def is_attention(module: nn.Module) -> bool:
    """Return whether a module calls its attention function through transformers' registry."""
    forward = plain_forward(module)
    known = "transformers" in sys.modules and isinstance(forward, FunctionType)
    return known and REGISTRY in forward.__code__.co_names


def is_attached(module: nn.Module) -> bool:
    """Return whether an attention module has an op."""
    return CHILD in module._modules


def check(module: nn.Module) -> None:
    """Raise ``LeaveAlone`` if an attention module does not use sdpa, or does more than the op can."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if implementation != _SDPA:
        raise LeaveAlone(f"its attention implementation is {implementation!r}, not {_SDPA!r}")
    obstacle = check_forward(module)
    if obstacle:
        raise LeaveAlone(obstacle)
    forward = plain_forward(module)
    if "position_bias" in _flat(
        forward.__code__.co_consts
    ):  # where the names of keyword arguments stand
        raise LeaveAlone("it adds a position bias, which the attention op does not take")
    if forward.__globals__[REGISTRY][_SDPA].__module__ != _SDPA_MODULE:
        raise LeaveAlone(f"other code has registered its own {_SDPA!r} attention")


def _flat(constants: tuple[Any, ...]) -> Iterator[Any]:
    for constant in constants:
        yield from constant if isinstance(constant, tuple) else (constant,)


@dataclass(frozen=True, eq=False)
class _Registry(Mapping[str, Callable[..., Any]]):
    """transformers' registry of attention functions, with the op in the place of one function.

    Attributes:
        registry: what the file of the model has.
        replaced: transformers' own function. What other code registers under its name later is given out as it is.
        replacement: what is given out for it.
    """

    registry: Any
    replaced: Callable[..., Any]
    replacement: Callable[..., Any]

    def get_interface(
        self, attn_implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        return self._known(self.registry.get_interface(attn_implementation, default))

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._known(self.registry[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.registry)

    def __len__(self) -> int:
        return len(self.registry)

    def _known(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.replacement if function is self.replaced else function


def _with_op(op: nn.Module, registry: Any) -> _Registry:
    """Give the registry that the forward of an attention module looks into, with its op."""
    sdpa = registry[_SDPA]
    return _Registry(registry, sdpa, partial(attention, op, sdpa, _features_of(sdpa)))


SUBSTITUTION = Substitution(REGISTRY, CHILD, _with_op)


def _features_of(sdpa: Callable[..., Any]) -> tuple[str, ...]:
    """List the arguments by which transformers' function is asked for what the op was not made for."""
    return tuple(
        sorted((set(inspect.signature(sdpa).parameters) | {"softcap", "output_attentions"}) - _OURS)
    )


def attention(
    op: nn.Module,
    sdpa: Callable[..., Any],
    features: tuple[str, ...],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by ``op``, or by transformers' own function ``sdpa`` where one of ``features`` is asked for.

    The op shares heads between key and value, so what has other numbers of them goes to that function too.

    Takes the attention module, query ``(batch, heads, queries, head size)``, key and value ``(batch, key-value heads,
    keys, head size)`` and a mask that broadcasts to ``(batch, heads, queries, keys)``.

    Returns:
        ``(batch, queries, heads, value size)``, and no weights.
    """
    asked = any(kwargs.get(name) is not None and kwargs[name] is not False for name in features)
    if asked or key.shape[1] != value.shape[1]:
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return sdpa(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    causal: bool = getattr(module, "is_causal", True) if is_causal is None else is_causal
    groups: int = getattr(module, "num_key_value_groups", 1)
    out = _attend(
        op,
        query,
        key,
        value,
        attention_mask,
        causal,
        groups,
        {"dropout_p": dropout, "scale": scaling},
    )
    return out.transpose(1, 2).contiguous(), None


def _attend(
    op: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    groups: int,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attend over ``(batch, heads, queries, size)``, with ``groups`` heads of the query to each key-value head."""
    length = query.shape[2]
    if (
        mask is not None or length == 1
    ):  # not by "and": under torch.compile a comparison of sizes is no bool
        causal = False
    if (
        causal and key.shape[2] > length
    ):  # a static cache, empty but for this prompt: no query sees the rest
        key, value = key[:, :, :length], value[:, :, :length]
    if (
        groups > 1 and mask is None and key.shape[-1] == value.shape[-1] <= 256
    ):  # as far as fused kernels share heads
        options["enable_gqa"] = True
    elif groups > 1 and length == 1 and not torch.compiler.is_compiling():
        return _attend_one_token(op, query, key, value, mask, groups, options)
    elif groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out: torch.Tensor = op(query, key, value, attn_mask=mask, is_causal=causal, **options)
    return out


def _attend_one_token(
    op: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    groups: int,
    options: dict[str, Any],
) -> torch.Tensor:
    """Let the heads of a group stand in for the queries that there is one of, so that the cache is not repeated."""

    def grouped(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(t.shape[0], -1, groups, t.shape[-1])

    if mask is not None and mask.shape[1] > 1:
        mask = grouped(mask)
    out: torch.Tensor = op(grouped(query), key, value, attn_mask=mask, **options)
    return out.flatten(1, 2).unsqueeze(2)
