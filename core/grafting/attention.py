"""Attention of transformers' models: an op in place of transformers' function for ``"sdpa"``.

The forward of an attention module looks a function up in a registry. The forward of a grafted
module finds a view of that registry with the op in place of transformers' own sdpa. The name in
the configuration stays, so that other readers, such as the code for masks, see no difference.
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
from opgraft.grafting.forwards import expect_plain_forward, plain_forward
from opgraft.ops import ScaledDotProductAttention
from opgraft.registry.adapter import CallAdapter, FunctionCall, LeaveAlone
from torch import Tensor, nn

CHILD = "opgraft_attention"
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
"""Arguments of transformers' function for ``attention``."""

_FUSED_HEAD_SIZE = 256
"""Largest head size for which fused kernels share heads between queries and keys."""


def is_attention(module: nn.Module) -> bool:
    """Return True if a module calls an attention function through transformers' registry."""
    if "transformers" not in sys.modules:
        return False
    forward = plain_forward(module)
    return isinstance(forward, FunctionType) and REGISTRY in forward.__code__.co_names


def _recognise(call: FunctionCall) -> Mapping[str, Any] | None:
    """Accept attention modules with sdpa and without features beyond the op."""
    if call.name != REGISTRY or "transformers" not in sys.modules:
        return None

    config = getattr(call.module, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation != _SDPA:
        raise LeaveAlone(f"its attention implementation is {implementation!r}, not {_SDPA!r}")

    expect_plain_forward(call.module)
    # The names of keyword arguments are constants of the code.
    if "position_bias" in _flat(plain_forward(call.module).__code__.co_consts):
        raise LeaveAlone("it adds a position bias, which the attention op does not take")
    if call.found[_SDPA].__module__ != _SDPA_MODULE:
        raise LeaveAlone(f"other code has registered its own {_SDPA!r} attention")

    return {}


def _flat(constants: tuple[Any, ...]) -> Iterator[Any]:
    for constant in constants:
        yield from constant if isinstance(constant, tuple) else (constant,)


@dataclass(frozen=True, eq=False)
class _Registry(Mapping[str, Callable[..., Any]]):
    """transformers' registry of attention functions, with the op in the place of one function.

    Attributes:
        registry: the registry in the file of the model.
        replaced: transformers' own function. A function that other code registers under the same
            name later is given out unchanged.
        replacement: is given out for ``replaced``.
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
    """Return the registry for the forward of an attention module with ``op``."""
    # The function at the time of ``graft``, or of unpickling.
    sdpa = registry[_SDPA]
    return _Registry(registry, sdpa, partial(attention, op, sdpa, _features_of(sdpa)))


ADAPTER = CallAdapter(
    "transformers attention interface",
    ScaledDotProductAttention,
    _recognise,
    _with_op,
    CHILD,
    native_gains=True,
    whole=True,
)


def _features_of(sdpa: Callable[..., Any]) -> tuple[str, ...]:
    """List the arguments for features of transformers' function beyond the op."""
    known = set(inspect.signature(sdpa).parameters)
    return tuple(sorted((known | {"softcap", "output_attentions"}) - _OURS))


def attention(
    op: nn.Module,
    sdpa: Callable[..., Any],
    features: tuple[str, ...],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend by ``op``, or by transformers' own function ``sdpa`` if a feature is asked for.

    The op shares heads between key and value; other numbers of heads go to ``sdpa``, too.

    Takes the attention module, query ``(batch, heads, queries, head size)``, key and value
    ``(batch, key-value heads, keys, head size)`` and a mask that broadcasts to ``(batch, heads,
    queries, keys)``.

    Returns:
        ``(batch, queries, heads, value size)``, and no weights.
    """
    # Callers pass features that they do not ask for as None or False.
    asked = any(kwargs.get(name) is not None and kwargs[name] is not False for name in features)
    if asked or key.shape[1] != value.shape[1]:
        options = {
            "dropout": dropout,
            "scaling": scaling,
            "is_causal": is_causal,
            **kwargs,
        }
        own: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **options)
        return own

    # transformers' own function reads the module's attribute, too.
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    out = _attend_in_groups(
        op,
        query,
        key,
        value,
        attention_mask,
        is_causal,
        getattr(module, "num_key_value_groups", 1),
        {"dropout_p": dropout, "scale": scaling},
    )
    return out.transpose(1, 2).contiguous(), None


def _attend_in_groups(
    op: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    groups: int,
    options: dict[str, Any],
) -> Tensor:
    """Attend over ``(batch, heads, queries, size)``; a key-value head serves ``groups`` heads."""
    length = query.shape[2]
    # Not by "and": under torch.compile a comparison of sizes is no bool.
    if mask is not None or length == 1:
        causal = False

    # A static cache that holds this prompt only has more keys than any query may see.
    if causal and key.shape[2] > length:
        key = key[:, :, :length]
        value = value[:, :, :length]

    if groups > 1:
        fused = key.shape[-1] == value.shape[-1] <= _FUSED_HEAD_SIZE
        if mask is None and fused:
            options["enable_gqa"] = True
        elif length == 1 and not torch.compiler.is_compiling():
            return _attend_one_token(op, query, key, value, mask, groups, options)
        else:
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)

    out: Tensor = op(query, key, value, attn_mask=mask, is_causal=causal, **options)
    return out


def _attend_one_token(
    op: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    groups: int,
    options: dict[str, Any],
) -> Tensor:
    """Attend with one query per head, and pass the heads of a group as queries.

    The cache is not repeated this way.
    """

    def grouped(t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], -1, groups, t.shape[-1])

    if mask is not None and mask.shape[1] > 1:
        mask = grouped(mask)
    out: Tensor = op(grouped(query), key, value, attn_mask=mask, **options)
    return out.flatten(1, 2).unsqueeze(2)
