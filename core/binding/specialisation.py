"""Bind an op class to a kernel: ``bind`` returns the class that construction instantiates.

An instance of an op belongs to a *specialisation*. This is a subclass per pair of op class and
kernel. The kernel is the method ``forward`` of the subclass, and the subclass has the name, module
and qualname of the op class. For ``RMSNorm`` on CUDA::

    class RMSNorm(RMSNorm):
        forward = RMSNorm.forward_cuda

``bind(RMSNorm)`` answers from a cache. Only the first call decides:

0. ``decide_with_plugins`` loads the plugins, and then calls ``_decide_binding`` for the rest;
1. ``selected_platform`` has chosen the platform, and with it the chain of dispatch keys;
2. ``choose_replacement`` chooses the class: a plugin's replacement, or ``RMSNorm`` itself;
3. ``_enabled`` asks the settings if the op is enabled;
4. ``choose_kernel`` chooses a method of the class along the chain;
5. ``specialise`` makes the subclass. The class keeps the subclass for the next choice.

In this module a ``kernel`` is one method, a ``kernel_choice`` the choice among the methods of a
class, and a ``class_choice`` the choice among a class and its replacements.

No instance is kept alive by a binding, and code that a compiler has seen is never changed: another
choice makes another subclass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.binding.derivation import resolve_functions
from opgraft.binding.in_tree import idle_oot_classes
from opgraft.binding.kernels import (
    HIDDEN_FORWARD,
    SWITCH,
    Kernel,
    KernelChoice,
    choose_kernel,
    continuations_of,
    method_of,
)
from opgraft.binding.marks import CheckRaised, SwitchRaised, is_inference_only
from opgraft.binding.measurements import follow
from opgraft.binding.names import check_names, op_name_of, other_replacements_of_op
from opgraft.binding.shadow import SHADOWS, Shadow
from opgraft.config import CURRENT_SCOPE, NATIVE_CHOICE, Settings, ShadowConfig
from opgraft.config.environment import PROVIDERS
from opgraft.errors import ConstructionError, RegistrationError
from opgraft.platform import Platform, effective_chain
from opgraft.plugins.agreement import expect_choice_agrees
from opgraft.plugins.discovery import discover
from opgraft.plugins.guarding import tell
from opgraft.plugins.host import check_loaded_with, decide_with_plugins, plugins_decision
from opgraft.plugins.outcomes import absence_of, state_of
from opgraft.plugins.selection import selected_platform
from opgraft.registry import watching
from opgraft.registry.choice import (
    ReplacementChoice,
    choose_replacement,
    objection_to,
    settled,
)
from opgraft.registry.decision import Decision, Provider
from opgraft.registry.declarations import Replacement
from opgraft.registry.finding import Finding
from opgraft.registry.op_classes import definer, location_of, qualified
from opgraft.registry.state import HostState, host_state

_CACHE = "__opgraft_specialisations__"
_OURS = "__opgraft_"
"""The beginning of names that opgraft itself gives to classes of ops."""
_INIT = "__init__"
_ASSIGNED_TOO_EARLY = "before Module.__init__() call"
"""Part of torch's error for a parameter or child that is assigned before the base's constructor."""

_HOST_PACKAGE = "opgraft"


@dataclass(frozen=True)
class Binding:
    """The choice for one op class.

    Attributes:
        replacement: the choice of the class to construct, with or without a replacement.
        kernel: the choice of the method to run, which is ``kernel.winner``.
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
            compiled: if ``False``, return the function of eager calls: another one only for an op
                that settings leave to a compiler.

        Returns:
            The function, or ``None`` if the kernel is a method without functions.
        """
        kernel = self.kernel.winner if compiled else self.kernel.eager
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
        of_kernel = self.kernel.decision
        of_class = self.replacement.decision
        return Decision(
            self.subject,
            of_kernel.chosen,
            f"{of_kernel.reason}; class {of_class.reason}",
            of_kernel.candidates,
            of_kernel.setting,
            (of_class, *self.background),
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
    decide = functools.partial(_decide_binding, cls)
    return decide_with_plugins(lambda caches: caches.constructed, cls, decide)


def bind_exact(target: type, cls: type, enforce: bool = False) -> Binding:
    """Return the binding of an existing op of class ``cls``, constructed for ``target``.

    The op keeps its class. If the class is a replacement and does not apply here any more, the op
    takes the class that would be constructed now. If constructors forbid that, the op keeps its
    class and runs the native definition. The decision says why.

    ``enforce`` enables the op whatever the settings say.
    """
    decide = functools.partial(_decide_existing, target, cls)
    binding = decide_with_plugins(lambda caches: caches.existing, (target, cls), decide)
    if enforce:
        _, objection = _declaration_of(target, cls)
        # An op without its class stays disabled: to enforce is a word about settings.
        if binding.kernel.enabled or objection is None:
            return enforced(binding)
    return binding if binding.enforced == enforce else replace(binding, enforced=enforce)


def _decide_existing(target: type, cls: type) -> Binding:
    """Decide on the kernel of an existing op of class ``cls``, constructed for ``target``."""
    if cls is target:
        return _decide_binding(target, _kept_class(target, None))
    declaration, objection = _declaration_of(target, cls)
    if objection is None:
        return _decide_binding(target, _kept_class(target, declaration))
    now = _decide_binding(target)
    class_choice = now.replacement
    others = [row for row in class_choice.rows if row[0].cls is not cls]
    constructor = own_constructor(cls, target)
    if constructor is None:
        constructor = own_constructor(class_choice.cls, target)
    # Without constructors of their own, the op can become the other class.
    if constructor is None:
        rows = (*others, (declaration, objection))
        left = replace(class_choice, rows=rows)
        return replace(now, replacement=left)
    rows = (*others, (declaration, None))
    kept = replace(class_choice, rows=rows, winner=declaration)
    because = f"{objection}; {constructor} keeps it from becoming a {class_choice.cls.__qualname__}"
    return _with_native_kernel(replace(now, replacement=kept), cls, target, because)


def _with_native_kernel(now: Binding, cls: type, target: type, because: str) -> Binding:
    """Bind ``cls`` to its native definition, with the reason."""
    idle = _idle_oot(now.replacement)
    kernel_choice = choose_kernel(cls, now.kernel.chain, False, because, target, idle_oot=idle)
    return replace(now, kernel=kernel_choice, specialisation=specialise(kernel_choice))


def _declaration_of(target: type, cls: type) -> tuple[Replacement, str | None]:
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
        name = op_name_of(target, state)
        active = state.active
        settings = settled(
            state.settings(),
            target,
            op_name=name,
            own=discover().provider_of(target.__module__),
            active=active,
            platform=platform,
            other_replacements=other_replacements_of_op(target, active),
        )
        wanted = settings.chosen_provider(name)
        objection = objection_to(known, platform, wanted)
    else:
        objection = _inactive(known, state)
    if not objection:
        return known, objection
    return known, f"this op was saved as {cls.__qualname__}, and {objection}"


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
    class_choice = binding.replacement
    kernel_choice = choose_kernel(
        class_choice.cls,
        binding.kernel.chain,
        True,
        "enforce_enable=True",
        class_choice.target,
        "enforce_enable",
        binding.kernel.idle_oot,
    )
    kernel_choice = _shadowed_if_asked(class_choice, kernel_choice, host_state().settings())
    made = specialise(kernel_choice)
    return Binding(class_choice, kernel_choice, made, binding.background, enforced=True)


_NO_SHADOW = (
    "a layer made of other ops may keep state, such as pages of a cache, which a second run would "
    "find changed; its ops are compared one by one"
)


def _shadowed_if_asked(
    class_choice: ReplacementChoice, kernel_choice: KernelChoice, settings: Settings
) -> KernelChoice:
    """Return the choice with a shadow over the kernel, if the settings ask for shadow mode.

    A shadow compares calls with the native definition. A native definition gets no shadow. If an
    earlier comparison has demoted the kernel, the native definition is chosen.
    """
    wanted = settings.config.shadow
    is_wanted = wanted.share or wanted.first_call
    if not (kernel_choice.enabled and is_wanted):
        return kernel_choice
    native = _native(class_choice, kernel_choice)
    if native == kernel_choice.winner:
        return kernel_choice
    shadow = _shadow_of(class_choice, kernel_choice, native, wanted)
    if shadow.demotion is not None:
        return _demoted(kernel_choice, native, shadow.demotion, settings)
    return _with_shadow(kernel_choice, shadow)


def _shadow_of(
    class_choice: ReplacementChoice,
    kernel_choice: KernelChoice,
    native: Kernel,
    wanted: ShadowConfig,
) -> Shadow:
    """Return the shadow of a kernel: one per process for equal settings."""
    target: Any = class_choice.target
    kernel = kernel_choice.winner
    state = host_state()
    key = (target, kernel_choice.cls, kernel, wanted)
    with state.lock:
        shadows = SHADOWS.of(state)
        known = shadows.get(key)
        if known is not None:
            return known
        name = class_choice.op_name or target.__qualname__
        is_inherited = kernel.owner in target.__mro__
        provider = class_choice.own if is_inherited else class_choice.provider
        excluded = "" if target.repeatable else _NO_SHADOW
        shadow = Shadow(target, name, str(kernel), provider, native.definition, wanted, excluded)
        shadows[key] = shadow
    return shadow


def _with_shadow(kernel_choice: KernelChoice, shadow: Shadow) -> KernelChoice:
    winner = replace(kernel_choice.winner, shadow=shadow)
    others = kernel_choice.found[1:]
    return replace(kernel_choice, found=(winner, *others))


def _native(class_choice: ReplacementChoice, kernel_choice: KernelChoice) -> Kernel:
    """Return the native definition of an op.

    The definition of a replacement goes first, since the replacement may hold its weights in a
    layout of its own. If that is the kernel itself, the definition of the target is returned.
    """
    native = _disabled(kernel_choice.cls, class_choice, kernel_choice).winner
    if native == kernel_choice.winner:
        native = _disabled(class_choice.target, class_choice, kernel_choice).winner
    return native


def _disabled(
    cls: type, class_choice: ReplacementChoice, kernel_choice: KernelChoice
) -> KernelChoice:
    return choose_kernel(
        cls,
        kernel_choice.chain,
        False,
        "",
        class_choice.target,
        idle_oot=kernel_choice.idle_oot,
    )


def _idle_oot(class_choice: ReplacementChoice) -> frozenset[type]:
    declared = host_state().registry.replacements
    # An op that was saved elsewhere may belong to a replacement that nothing declares here.
    winner = class_choice.winner
    replacements = [*declared, winner] if winner else declared
    return idle_oot_classes(class_choice.cls, selected_platform().platform.name, replacements)


def native_of(binding: Binding) -> Kernel | None:
    """Return the native definition of an op, or ``None`` if the bound kernel is native."""
    native = _native(binding.replacement, binding.kernel)
    return None if native == binding.kernel.winner else native


def without_compiler(binding: Binding) -> Binding:
    """Return the binding of the same class with the kernel of eager calls.

    Settings may leave an op to a compiler; without the compiler, another kernel runs.
    """
    kernel_choice = binding.kernel
    if not kernel_choice.left_to_compiler:
        return binding
    eager = kernel_choice.eager
    others = [kernel for kernel in kernel_choice.found if kernel != eager]
    kernel_choice = replace(
        kernel_choice, found=(eager, *others), enabled=True, left_to_compiler=False
    )
    return replace(binding, kernel=kernel_choice)


def binding_with_shadow(binding: Binding, shadow: Shadow) -> Binding:
    """Return the binding with a shadow over the kernel, in a new specialisation.

    No cache keeps the specialisation: the class lives as long as its instances.
    """
    kernel_choice = _with_shadow(binding.kernel, shadow)
    continuations = continuations_of(kernel_choice)
    made = _specialisation(kernel_choice.cls, kernel_choice.winner, continuations)
    return replace(binding, kernel=kernel_choice, specialisation=made)


def _demoted(
    kernel_choice: KernelChoice, native: Kernel, because: str, settings: Settings
) -> KernelChoice:
    others = [kernel for kernel in kernel_choice.found if kernel != native]
    found = (native, *others)
    switch = settings.to_change("shadow.demote", "OPGRAFT_SHADOW_DEMOTE or shadow.demote")
    return replace(
        kernel_choice, found=found, enabled=False, enabled_because=because, switch=switch
    )


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
    settings = host_state().settings()
    kernel_choice = _demoted(binding.kernel, native, shadow.demotion, settings)
    return replace(binding, kernel=kernel_choice)


def _kernel_of(
    class_choice: ReplacementChoice, cls: Any, platform: Platform, settings: Settings
) -> KernelChoice:
    """Return the kernel of the chosen class, for constructing ``cls``."""
    enabled, because, switch = _enabled(class_choice, settings)
    chain = effective_chain(platform)
    idle = _idle_oot(class_choice)
    kernel_choice = choose_kernel(class_choice.cls, chain, enabled, because, cls, switch, idle)
    _report_broken_checks(kernel_choice)
    left_to_compiler = _left_to_compiler(class_choice, kernel_choice, settings)
    kernel_choice = replace(kernel_choice, left_to_compiler=left_to_compiler)
    return _shadowed_if_asked(class_choice, kernel_choice, settings)


def _decide_binding(cls: Any, kept: ReplacementChoice | None = None) -> Binding:
    """Decide on class and kernel for constructing ``cls``.

    All active replacements take part. An existing op has ``kept``, the choice of its class.
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

    class_choice = kept
    if class_choice is None:
        class_choice = choose_replacement(
            cls,
            op_name=name,
            own=discover().provider_of(cls.__module__),
            active=active,
            platform=platform,
            settings=settings,
            other_replacements=other_replacements_of_op(cls, active),
            absence_of=absence_of,
        )
    kernel_choice = _kernel_of(class_choice, cls, platform, settings)
    plugins = plugins_decision(state.plugins.values(), settings)
    background = (*measured, plugins, selection.decision)
    binding = Binding(class_choice, kernel_choice, specialise(kernel_choice), background)
    if kept is None:
        _compare_with_parent(binding, state)
    _log(binding)
    return binding


