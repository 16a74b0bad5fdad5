"""Bind an op class to a kernel: ``bind`` returns the class that construction instantiates.

An instance of an op belongs to a *specialisation*. This is a subclass per pair of op class and
kernel. The kernel is the method ``forward`` of the subclass, and the subclass has the name, module
and qualname of the op class. For ``RMSNorm`` on CUDA::

    class RMSNorm(RMSNorm):
        forward = RMSNorm.forward_cuda

``bind(RMSNorm)`` answers from a cache. Only the first call decides, in ``_decide``:

1. ``selected_platform`` has chosen the platform, and with it the chain of dispatch keys;
2. ``choose_replacement`` chooses the class: a plugin's replacement, or ``RMSNorm`` itself;
3. ``_enabled`` asks the settings if the op is enabled;
4. ``choose_kernel`` chooses a method of the class along the chain;
5. ``specialise`` makes the subclass. The class keeps the subclass for the next choice.

No instance is kept alive by a binding, and code that a compiler has seen is never changed: another
choice makes another subclass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
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
from opgraft.config import CURRENT_SCOPE, NATIVE_CHOICE, Settings, ShadowConfig
from opgraft.config.environment import PROVIDERS
from opgraft.errors import ConstructionError, RegistrationError
from opgraft.logger import logger
from opgraft.platform import effective_chain
from opgraft.plugins.agreement import expect_choice_agrees
from opgraft.plugins.discovery import discover
from opgraft.plugins.guarding import tell
from opgraft.plugins.host import check_loaded_with, decide_with_plugins, plugins_decision
from opgraft.plugins.outcomes import absence_of, state_of
from opgraft.plugins.selection import selected_platform
from opgraft.registry import watching
from opgraft.registry.choice import ReplacementChoice, choose_replacement, objection_to
from opgraft.registry.decision import Decision, Provider
from opgraft.registry.declarations import Replacement
from opgraft.registry.finding import Finding
from opgraft.registry.op_classes import definer, location_of, qualified
from opgraft.registry.state import HostState, host_state

_CACHE = "__opgraft_specialisations__"
_INIT = "__init__"
_ASSIGNED_TOO_EARLY = "before Module.__init__() call"
"""Part of torch's error for a parameter or child that is assigned before the base's constructor."""

_HOST_PACKAGE = "opgraft"


@dataclass(frozen=True)
class Binding:
    """The choice for one op class.

    Attributes:
        replacement: the choice of the class to construct.
        kernel: the choice of the method to run.
        specialisation: the subclass with the kernel as ``forward``.
        background: records of earlier choices: measurements, plugins, platform.
        enforced: the op is enabled whatever the settings say.
    """

    replacement: ReplacementChoice
    kernel: KernelChoice
    specialisation: type
    background: tuple[Decision, ...] = ()
    enforced: bool = False

    # All instances share the binding, and a copied op keeps the kernel.
    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the class only. Loading binds the class anew, on another platform perhaps."""
        return bind_exact, (self.replacement.target, self.replacement.cls, self.enforced)

    @property
    def owner(self) -> type:
        """The class that answers for the kernel: usually the class that defines the method.

        If a replacement inherits ``forward``, the owner is the replacement class.
        """
        kernel = self.kernel.winner
        is_replaced = self.replacement.winner is not None
        if is_replaced and kernel.method == "forward":
            return self.replacement.cls
        return kernel.owner

    @property
    def kernel_name(self) -> str:
        """The kernel as tables show it, such as ``RMSNorm.forward_native``."""
        return f"{self.owner.__qualname__}.{self.kernel.winner.method}"

    def function(self, form: str, *, compiled: bool = True) -> Callable[..., Any] | None:
        """Return the function that computes a functional form.

        Args:
            form: the name of the form, such as ``"rms_norm"``.
            compiled: if ``False``, return the function of eager calls. That may be another one for
                an op that settings leave to a compiler.

        Returns:
            The function, or ``None`` if the kernel is a method without functions.
        """
        kernel = self.kernel.winner if compiled else self.kernel.uncompiled
        return kernel.functional(form)

    @property
    def chosen(self) -> str:
        """The kernel and the provider in words. Processes compare these words."""
        return f"{self.kernel_name} of {self.provider}"

    @property
    def provider(self) -> Provider:
        """The provider of the kernel; of an inherited kernel, the provider of the owner."""
        owner = self.owner
        is_inherited = owner in self.replacement.target.__mro__
        if is_inherited:
            return discover().provider_of(owner.__module__)
        return self.replacement.provider

    @property
    def decision(self) -> Decision:
        """The record of the kernel, with the choices of class, plugins and platform below."""
        kernel = self.kernel.decision
        parts = (self.replacement.decision, *self.background)
        reason = f"{kernel.reason}; class {self.replacement.decision.reason}"
        return Decision(
            self.subject, kernel.chosen, reason, kernel.candidates, kernel.setting, parts
        )

    @property
    def subject(self) -> str:
        """The decided op in words, such as ``op rms_norm``.

        A variant is named by its class and by the op with the switch.
        """
        target = self.replacement.target
        name = self.replacement.op_name
        record = host_state().registry.ops.get(name or "")
        is_variant = record is not None and record.cls is not target
        if is_variant:
            return f"{target.__qualname__}, a variant of op {name}"
        return f"op {name or target.__qualname__}"


