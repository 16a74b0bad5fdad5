"""Attention of transformers' models, through the registry that transformers offers for it.

A grafted attention module gets a child, the op; its configuration names the attention function ``"opgraft"``, which
hands the call to that child. Modules without the child, in other models that share the configuration, get what they
had: transformers' own function for ``"sdpa"``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from opgraft.adapter import LeaveAlone
from opgraft.ops import ScaledDotProductAttention
from torch import nn

CHILD = "opgraft_attention"
ADAPTER = "transformers attention interface"
_NAME = "opgraft"
_FORMER = "sdpa"  # the only implementation that is taken over, so the one that ungraft restores
_SDPA_MODULE = "transformers.integrations.sdpa_attention"
_OURS = frozenset(
    ("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "args", "kwargs")
)


class Registered:
    """Kept by every attention op: a copy that is unpickled in another process registers the function there."""

    def __reduce__(self) -> tuple[Callable[[], Registered], tuple[()]]:
        return _registered, ()


def is_attention(module: nn.Module) -> bool:
    """Whether a module calls its attention function through transformers' registry."""
    forward = _forward_of(module)
    known = "transformers" in sys.modules and isinstance(forward, FunctionType)
    return known and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


def is_attached(module: nn.Module) -> bool:
    """Whether the attention module has an op and its configuration still names our function."""
    return CHILD in module._modules and _implementation(module) == _NAME


def check(module: nn.Module) -> None:
    """Raise ``LeaveAlone`` if an attention module does not use sdpa, or would do something else when switched."""
    implementation = _implementation(module)
    if implementation not in (_FORMER, _NAME):
        raise LeaveAlone(f"its attention implementation is {implementation!r}, not {_FORMER!r}")
    if "forward" in vars(module):
        raise LeaveAlone("its forward was set on the instance")
    forward = _forward_of(module)
    if "position_bias" in _flat(forward.__code__.co_consts):  # where the names of keyword arguments stand
        raise LeaveAlone("it adds a position bias, which the attention op does not take")
    namespace = forward.__globals__
    if namespace["ALL_ATTENTION_FUNCTIONS"][_FORMER].__module__ != _SDPA_MODULE:
        raise LeaveAlone(f"other code has registered its own {_FORMER!r} attention")
    if _compares_implementation(namespace):
        raise LeaveAlone(f"its model does other things when the implementation is not called {_FORMER!r}")


def attach(module: nn.Module, op: ScaledDotProductAttention) -> None:
    """Let the attention module call ``op``, which becomes its child."""
    op.train(module.training)
    op.__dict__["_opgraft_registered"] = _registered()
    module._modules[CHILD] = op
    _config(module)._attn_implementation_internal = _NAME  # the property would set sub-configs too


def detach(module: nn.Module) -> None:
    """Take the op out of an attention module and give its configuration the former implementation back."""
    if module._modules.pop(CHILD, None) is not None and _implementation(module) == _NAME:
        _config(module)._attn_implementation_internal = _FORMER


def _config(module: nn.Module) -> Any:
    return getattr(module, "config", None)


def _implementation(module: nn.Module) -> str | None:
    return getattr(_config(module), "_attn_implementation", None)


def _forward_of(module: nn.Module) -> Any:
    return inspect.unwrap(inspect.getattr_static(type(module), "forward"))


def _registered() -> Registered:
    """Make the attention function, and the masks of sdpa, known to transformers under our name."""
    transformers: Any = importlib.import_module("transformers")  # loaded by then: it defines the model
    functions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    if _NAME not in functions():
        functions.register(_NAME, _attention_function(functions()[_FORMER]))
        masks.register(_NAME, masks()[_FORMER])
    return Registered()


def _compares_implementation(namespace: dict[str, Any]) -> bool:
    """Whether code of a module compares the name of the attention implementation with that of sdpa."""
    return any(
        "_attn_implementation" in code.co_names and _FORMER in _flat(code.co_consts) for code in _codes(namespace)
    )


def _codes(namespace: dict[str, Any]) -> Iterator[CodeType]:
    for value in list(namespace.values()):
        if getattr(value, "__module__", None) == namespace["__name__"]:
            members = vars(value).values() if isinstance(value, type) else [value]
            yield from (inspect.unwrap(m).__code__ for m in members if isinstance(m, FunctionType))


def _flat(constants: tuple[Any, ...]) -> Iterator[Any]:
    for constant in constants:
        yield from constant if isinstance(constant, tuple) else (constant,)


def _attention_function(sdpa: Callable[..., Any]) -> Callable[..., Any]:
    """Our attention function, which leaves to transformers' own what it was not made for.

    It takes the attention module, query ``(batch, heads, queries, head size)``, key and value ``(batch, key-value
    heads, keys, head size)`` and a mask that broadcasts to ``(batch, heads, queries, keys)``; it returns
    ``(batch, queries, heads, value size)`` and no weights.
    """
    features = (set(inspect.signature(sdpa).parameters) | {"softcap", "output_attentions"}) - _OURS
    special = tuple(sorted(features))

    def attention(
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
        op = module._modules.get(CHILD)
        asked = any(kwargs.get(name) is not None and kwargs[name] is not False for name in special)
        if op is None or asked:
            options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
            return sdpa(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
        causal: bool = getattr(module, "is_causal", True) if is_causal is None else is_causal
        groups: int = getattr(module, "num_key_value_groups", 1)
        out = _attend(op, query, key, value, attention_mask, causal, groups, {"dropout_p": dropout, "scale": scaling})
        return out.transpose(1, 2).contiguous(), None

    return attention


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
    """Attention of ``(batch, heads, queries, size)``, with ``groups`` heads of the query to each key-value head."""
    length = query.shape[2]
    if mask is not None or length == 1:  # not by "and": under torch.compile a comparison of sizes is no bool
        causal = False
    if causal and key.shape[2] > length:  # a static cache, empty but for this prompt: no query sees the rest
        key, value = key[:, :, :length], value[:, :, :length]
    if groups > 1 and mask is None and key.shape[-1] == value.shape[-1] <= 256:  # as far as fused kernels share heads
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
    """The heads of a group stand in for the queries that there is one of, so that the cache is not repeated."""

    def grouped(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(t.shape[0], -1, groups, t.shape[-1])

    if mask is not None and mask.shape[1] > 1:
        mask = grouped(mask)
    out: torch.Tensor = op(grouped(query), key, value, attn_mask=mask, **options)
    return out.flatten(1, 2).unsqueeze(2)