def _log(binding: Binding) -> None:
    # A summary takes longer than a decision.
    if logger.isEnabledFor(logging.DEBUG):
        decision = binding.decision
        logger.debug("%s", decision.summary(), extra=decision.attributes())


def _kept_class(target: type, declaration: Replacement | None) -> ReplacementChoice:
    """Return the choice for an existing op: its class, whatever ``providers`` asks for.

    Without a ``declaration``, the op has the class ``target`` itself.
    """
    state = host_state()
    with state.lock:
        name = op_name_of(target, state)
    return ReplacementChoice(
        target=target,
        own=discover().provider_of(target.__module__),
        op_name=name,
        rows=((declaration, None),) if declaration else (),
        winner=declaration,
    )


def _compare_with_parent(binding: Binding, state: HostState) -> None:
    """Expect the choice that the parent process has handed down, if there is one."""
    # The parent does not know the scopes of this process.
    if CURRENT_SCOPE.get() is not None:
        return
    class_choice = binding.replacement
    record = state.registry.ops.get(class_choice.op_name or "")
    if record is not None and record.cls is class_choice.target:
        expect_choice_agrees(f"kernel of {record.name}", binding.chosen)


def _report_broken_checks(kernel_choice: KernelChoice) -> None:
    """Log once each kernel that is not used because its ``needs`` check raised."""
    for skipped, why in kernel_choice.passed_over:
        if isinstance(why, CheckRaised):
            told = f"{skipped} at {skipped.location} is not used: {why}"
            logger.warning_once("%s", printable(told))