def bind(cls: type) -> Binding:
    """Return the binding for constructing ``cls`` here and now.

    The platform, the plugins, the settings and the current scope decide. All calls but the first
    answer from the caches of the process, which a change of settings or plugins empties.

    Raises:
        OpgraftError: the platform, a plugin asked for by name, a conflict or a setting prevents a
            choice; see ``load_plugins``, ``choose_replacement`` and ``choose_kernel``.
    """
    state = host_state()
    known: Binding | None = None
    if state.loading.done:
        known = state.current_caches().constructed.get(cls)
    # All constructions but the first end here.
    if known is not None:
        return known
    decide = functools.partial(_decide, cls)
    return decide_with_plugins(lambda caches: caches.constructed, cls, decide)


def bind_exact(target: type, cls: type, enforce: bool = False) -> Binding:
    """Return the binding of an existing op of class ``cls``, constructed for ``target``.

    The op keeps its class. If the class is a replacement and does not apply here any more, the op
    takes the class that would be constructed now. If constructors forbid that, the op keeps its
    class and runs the native definition. The decision says why.

    ``enforce`` enables the op whatever the settings say.
    """
    decide = functools.partial(_decide_exact, target, cls)
    binding = decide_with_plugins(lambda caches: caches.existing, (target, cls), decide)
    # An op without its class stays disabled: to enforce is a word about settings.
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
    # Without constructors of their own, the op can become the other class.
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
    """Return the declaration of ``cls`` as a replacement of ``target``, and the objection to it.

    The objection is ``None`` if the replacement applies here. A class outside of plugins needs no
    declaration: perhaps only the process that saved the op has registered the class.
    """
    state = host_state()
    known = None
    for replacement in state.registry.replacements:
        if replacement.cls is cls and replacement.target is target:
            known = replacement  # the last one counts
    if known is None:
        provider = discover().provider_of(cls.__module__)
        undeclared = Replacement(cls, qualified(target), target, provider)
        if not discover().has_plugin(provider):
            return undeclared, None
        return undeclared, f"this op was saved as {cls.__qualname__}, which nothing registers here"
    if known in state.active:
        platform = selected_platform().platform
        wanted = state.settings().chosen_provider(op_name_of(target, state))
        against = objection_to(known, platform, wanted)
    else:
        against = _inactive(known, state)
    if not against:
        return known, against
    return known, f"this op was saved as {cls.__qualname__}, and {against}"


def _inactive(replacement: Replacement, state: HostState) -> str:
    record = state.plugins.get(replacement.plugin or "")
    if record is None:
        return f"nothing of {replacement.provider} activates it here"
    return state_of(record)


def own_constructor(cls: type, target: type) -> str | None:
    """Return the name of a constructor that a class between ``cls`` and ``target`` defines.

    Constructors are ``__init__``, ``__new__`` and ``__setstate__``. ``None`` if no class between
    the two defines one.
    """
    if target not in cls.__mro__:
        return None
    depth = cls.__mro__.index(target)
    for base in cls.__mro__[:depth]:
        for name in ("__init__", "__new__", "__setstate__"):
            if name in vars(base):
                return name
    return None


def enforced(binding: Binding) -> Binding:
    """Return the binding of the same class with the op enabled, whatever the settings say."""
    choice = binding.replacement
    chain = binding.kernel.chain
    because = "enforce_enable=True"
    kernel = choose_kernel(
        choice.cls,
        chain,
        True,
        because,
        choice.target,
        "enforce_enable",
        binding.kernel.idle_oot,
    )
    kernel = _shadowed(choice, kernel, host_state().settings())
    made = specialise(kernel)
    return Binding(choice, kernel, made, binding.background, enforced=True)


