"""Binding: from an op class to the class whose instances run the chosen kernel.

An instance belongs to a *specialisation*: a subclass per (op class, kernel) whose ``forward`` is that kernel, with the
op's own name, module and qualname. Nothing is stored on instances that would keep them alive, and nothing that
compiled code has seen is ever mutated.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from opgraft.base.text import described, printable
from opgraft.binding.derivation import prepare
from opgraft.binding.in_tree import idle_oot_classes
from opgraft.binding.kernels import (
    OWN_FORWARD,
    SWITCH,
    Kernel,
    KernelChoice,
    choose_kernel,
    continuations,
    method_of,
)
from opgraft.binding.marks import CHECK_RAISED, SWITCH_RAISED, is_inference_only
from opgraft.binding.measurements import follow
from opgraft.binding.names import check_names, kin_of, op_name_of
from opgraft.binding.shadow import SHADOWS, Shadow
from opgraft.config import CURRENT_SCOPE, NATIVE_CHOICE, Settings
from opgraft.config.environment import PROVIDERS
from opgraft.errors import ConstructionError, RegistrationError
from opgraft.logger import logger
from opgraft.platform import effective_chain
from opgraft.plugins.agreement import expect_choice_agrees
from opgraft.plugins.discovery import discover
from opgraft.plugins.host import check_loaded_with, decide_with_plugins, plugins_decision
from opgraft.plugins.outcomes import absence_of, state_of
from opgraft.plugins.selection import selected_platform
from opgraft.registry import watching
from opgraft.registry.choice import ReplacementChoice, choose_replacement, objection_to
from opgraft.registry.decision import Decision, Provider
from opgraft.registry.declarations import Replacement
from opgraft.registry.op_classes import definer, location_of, qualified
from opgraft.registry.state import HostState, host_state

_CACHE = "__opgraft_specialisations__"
_INIT = "__init__"
_ASSIGNED_TOO_EARLY = "before Module.__init__() call"
"""Part of torch's error for a parameter or child that is assigned before the base's constructor."""
_HOST_PACKAGE = "opgraft"


@dataclass(frozen=True)
class Binding:
    """The choice for one class: the class to construct, the kernel, and the specialisation that joins them."""

    replacement: ReplacementChoice
    kernel: KernelChoice
    specialisation: type
    background: tuple[Decision, ...] = ()
    enforced: bool = False

    # A copied op keeps the kernel of the scope in which it was bound; nothing here belongs to one instance.
    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the class only: it is bound anew where it is loaded, on another platform perhaps."""
        return bind_exact, (self.replacement.target, self.replacement.cls, self.enforced)

    @property
    def owner(self) -> type:
        """The class that answers for the kernel: the one that defines it.

        If a replacement inherits ``forward``, the owner is the replacement class.
        """
        replaced = self.replacement.winner is not None and self.kernel.winner.method == "forward"
        return self.replacement.cls if replaced else self.kernel.winner.owner

    @property
    def kernel_name(self) -> str:
        """The kernel as tables show it, such as ``RMSNorm.forward_native``."""
        return f"{self.owner.__qualname__}.{self.kernel.winner.method}"

    def function(self, form: str, *, compiled: bool = True) -> Callable[..., Any] | None:
        """Return the function that computes a functional form, or None if the kernel is a method alone.

        If ``compiled`` is False, return the function of eager calls, which may differ for an op that
        settings leave to a compiler.
        """
        kernel = self.kernel.winner if compiled else self.kernel.uncompiled
        return kernel.functional(form)

    @property
    def chosen(self) -> str:
        """The kernel and its provider, as processes tell each other what they run."""
        return f"{self.kernel_name} of {self.provider}"

    @property
    def provider(self) -> Provider:
        """The provider of the kernel; of an inherited kernel, the provider of the owner."""
        inherited = self.owner in self.replacement.target.__mro__
        return (
            discover().provider_of(self.owner.__module__)
            if inherited
            else self.replacement.provider
        )

    @property
    def decision(self) -> Decision:
        """The whole story: the kernel, resting on the choice of the class, of the plugins and of the platform."""
        kernel = self.kernel.decision
        parts = (self.replacement.decision, *self.background)
        reason = f"{kernel.reason}; class {self.replacement.decision.reason}"
        return Decision(
            self.subject, kernel.chosen, reason, kernel.candidates, kernel.setting, parts
        )

    @property
    def subject(self) -> str:
        """The op that is decided about; of a variant, its class, and the op whose name switches it."""
        target, name = self.replacement.target, self.replacement.op_name
        record = host_state().registry.ops.get(name or "")
        variant = record is not None and record.cls is not target
        return (
            f"{target.__qualname__}, a variant of op {name}"
            if variant
            else f"op {name or target.__qualname__}"
        )