def _enabled(class_choice: ReplacementChoice, settings: Settings) -> tuple[bool, str, str]:
    """Return if the op is enabled, why, and the setting to change that.

    A class with a method ``enabled`` of its own decides for itself.
    """
    cls: Any = class_choice.cls
    target: Any = class_choice.target
    name = class_choice.op_name
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


def _left_to_compiler(
    class_choice: ReplacementChoice, kernel_choice: KernelChoice, settings: Settings
) -> bool:
    """Return True if the op is disabled only so that a compiler may fuse its native definition.

    That is not so for an op that shadow mode compares, or with a method ``enabled`` of its own.
    """
    shadow = settings.config.shadow
    is_compared = shadow.share or shadow.first_call
    decides_itself = definer(class_choice.cls, "enabled") is not None
    if kernel_choice.enabled or is_compared or decides_itself:
        return False
    return settings.leaves_to_compiler(class_choice.op_name)


def _ask_class(cls: Any, owner: type) -> tuple[bool, str]:
    """Return the answer of the class's own ``enabled``, and the reason; ``False`` if it raises."""
    provider = discover().provider_of(owner.__module__)
    try:
        what = f"{owner.__qualname__}.enabled() of {provider}"
        with watching.watching_code(what, provider), watching.kept(what, provider, owner):
            enabled = bool(cls.enabled())
        return enabled, f"{owner.__qualname__}.enabled() says so"
    except KeyboardInterrupt:
        raise
    # A plugin's code may raise anything.
    except BaseException as error:
        told = f"its enabled() raised {described(error)} at {location_of(owner)}"
        reason = SwitchRaised(printable(told))
        logger.warning_once("%s", printable(f"{owner.__qualname__} is disabled: {reason}"))
        return False, reason