_NO_SHADOW = (
    "a layer made of other ops may keep state, such as pages of a cache, which a second run would "
    "find changed; its ops are compared one by one"
)


def _shadowed(choice: ReplacementChoice, kernel: KernelChoice, settings: Settings) -> KernelChoice:
    """Return the choice with a shadow over the kernel, if the settings ask for shadow mode.

    A shadow compares calls with the native definition. A native definition gets no shadow. If an
    earlier comparison has demoted the kernel, the native definition is chosen.
    """
    wanted = settings.config.shadow
    is_wanted = wanted.share or wanted.first_call
    if not (kernel.enabled and is_wanted):
        return kernel
    native = _native(choice, kernel)
    if native == kernel.winner:
        return kernel
    shadow = _shadow_of(choice, kernel, native, wanted)
    if shadow.demotion is not None:
        return _demoted(kernel, native, shadow.demotion, settings)
    return _with_shadow(kernel, shadow)


def _shadow_of(
    choice: ReplacementChoice, kernel: KernelChoice, native: Kernel, wanted: ShadowConfig
) -> Shadow:
    """Return the shadow of a kernel: one per process for equal settings."""
    target: Any = choice.target
    state = host_state()
    key = (target, kernel.cls, kernel.winner, wanted)
    with state.lock:
        shadows = SHADOWS.of(state)
        known = shadows.get(key)
        if known is not None:
            return known
        name = choice.op_name or target.__qualname__
        is_inherited = kernel.winner.owner in target.__mro__
        provider = choice.own if is_inherited else choice.provider
        excluded = "" if target.repeatable else _NO_SHADOW
        shadow = Shadow(
            target, name, str(kernel.winner), provider, native.definition, wanted, excluded
        )
        shadows[key] = shadow
    return shadow


def _with_shadow(kernel: KernelChoice, shadow: Shadow) -> KernelChoice:
    winner = replace(kernel.winner, shadow=shadow)
    others = kernel.found[1:]
    return replace(kernel, found=(winner, *others))


