"""Bases of vLLM's models, and decorators for the classes of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

Model = TypeVar("Model", bound=type)


def note(cls: type, name: str, value: str) -> None:
    """Set an attribute of a plugin's class.

    A class that derives from a missing name refuses new attributes of a plugin, and takes this
    attribute: the plugin's own class is decorated.
    """
    type.__setattr__(cls, name, value)


class SupportsLoRA:
    """A base of models with adapters. opgraft adds adapters to layers of any model."""

    supports_lora: ClassVar[Literal[True]] = True
    embedding_modules: ClassVar[dict[str, str]] = {}


class HasInnerState:
    """A base of models with a state for each request. opgraft's layers keep their own states."""

    has_inner_state: ClassVar[Literal[True]] = True


class IsHybrid:
    """A base of models with attention and other layers with states."""

    is_hybrid: ClassVar[Literal[True]] = True


class SupportsPP:
    """A base of models for several stages. A plugin's model has one stage in opgraft."""

    supports_pp: ClassVar[Literal[True]] = True


def attn_type(attn_type: str) -> Callable[[Model], Model]:
    """Return a decorator of a model, to note the kind of attention in the class.

    The note has no other effect: each layer of attention is given its kind.
    """

    def decorate(model: Model) -> Model:
        note(model, "attn_type", attn_type)
        return model

    return decorate


def support_torch_compile(
    cls: type | None = None,
    *,
    dynamic_arg_dims: Any = None,
    mark_unbacked_dims: Any = None,
    enable_if: Any = None,
    is_encoder: bool = False,
    use_aot_compile: bool = True,
) -> Any:
    """Return the class unchanged, or a decorator to the same effect.

    opgraft compiles whole models, as ``compilation_config`` says, and finds the dynamic sizes.
    """
    if cls is not None:
        return cls
    return lambda decorated: decorated