def specialise(kernel_choice: KernelChoice) -> Any:
    """Return the subclass of the op class with the chosen kernel as ``forward``.

    There is one subclass per choice, and the op class keeps it.
    """
    op_class = kernel_choice.cls
    kernel = kernel_choice.winner
    # The id tells a method from another one that a plugin has put in its place for a while.
    definition = id(kernel.definition)
    key = (
        kernel,
        definition,
        kernel_choice.chain,
        kernel_choice.enabled,
        kernel.shadow,
        kernel_choice.idle_oot,
    )
    with host_state().lock:
        # vars(), as getattr() would find the specialisations of a base class.
        cache = vars(op_class).get(_CACHE)
        if cache is None:
            cache = {}
            setattr(op_class, _CACHE, cache)
        known = cache.get(key)
        # Code of others may have changed the class since.
        if known is None or _is_changed(*known):
            made = _specialisation(op_class, kernel, continuations_of(kernel_choice))
            known = cache[key] = (made, _attributes(made))
        return known[0]


def _is_changed(made: type, names: Mapping[str, Any]) -> bool:
    """Return True if methods of a specialisation were changed, and tell of each."""
    # A plugin may construct an op while it is loaded, and assign to a method of type(op).
    # Later ops of that class would have the method, too.
    now = _attributes(made)
    changed = [name for name in now if now[name] is not names.get(name) and _runs(now[name])]
    for name in changed:
        _tell_of_change(made, name)
    return bool(changed) or not now.keys() >= names.keys()