def _native(choice: ReplacementChoice, kernel: KernelChoice) -> Kernel:
    """Return the native definition of an op.

    The definition of a replacement goes first, since the replacement may hold its weights in a
    layout of its own. If that is the kernel itself, the definition of the target is returned.
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
    """Return the native definition of an op, or ``None`` if the bound kernel is native."""
    native = _native(binding.replacement, binding.kernel)
    return None if native == binding.kernel.winner else native


def without_compiler(binding: Binding) -> Binding:
    """Return the binding of the same class with the kernel of eager calls.

    Settings may leave an op to a compiler; without the compiler, another kernel runs.
    """
    kernel = binding.kernel
    if not kernel.left_to_compiler:
        return binding
    first = kernel.uncompiled
    others = [each for each in kernel.found if each != first]
    found = (first, *others)
    kernel = replace(kernel, found=found, enabled=True, left_to_compiler=False)
    return replace(binding, kernel=kernel)


def watched(binding: Binding, shadow: Shadow) -> Binding:
    """Return the binding with a shadow over the kernel, in a new specialisation.

    No cache keeps the specialisation: the class lives as long as its instances.
    """
    kernel = _with_shadow(binding.kernel, shadow)
    further = continuations(kernel)
    made = _specialisation(kernel.cls, kernel.winner, further)
    return replace(binding, kernel=kernel, specialisation=made)


def _demoted(
    kernel: KernelChoice, native: Kernel, because: str, settings: Settings
) -> KernelChoice:
    others = [each for each in kernel.found if each != native]
    found = (native, *others)
    switch = settings.to_change("shadow.demote", "OPGRAFT_SHADOW_DEMOTE or shadow.demote")
    return replace(kernel, found=found, enabled=False, enabled_because=because, switch=switch)


def without_drift(binding: Binding) -> Binding:
    """Return the binding, with the native definition if shadow mode has demoted the kernel.

    The specialisation stays: since the demotion, the shadow around the kernel calls the native
    definition.
    """
    shadow = binding.kernel.winner.shadow
    if shadow is None or shadow.demotion is None:
        return binding
    # A call has demoted the kernel after the op was bound.
    native = _native(binding.replacement, binding.kernel)
    kernel = _demoted(binding.kernel, native, shadow.demotion, host_state().settings())
    return replace(binding, kernel=kernel)


def _decide(cls: Any, *, only: list[Replacement] | None = None) -> Binding:
    """Decide on class and kernel for constructing ``cls``.

    All active replacements take part. An existing op has ``only`` the replacement of its class.
    """
    selection = selected_platform()
    platform = selection.platform
    state = host_state()
    # Read together: another thread may load a plugin.
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
        choice = choose_replacement(cls, name, own, active, platform, settings, kin, absence_of)
    else:
        choice = _kept_class(cls, name, only)

    enabled, because, switch = _enabled(choice, settings)
    chain = effective_chain(platform)
    idle = _idle_oot(choice)
    kernel = choose_kernel(choice.cls, chain, enabled, because, cls, switch, idle)
    _report_broken_checks(kernel)
    left_to_compiler = _left_to_compiler(choice, kernel, settings)
    kernel = replace(kernel, left_to_compiler=left_to_compiler)
    kernel = _shadowed(choice, kernel, settings)

    plugins = plugins_decision(state.plugins.values(), settings)
    background = (*measured, plugins, selection.decision)
    binding = Binding(choice, kernel, specialise(kernel), background)
    if only is None:
        _compare_with_parent(binding, state)
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


def _compare_with_parent(binding: Binding, state: HostState) -> None:
    """Expect the choice that the parent process has handed down, if there is one."""
    # The parent does not know the scopes of this process.
    if CURRENT_SCOPE.get() is not None:
        return
    choice = binding.replacement
    record = state.registry.ops.get(choice.op_name or "")
    if record is not None and record.cls is choice.target:
        expect_choice_agrees(f"kernel of {record.name}", binding.chosen)


def _report_broken_checks(kernel: KernelChoice) -> None:
    """Log once each kernel that is not used because its ``needs`` check raised."""
    for skipped, why in kernel.passed_over:
        if why.startswith(CHECK_RAISED):
            told = f"{skipped} at {skipped.location} is not used: {why}"
            logger.warning_once("%s", printable(told))


def _enabled(choice: ReplacementChoice, settings: Settings) -> tuple[bool, str, str]:
    """Return if the op is enabled, why, and the setting to change that.

    A class with a method ``enabled`` of its own decides for itself.
    """
    cls: Any = choice.cls
    target: Any = choice.target
    name = choice.op_name
    # The user has asked for the native definition by hand.
    if settings.chosen_provider(name) == NATIVE_CHOICE:
        switch = settings.to_change("providers", PROVIDERS)
        return *settings.enabled(name), switch
    owner = definer(cls, "enabled")
    if owner is not None:
        return *_ask_class(cls, owner), ""
    if not target.switchable:
        return True, "this op is not switched by custom_ops", ""
    switch = settings.to_change("compilation_config.custom_ops", SWITCH)
    return *settings.enabled(name), switch


def _left_to_compiler(choice: ReplacementChoice, kernel: KernelChoice, settings: Settings) -> bool:
    """Return True if the op is disabled only so that a compiler may fuse its native definition.

    That is not so for an op that shadow mode compares, or with a method ``enabled`` of its own.
    """
    shadow = settings.config.shadow
    is_compared = shadow.share or shadow.first_call
    if kernel.enabled or is_compared or definer(choice.cls, "enabled") is not None:
        return False
    return settings.leaves_to_compiler(choice.op_name)


def _ask_class(cls: Any, owner: type) -> tuple[bool, str]:
    """Return the answer of the class's own ``enabled``, and the reason; ``False`` if it raises."""
    provider = discover().provider_of(owner.__module__)
    try:
        what = f"{owner.__qualname__}.enabled() of {provider}"
        with watching.watched(what, provider), watching.kept(what, provider, owner):
            enabled = bool(cls.enabled())
        return enabled, f"{owner.__qualname__}.enabled() says so"
    except KeyboardInterrupt:
        raise
    # A plugin's code may raise anything.
    except BaseException as error:
        reason = printable(f"{SWITCH_RAISED} {described(error)} at {location_of(owner)}")
        logger.warning_once("%s", printable(f"{owner.__qualname__} is disabled: {reason}"))
        return False, reason