def bind(cls: type) -> Binding:
    """Return the binding for constructing ``cls`` here and now: replacement, enabling and platform taken into account.

    Raises:
        OpgraftError: the platform, a plugin asked for by name, a conflict or a setting prevents a choice; see
            ``load_plugins``, ``choose_replacement`` and ``choose_kernel``.
    """
    state = host_state()
    known: Binding | None = (
        state.current_caches().constructed.get(cls) if state.loading.done else None
    )
    if known is not None:  # as every construction but the first
        return known
    decide = functools.partial(_decide, cls)
    return decide_with_plugins(lambda caches: caches.constructed, cls, decide)


def bind_exact(target: type, cls: type, enforce: bool = False) -> Binding:
    """Return the binding of an existing op of class ``cls``, which was constructed for ``target``.

    The op keeps its class. If the class is a replacement and does not apply here any more, the op
    takes the class that would be constructed now. If constructors forbid that, the op keeps its class
    and runs the native definition. The decision says why.

    ``enforce`` enables the op whatever the settings say.
    """
    decide = functools.partial(_decide_exact, target, cls)
    binding = decide_with_plugins(lambda caches: caches.existing, (target, cls), decide)
    # What was disabled because its class is gone stays so: enforcing is a word about settings.
    if enforce and (binding.kernel.enabled or _gone(target, cls)[1] is None):
        return enforced(binding)
    return binding if binding.enforced == enforce else replace(binding, enforced=enforce)


def _decide_exact(target: type, cls: type) -> Binding:
    if cls is target:
        return _decide(cls, only=[])
    declared, why = _gone(target, cls)
    if why is None:
        return _decide(target, only=[declared])
    now = _decide(target)
    choice = now.replacement
    others = [row for row in choice.rows if row[0].cls is not cls]
    constructor = own_constructor(cls, target)
    if constructor is None:
        constructor = own_constructor(choice.cls, target)
    if constructor is None:
        rows = (*others, (declared, why))
        left = replace(choice, rows=rows)
        return replace(now, replacement=left)
    rows = (*others, (declared, None))
    kept = replace(choice, rows=rows, winner=declared)
    because = f"{why}; {constructor} keeps it from becoming a {choice.cls.__qualname__}"
    idle = _idle_oot(kept)
    kernel = choose_kernel(cls, now.kernel.chain, False, because, target, idle_oot=idle)
    made = specialise(kernel)
    return replace(now, replacement=kept, kernel=kernel, specialisation=made)


def _gone(target: type, cls: type) -> tuple[Replacement, str | None]:
    """Return the declaration by which ``cls`` replaces ``target``, and why it does not apply here, or ``None``.

    A class of no plugin needs none: it may be registered in the process that saved the op alone.
    """
    state = host_state()
    platform = selected_platform().platform
    known = None
    for replacement in state.registry.replacements:
        if replacement.cls is cls and replacement.target is target:
            known = replacement  # the last one counts
    if known is None:
        provider = discover().provider_of(cls.__module__)
        why = f"this op was saved as {cls.__qualname__}, which nothing registers here"
        undeclared = Replacement(cls, qualified(target), target, provider)
        return undeclared, why if discover().has_plugin(provider) else None
    if known in state.active:
        wanted = state.settings().chosen_provider(op_name_of(target, state))
        against = objection_to(known, platform, wanted)
    else:
        against = _inactive(known, state)
    return known, against and f"this op was saved as {cls.__qualname__}, and {against}"


def _inactive(replacement: Replacement, state: HostState) -> str:
    record = state.plugins.get(replacement.plugin or "")
    if record is None:
        return f"nothing of {replacement.provider} activates it here"
    return state_of(record)


def own_constructor(cls: type, target: type) -> str | None:
    """Return the method, if any, that sets up instances and that a class between ``cls`` and ``target`` defines."""
    if target not in cls.__mro__:
        return None
    depth = cls.__mro__.index(target)
    for base in cls.__mro__[:depth]:
        for name in ("__init__", "__new__", "__setstate__"):
            if name in vars(base):
                return name
    return None


