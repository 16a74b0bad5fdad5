"""What models of vLLM declare about themselves, and decorators for their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, TypeVar

Model = TypeVar("Model", bound=type)


def note(cls: type, name: str, value: str) -> None:
    """Set an attribute of a plugin's class.

    A class that derives from a missing name refuses new attributes, and takes this one: the class
    itself is the plugin's own, and asked for it.
    """
    type.__setattr__(cls, name, value)


class SupportsLoRA(Protocol):
    """A base of models with adapters. opgraft adds adapters to layers of any model."""

    supports_lora: ClassVar[Literal[True]] = True
    embedding_modules: ClassVar[dict[str, str]] = {}


class HasInnerState(Protocol):
    """A base of models with a state for each request. opgraft's layers keep their own states."""

    has_inner_state: ClassVar[Literal[True]] = True


class IsHybrid(Protocol):
    """A base of models with attention and other layers with states."""

    is_hybrid: ClassVar[Literal[True]] = True


class SupportsPP(Protocol):
    """A base of models for several stages. A plugin's model has one stage in opgraft."""

    supports_pp: ClassVar[Literal[True]] = True


def attn_type(attn_type: str) -> Callable[[Model], Model]:
    """Return a decorator that notes the kind of a model's attention in the class.

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
    """Return the class unchanged, or a decorator that does so.

    opgraft compiles whole models, as ``compilation_config`` says, and finds dynamic sizes itself.
    """
    if cls is not None:
        return cls
    return lambda decorated: decorated
