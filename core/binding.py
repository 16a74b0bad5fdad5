"""Binding: from an op class to the class whose instances run the chosen kernel.

An instance belongs to a *specialisation*: a subclass per (op class, kernel) whose ``forward`` is that kernel, with the
op's own name, module and qualname. Nothing is stored on instances that would keep them alive, and nothing that
compiled code has seen is ever mutated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from opgraft.config import Settings
from opgraft.decision import Decision
from opgraft.dispatch import Kernel, KernelChoice, ReplacementChoice, choose_kernel, choose_replacement, continuations
from opgraft.errors import ConfigError, close_matches
from opgraft.platform import effective_chain
from opgraft.plugins.discovery import discover
from opgraft.plugins.host import load_plugins, plugins_decision
from opgraft.plugins.selection import selected_platform
from opgraft.state import HostState, host_state

Function = TypeVar("Function", bound=Callable[..., Any])

_INFERENCE_ONLY = "__opgraft_inference_only__"
_CACHE = "__opgraft_specialisations__"


@dataclass(frozen=True)
class Binding:
    """What was chosen for one class: the class to construct, the kernel, and the specialisation that joins them."""

    replacement: ReplacementChoice
    kernel: KernelChoice
    specialisation: type
    background: tuple[Decision, ...] = ()
    enforced: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds the class and is bound anew where it is loaded, on another platform perhaps."""
        return bind_exact, (self.replacement.cls, self.enforced)

    @property
    def decision(self) -> Decision:
        """The whole story: the kernel, resting on the choice of the class, of the plugins and of the platform."""
        kernel = self.kernel.decision
        parts = (self.replacement.decision, *self.background)
        name = self.replacement.op_name or self.replacement.target.__qualname__
        reason = f"{kernel.reason}; class {self.replacement.decision.reason}"
        return Decision(f"op {name}", kernel.chosen, reason, kernel.candidates, kernel.setting, parts)


def bind(cls: type) -> Binding:
    """The binding for constructing ``cls`` here and now: replacement, enabling and platform taken into account.

    Raises:
        OpgraftError: the platform, a plugin asked for by name, a conflict or a setting prevents a choice; see
            ``load_plugins``, ``choose_replacement`` and ``choose_kernel``.
    """
    load_plugins()
    bindings = host_state().current_bindings()
    try:
        return bindings[cls]  # type: ignore[no-any-return]
    except KeyError:
        binding = bindings[cls] = _decide(cls, replace=True)
        return binding


def bind_exact(cls: type, enforce: bool = False) -> Binding:
    """The binding of ``cls`` itself, never of a replacement. ``enforce`` enables the op whatever the settings say."""
    load_plugins()
    binding = _decide(cls, replace=False)
    return enforced(binding) if enforce else binding


def enforced(binding: Binding) -> Binding:
    """The same choice of class, with the op enabled whatever the settings say."""
    cls = binding.replacement.cls
    kernel = choose_kernel(cls, binding.kernel.chain, True, "enforce_enable=True")
    specialisation = specialise(cls, kernel.winner, kernel.chain)
    return Binding(binding.replacement, kernel, specialisation, binding.background, enforced=True)


def inference_only(kernel: Function) -> Function:
    """Mark a ``forward_<key>`` that has no backward: where a gradient is required, ``forward_native`` runs instead."""
    setattr(kernel, _INFERENCE_ONLY, True)
    return kernel


def _decide(cls: Any, *, replace: bool) -> Binding:
    state = host_state()
    with state.lock:
        settings = state.settings()
        _check_op_names(settings, state)
        selection = selected_platform()
        platform = selection.platform
        name = op_name_of(cls, state)
        own = discover().provider_of(cls.__module__)
        active = [r for r in state.active if replace]
        replacement = choose_replacement(cls, name, own, active, platform, settings)
        always = (True, "this op is not switched by custom_ops")
        enabled, because = settings.enabled(name) if cls.switchable else always
        kernel = choose_kernel(replacement.cls, effective_chain(platform), enabled, because)
        specialisation = specialise(replacement.cls, kernel.winner, kernel.chain)
        background = (plugins_decision(state.plugins.values()), selection.decision)
        return Binding(replacement, kernel, specialisation, background)


def op_name_of(cls: type, state: HostState) -> str | None:
    """The registered name that switches ``cls``: its own, or that of the nearest registered base."""
    names = {record.cls: name for name, record in state.registry.ops.items()}
    return next((names[base] for base in cls.__mro__ if base in names), None)


def _check_op_names(settings: Settings, state: HostState) -> None:
    for token in settings.config.compilation_config.custom_ops or ():
        if token[0] in "+-" and token[1:] not in state.registry.ops:
            origin = settings.origins["compilation_config.custom_ops"]
            raise ConfigError(
                f"custom_ops has {token!r} ({origin}), but no op has that name: "
                f"{close_matches(token[1:], state.registry.ops)} 'opgraft ops list' shows all; import the package that "
                "registers an op before it is named."
            )


def specialise(op_class: type, kernel: Kernel, chain: tuple[str, ...]) -> type:
    """The subclass of ``op_class`` whose ``forward`` is ``kernel``; kept with it, one per kernel and chain."""
    cache: dict[tuple[Kernel, tuple[str, ...]], type] = vars(op_class).get(_CACHE) or {}
    if not cache:
        setattr(op_class, _CACHE, cache)
    if (kernel, chain) not in cache:
        raw = vars(kernel.owner)[kernel.method]
        namespace = {
            "forward": _with_native_fallback(op_class, raw) if getattr(raw, _INFERENCE_ONLY, False) else raw,
            "op_class": op_class,
            "__module__": op_class.__module__,
            "__qualname__": op_class.__qualname__,
            "__doc__": op_class.__doc__,
            "__specialisation__": True,
            "__continuations__": continuations(op_class, chain),
        }
        cache[kernel, chain] = type(op_class)(op_class.__name__, (op_class,), namespace)
    return cache[kernel, chain]


def _with_native_fallback(op_class: type, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` where no gradient is required, the native definition where one is."""

    @functools.wraps(kernel)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(self, args, kwargs)):
            return self.forward_native(*args, **kwargs)
        return kernel(self, *args, **kwargs)

    return forward


def _tensors(op: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    yield from (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    yield from op.parameters()