def enforced(binding: Binding) -> Binding:
    """Return the same choice of class, with the op enabled whatever the settings say."""
    choice = binding.replacement
    because = "enforce_enable=True"
    kernel = choose_kernel(
        choice.cls,
        binding.kernel.chain,
        True,
        because,
        choice.target,
        "enforce_enable",
        binding.kernel.idle_oot,
    )
    kernel = _shadowed(choice, kernel, host_state().settings())
    return Binding(
        choice,
        kernel,
        specialise(kernel),
        binding.background,
        enforced=True,
    )


_NO_SHADOW = (
    "a layer made of other ops may keep state, such as pages of a cache, which a second run would find changed; its "
    "ops are compared one by one"
)


def _shadowed(choice: ReplacementChoice, kernel: KernelChoice, settings: Settings) -> KernelChoice:
    """Have calls of the kernel compared with the native definition, where that is asked for and is another one.

    Where an earlier comparison has demoted the kernel, the native definition is chosen.
    """
    wanted = settings.config.shadow
    compared = wanted.share or wanted.first_call
    if not (kernel.enabled and compared):
        return kernel
    native = _native(choice, kernel)
    if native == kernel.winner:
        return kernel
    state = host_state()
    key = (choice.target, kernel.cls, kernel.winner, wanted)
    with state.lock:
        shadows = SHADOWS.of(state)
        shadow = shadows.get(key)
        if shadow is None:
            excluded = "" if choice.target.repeatable else _NO_SHADOW  # type: ignore[attr-defined]  # of a CustomOp
            name = choice.op_name or choice.target.__qualname__
            provider = choice.provider
            if kernel.winner.owner in choice.target.__mro__:
                provider = choice.own
            watched = choice.target, name, str(kernel.winner), provider, native.definition
            shadow = shadows[key] = Shadow(*watched, wanted, excluded)
    if shadow.demotion is not None:
        return _demoted(kernel, native, shadow.demotion, settings)
    winner = replace(kernel.winner, shadow=shadow)
    return replace(kernel, found=(winner, *kernel.found[1:]))


def _native(choice: ReplacementChoice, kernel: KernelChoice) -> Kernel:
    """Return the native definition of an op.

    The definition of a replacement goes first, since the replacement may hold its weights in a layout
    of its own. If that is the kernel itself, the definition of the target is returned.
    """
    native = _disabled(kernel.cls, choice, kernel).winner
    if native == kernel.winner:
        native = _disabled(choice.target, choice, kernel).winner
    return native


def _disabled(cls: type, choice: ReplacementChoice, kernel: KernelChoice) -> KernelChoice:
    return choose_kernel(cls, kernel.chain, False, "", choice.target, idle_oot=kernel.idle_oot)


def _idle_oot(choice: ReplacementChoice) -> frozenset[type]:
    declared = host_state().registry.replacements
    # An op that was saved elsewhere may belong to a replacement that nothing declares here.
    replacements = [*declared, choice.winner] if choice.winner else declared
    return idle_oot_classes(choice.cls, selected_platform().platform.name, replacements)


def native_of(binding: Binding) -> Kernel | None:
    """Return the native definition of an op whose kernel is another one; None if the op runs its native definition."""
    native = _native(binding.replacement, binding.kernel)
    return None if native == binding.kernel.winner else native


def without_compiler(binding: Binding) -> Binding:
    """Return the binding with the kernel that runs if no compiler has the op; of the same class."""
    kernel = binding.kernel
    if not kernel.left_to_compiler:
        return binding
    first = kernel.uncompiled
    others = [each for each in kernel.found if each != first]
    found = (first, *others)
    kernel = replace(kernel, found=found, enabled=True, left_to_compiler=False)
    return replace(binding, kernel=kernel)


def watched(binding: Binding, shadow: Shadow) -> Binding:
    """Return the binding with a shadow over its kernel, in a class that lives as long as its instances."""
    kernel = binding.kernel
    winner = replace(kernel.winner, shadow=shadow)
    kernel = replace(kernel, found=(winner, *kernel.found[1:]))
    further = continuations(kernel)
    made = _specialisation(kernel.cls, kernel.winner, further)
    return replace(binding, kernel=kernel, specialisation=made)