def _attributes(made: type) -> dict[str, Any]:
    """Return the attributes of a class by name, without those that opgraft adds later."""
    found = dict(vars(made))
    ours = [name for name in found if name.startswith(_OURS)]
    for name in ours:
        del found[name]
    return found


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
    what = f"{owner.__qualname__}.__init__ of {provider}"
    keeping = watching.Keeping(what, provider, own)

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # its frame says so
        cause = None
        try:
            with watching.told_when_late(what, provider), keeping.step():
                construct(self, *args, **kwargs)
        except AttributeError as error:
            # torch says neither which class is at fault nor what to do.
            if _ASSIGNED_TOO_EARLY not in str(error):
                raise
            cause = error
        if not _of_modules(self):
            raise ConstructionError(unfinished(owner)) from cause

    return __init__


def unfinished(owner: type) -> str:
    """Return a sentence about a constructor that does not call ``super().__init__()``.

    ``owner`` is the class that defines the constructor.
    """
    return (
        f"{owner.__qualname__}.__init__ at {location_of(vars(owner)[_INIT])} does not call "
        f"super().__init__(), so the {owner.__qualname__} has neither parameters nor children: "
        "call it first"
    )


def _of_modules(op: Any) -> bool:
    """Return True if the constructor of ``torch.nn.Module`` has run."""
    return "_parameters" in vars(op)


def _specialisation(op_class: type, kernel: Kernel, continuations: dict[str, str | None]) -> type:
    """Make the subclass of ``op_class`` with ``kernel`` as ``forward``.

    Args:
        op_class: the class, a replacement perhaps.
        kernel: the method to run.
        continuations: the table for ``CustomOp._call_next``, from ``continuations_of``.

    Raises:
        RegistrationError: the class cannot be subclassed, or the kernel's marks contradict it.
    """
    definition = kernel.definition
    resolve_functions(definition)
    if isinstance(definition, staticmethod) and is_inference_only(definition.__func__):
        raise RegistrationError(
            f"{kernel} at {kernel.location} is inference_only and static: let it take self"
        )
    forward = definition
    shadow = kernel.shadow
    # An excluded shadow compares no call.
    if shadow and not shadow.excluded:
        resolve_functions(shadow.native)
        forward = shadow.around(method_of(definition), method_of(shadow.native))
    forward_owner = definer(op_class, "forward")
    hidden_forward = vars(forward_owner)["forward"] if forward_owner else None
    namespace = {
        "forward": forward,
        HIDDEN_FORWARD: hidden_forward,
        "op_class": op_class,
        "__module__": op_class.__module__,
        "__qualname__": op_class.__qualname__,
        "__doc__": op_class.__doc__,
        "__specialisation__": True,
        "__continuations__": continuations,
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