def specialise(choice: KernelChoice) -> Any:
    """Return the subclass of the op class with the chosen kernel as ``forward``.

    There is one subclass per choice, and the op class keeps it.
    """
    op_class = choice.cls
    kernel = choice.winner
    # The id tells a method from another one that a plugin has put in its place for a while.
    definition = id(kernel.definition)
    key = (kernel, definition, choice.chain, choice.enabled, kernel.shadow, choice.idle_oot)
    with host_state().lock:
        # vars(), as getattr() would find the specialisations of a base class.
        cache = vars(op_class).get(_CACHE)
        if cache is None:
            cache = {}
            setattr(op_class, _CACHE, cache)
        known = cache.get(key)
        # Code of others may have changed the class since.
        if known is None or _is_changed(*known):
            made = _specialisation(op_class, kernel, continuations(choice))
            known = cache[key] = (made, dict(vars(made)))
        return known[0]


def _is_changed(made: type, names: Mapping[str, Any]) -> bool:
    """Return True if methods of a specialisation were changed, and tell of each."""
    # A plugin may construct an op while it is loaded, and assign to a method of type(op).
    # Later ops of that class would have the method, too.
    now = vars(made)
    changed = [name for name in now if now[name] is not names.get(name) and _runs(now[name])]
    for name in changed:
        _tell_of_change(made, name)
    return bool(changed) or not now.keys() >= names.keys()


def _runs(value: object) -> bool:
    """Return True for a method."""
    # Python and compilers note further values in a class.
    return callable(value) or isinstance(value, property | classmethod | staticmethod)


def _tell_of_change(made: type, name: str) -> None:
    method = vars(made)[name]
    defined_in = str(getattr(method, "__module__", None) or "")
    provider = discover().provider_of(defined_in)
    words = (
        f"{provider} assigned to {name} of the class of an op, {made.__qualname__}: "
        "ops constructed from now on have their own method again"
    )
    tell(Finding(words, provider, location_of(method)))


def _checked_constructor(op_class: Any, owner: type) -> Callable[..., None]:
    """Return the constructor of an op class with a check for ``super().__init__()``.

    ``owner`` is the class that defines the constructor. The check raises ``ConstructionError`` if
    the constructor of ``torch.nn.Module`` has not run.
    """
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
            # torch says neither which class is at fault nor what to do.
            if _ASSIGNED_TOO_EARLY not in str(error):
                raise
            cause = error
        if not _of_modules(self):
            raise ConstructionError(
                f"{owner.__qualname__}.__init__ at {location_of(own)} does not call "
                f"super().__init__(), so the {op_class.__qualname__} has neither parameters nor "
                "children: call it first"
            ) from cause

    return __init__


def _of_modules(op: Any) -> bool:
    """Return True if the constructor of ``torch.nn.Module`` has run."""
    return "_parameters" in vars(op)


def _specialisation(op_class: type, kernel: Kernel, further: dict[str, str | None]) -> type:
    """Make the subclass of ``op_class`` with ``kernel`` as ``forward``.

    Args:
        op_class: the class, a replacement perhaps.
        kernel: the method to run.
        further: the table for ``CustomOp._call_next``, from ``continuations``.

    Raises:
        RegistrationError: the class cannot be subclassed, or the kernel's marks contradict it.
    """
    definition = kernel.definition
    prepare(definition)
    if isinstance(definition, staticmethod) and is_inference_only(definition.__func__):
        raise RegistrationError(
            f"{kernel} at {kernel.location} is inference_only and static: let it take self"
        )
    forward = definition
    shadow = kernel.shadow
    # An excluded shadow compares no call.
    if shadow and not shadow.excluded:
        prepare(shadow.native)
        forward = shadow.around(method_of(definition), method_of(shadow.native))
    forward_owner = definer(op_class, "forward")
    own_forward = vars(forward_owner)["forward"] if forward_owner else None
    namespace = {
        "forward": forward,
        OWN_FORWARD: own_forward,
        "op_class": op_class,
        "__module__": op_class.__module__,
        "__qualname__": op_class.__qualname__,
        "__doc__": op_class.__doc__,
        "__specialisation__": True,
        "__continuations__": further,
    }
    owner = definer(op_class, _INIT)
    # The constructors of opgraft are known to call super().__init__().
    if owner is not None and owner.__module__.partition(".")[0] != _HOST_PACKAGE:
        namespace[_INIT] = _checked_constructor(op_class, owner)
    # By the metaclass of the op class: torch and plugins may have one of their own.
    try:
        return type(op_class)(op_class.__name__, (op_class,), namespace)
    except TypeError as error:
        raise RegistrationError(
            f"{op_class.__qualname__} at {location_of(op_class)} cannot be subclassed, which "
            f"binding its kernel needs: {error}. Give the arguments of its __init_subclass__ or "
            "metaclass defaults."
        ) from error