def _demoted(
    kernel: KernelChoice, native: Kernel, because: str, settings: Settings
) -> KernelChoice:
    found = (native, *(each for each in kernel.found if each != native))
    switch = settings.to_change("shadow.demote", "OPGRAFT_SHADOW_DEMOTE or shadow.demote")
    return replace(kernel, found=found, enabled=False, enabled_because=because, switch=switch)


def without_drift(binding: Binding) -> Binding:
    """Return a binding as it is, or with the native definition where shadow mode has demoted its kernel since.

    The specialisation stays: its calls have run the native definition from then on.
    """
    shadow = binding.kernel.winner.shadow
    if shadow is None or shadow.demotion is None:
        return binding
    native = _native(binding.replacement, binding.kernel)
    kernel = _demoted(binding.kernel, native, shadow.demotion, host_state().settings())
    return replace(binding, kernel=kernel)


def _decide(cls: Any, *, only: list[Replacement] | None = None) -> Binding:
    """Decide for constructing ``cls``, among all active replacements; an existing op has ``only`` these."""
    selection = selected_platform()
    state = host_state()
    with state.lock:
        settings = state.shared_settings()
        active = list(state.active)
        name = op_name_of(cls, state)
    check_names(settings, state.registry)
    check_loaded_with(settings, state)
    settings, measured = follow(cls, name, settings, active)
    if only is None:
        own = discover().provider_of(cls.__module__)
        kin = kin_of(cls, active)
        choice = choose_replacement(
            cls, name, own, active, selection.platform, settings, kin, absence_of
        )
    else:
        choice = _kept_class(cls, name, only)
    enabled, because, switch = _enabled(choice, settings)
    chain = effective_chain(selection.platform)
    idle = _idle_oot(choice)
    kernel = choose_kernel(choice.cls, chain, enabled, because, cls, switch, idle)
    _report_broken_checks(kernel)
    kernel = _shadowed(
        choice, replace(kernel, left_to_compiler=_left(choice, kernel, settings)), settings
    )
    background = (*measured, plugins_decision(state.plugins.values(), settings), selection.decision)
    binding = Binding(choice, kernel, specialise(kernel), background)
    record = state.registry.ops.get(name or "")
    # A scope is the word of this process alone.
    if only is None and record is not None and record.cls is cls and CURRENT_SCOPE.get() is None:
        expect_choice_agrees(f"kernel of {record.name}", binding.chosen)
    if logger.isEnabledFor(logging.DEBUG):
        decision = binding.decision
        logger.debug("%s", decision.summary(), extra=decision.attributes())
    return binding


def _kept_class(cls: type, name: str | None, only: list[Replacement]) -> ReplacementChoice:
    """Return the choice for an existing op: its class, whatever ``providers`` asks for."""
    own = discover().provider_of(cls.__module__)
    rows = tuple((replacement, None) for replacement in only)
    winner = only[0] if only else None
    return ReplacementChoice(cls, own, name, rows, winner)


def _report_broken_checks(kernel: KernelChoice) -> None:
    """Log once each kernel that is not used because the check of what it needs is at fault."""
    for skipped, why in kernel.passed_over:
        if why.startswith(CHECK_RAISED):
            logger.warning_once(
                "%s", printable(f"{skipped} at {skipped.location} is not used: {why}")
            )


def _enabled(choice: ReplacementChoice, settings: Settings) -> tuple[bool, str, str]:
    """Decide whether the op is enabled, why, and what would change it.

    The class says so, if it has a method ``enabled`` of its own.
    """
    cls: Any = choice.cls
    if settings.chosen_provider(choice.op_name) == NATIVE_CHOICE:
        return *settings.enabled(choice.op_name), settings.to_change("providers", PROVIDERS)
    owner = definer(cls, "enabled")
    if owner is not None:
        return *_says(cls, owner), ""
    if not choice.target.switchable:  # type: ignore[attr-defined]  # of a CustomOp
        return True, "this op is not switched by custom_ops", ""
    return *settings.enabled(choice.op_name), settings.to_change(
        "compilation_config.custom_ops", SWITCH
    )


def _left(choice: ReplacementChoice, kernel: KernelChoice, settings: Settings) -> bool:
    """Return True if an op is disabled for a compiler alone, and its kernel takes all calls, none compared."""
    compared = settings.config.shadow.share or settings.config.shadow.first_call
    if kernel.enabled or compared or definer(choice.cls, "enabled") is not None:
        return False
    return settings.leaves_to_compiler(choice.op_name)


def _says(cls: Any, owner: type) -> tuple[bool, str]:
    """Ask a class whether it is enabled; where that raises it is not."""
    provider = discover().provider_of(owner.__module__)
    try:
        what = f"{owner.__qualname__}.enabled() of {provider}"
        with watching.watched(what, provider), watching.kept(what, provider, owner):
            enabled = bool(cls.enabled())
        return enabled, f"{owner.__qualname__}.enabled() says so"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin's code
        says = printable(f"{SWITCH_RAISED} {described(error)} at {location_of(owner)}")
        logger.warning_once("%s", printable(f"{owner.__qualname__} is disabled: {says}"))
        return False, says


def specialise(choice: KernelChoice) -> Any:
    """Make the subclass of the op class whose ``forward`` is the chosen kernel: one per choice, kept with the class."""
    op_class, kernel = choice.cls, choice.winner
    # All that a specialisation depends on: a method that a plugin has replaced for a while may have been bound, too.
    definition = id(kernel.definition)
    key = (kernel, definition, choice.chain, choice.enabled, kernel.shadow, choice.idle_oot)
    with host_state().lock:
        # vars(), as getattr() would find the specialisations of a base class.
        cache = vars(op_class).get(_CACHE)
        if cache is None:
            cache = {}
            setattr(op_class, _CACHE, cache)
        if key not in cache:
            further = continuations(choice)
            cache[key] = _specialisation(op_class, kernel, further)
        return cache[key]


def _checked_constructor(op_class: Any, owner: type) -> Callable[..., None]:
    """Return the constructor of an op class with a check: ``owner`` must call its base's constructor."""
    construct = op_class.__init__
    provider = discover().provider_of(owner.__module__)
    own = vars(owner)[_INIT]
    keeping = watching.Keeping(f"{owner.__qualname__}.__init__ of {provider}", provider, own)

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # its frame says so
        cause = None
        try:
            with keeping.step():
                construct(self, *args, **kwargs)
        except AttributeError as error:
            if _ASSIGNED_TOO_EARLY not in str(error):
                raise
            cause = error
        if not _of_modules(self):
            raise ConstructionError(
                f"{owner.__qualname__}.__init__ at {location_of(own)} does not call "
                f"super().__init__(), so the {op_class.__qualname__} has neither parameters nor children: call it first"
            ) from cause

    return __init__


def _of_modules(op: Any) -> bool:
    """Return True if the constructor of ``torch.nn.Module`` has run."""
    return "_parameters" in vars(op)


def _specialisation(op_class: type, kernel: Kernel, further: dict[str, str | None]) -> type:
    raw = kernel.definition
    prepare(raw)
    if isinstance(raw, staticmethod) and is_inference_only(raw.__func__):
        raise RegistrationError(
            f"{kernel} at {kernel.location} is inference_only and static: let it take self"
        )
    forward_owner = definer(op_class, "forward")
    own_forward = vars(forward_owner)["forward"] if forward_owner else None
    watched = raw
    # An excluded shadow compares no call.
    if kernel.shadow and not kernel.shadow.excluded:
        prepare(kernel.shadow.native)
        watched = kernel.shadow.around(method_of(raw), method_of(kernel.shadow.native))
    namespace = {
        "forward": watched,
        OWN_FORWARD: own_forward,
        "op_class": op_class,
        "__module__": op_class.__module__,
        "__qualname__": op_class.__qualname__,
        "__doc__": op_class.__doc__,
        "__specialisation__": True,
        "__continuations__": further,
    }
    owner = definer(op_class, _INIT)
    if owner is not None and owner.__module__.partition(".")[0] != _HOST_PACKAGE:
        namespace[_INIT] = _checked_constructor(op_class, owner)
    try:
        return type(op_class)(op_class.__name__, (op_class,), namespace)
    except TypeError as error:
        raise RegistrationError(
            f"{op_class.__qualname__} at {location_of(op_class)} cannot be subclassed, which binding its kernel needs: "
            f"{error}. Give the arguments of its __init_subclass__ or metaclass defaults."
        ) from error
