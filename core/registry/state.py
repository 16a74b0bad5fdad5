"""The state of the process, in one object."""

from __future__ import annotations

import enum
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from opgraft.base.caches import Caches
from opgraft.base.text import printable
from opgraft.config import CURRENT_SCOPE, OpgraftConfig, Settings, resolve
from opgraft.config.environment import Environment, read_environment
from opgraft.errors import PluginError, UnknownTargetError
from opgraft.logger import logger, set_level
from opgraft.platform import Platform
from opgraft.registry.decision import Decision, Provider
from opgraft.registry.declarations import Declaration, Owner, Registry, Replacement
from opgraft.registry.finding import Finding

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class PlatformSelection:
    """The platform of this process and the decision that chose it."""

    platform: Platform
    decision: Decision
    defaults: OpgraftConfig

    @property
    def provider(self) -> Provider | None:
        """The distribution of the platform; ``None`` if the decision names none."""
        accepted = (each.provider for each in self.decision.candidates if each.accepted)
        return next(accepted, None)


class PluginStatus(enum.Enum):
    """The stage that a plugin reached. ``rejected``, ``vetoed`` and ``failed`` are ends, explained in the record."""

    DISCOVERED = "discovered"
    REJECTED = "rejected"
    SELECTED = "selected"
    LOADED = "loaded"
    VETOED = "vetoed"
    ACTIVATED = "activated"
    FAILED = "failed"


@dataclass
class PluginRecord:
    """One entry point of the group ``opgraft.plugins`` and its fate.

    Attributes:
        location: ``file:line`` in the plugin where it failed or refused, if known, else where its module begins.
        findings: faults of a plugin that was loaded all the same.
        notes: facts worth knowing.
        seconds: the time of its import.
    """

    name: str
    value: str
    provider: Provider
    status: PluginStatus = PluginStatus.DISCOVERED
    reason: str = ""
    traceback: str | None = None
    location: str | None = None
    platforms: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def attributes(self) -> dict[str, str]:
        """Return attributes of what is logged about the plugin."""
        own = {
            "opgraft.plugin.name": printable(self.name),
            "opgraft.plugin.status": self.status.value,
        }
        return {**own, **self.provider.attributes()}


@dataclass
class Transaction:
    """The activation of a plugin or a platform that is under way.

    Attributes:
        owner: the plugin or the platform.
        module: the module that its entry point names.
        undos: take back all that the activation did.
    """

    owner: Owner
    module: str
    undos: ExitStack

    @property
    def provider(self) -> Provider:
        """The distribution of the plugin or the platform."""
        return self.owner.provider

    @property
    def plugin(self) -> str | None:
        """The name of the plugin, ``None`` for a platform."""
        return self.owner.name if self.owner.kind == "plugin" else None


ACTIVATING: ContextVar[Transaction | None] = ContextVar("opgraft_activating", default=None)


@contextmanager
def activating(transaction: Transaction) -> Iterator[None]:
    """Attribute what is declared meanwhile to a transaction."""
    token = ACTIVATING.set(transaction)
    try:
        yield
    finally:
        ACTIVATING.reset(token)


def _new_identity() -> str:
    return os.urandom(8).hex()


@dataclass
class LoadingState:
    """The progress of loading plugins.

    Attributes:
        lock: held by the one thread that decides on the platform and loads plugins; taken before ``HostState.lock``,
            never after it.
        thread: the thread that is loading plugins. Ops that plugins construct meanwhile are bound to the plugins that
            are active by then.
        done: whether all plugins are loaded.
        config: the settings that plugins were loaded with.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    thread: int | None = None
    done: bool = False
    config: OpgraftConfig | None = None


@dataclass
class HostState:
    """Everything that opgraft remembers in a process.

    Attributes:
        registry: all declarations. ``reset`` keeps them.
        lock: held for a moment around changes of this object, never while a plugin's code or an import runs.
        loading: the progress of loading plugins.
        selection: the platform, once it is decided.
        plugins: every installed plugin by its name.
        active: the replacements that apply.
        adjustments: the settings that plugins adjust, each with the plugin's name.
        environment: the settings of the environment, once they are read.
        caches: the decisions outside of every scope of settings.
        generation: grows whenever decisions are forgotten.
        identity: tells this process from every other one. Process numbers do not: they are alike in containers.
        values: what single modules remember, each under the key of its ``StateValue``.
    """

    registry: Registry = field(default_factory=Registry)
    lock: threading.RLock = field(default_factory=threading.RLock)
    loading: LoadingState = field(default_factory=LoadingState)
    selection: PlatformSelection | None = None
    plugins: dict[str, PluginRecord] = field(default_factory=dict)
    active: list[Replacement] = field(default_factory=list)
    adjustments: list[tuple[str, OpgraftConfig]] = field(default_factory=list)
    environment: Environment | None = None
    caches: Caches = field(default_factory=Caches)
    generation: int = 0
    identity: str = field(default_factory=_new_identity)
    values: dict[int, object] = field(default_factory=dict)

    def known_environment(self) -> Environment:
        """Return the settings of the environment, read once."""
        if self.environment is None:
            self.environment = read_environment()
            if self.environment.log:
                set_level(self.environment.log)
        return self.environment

    def settings(self) -> Settings:
        """Return all layers merged, from the platform's defaults to the active scope."""
        environment, scope = self.known_environment(), CURRENT_SCOPE.get()
        file = scope.file if scope and scope.file else environment.file
        from_file, scopes = file.layers if file else (), scope.layers if scope else ()
        layers = [*self.adjustments, *from_file, *environment.layers]
        if self.selection is not None:
            layers.insert(0, (f"platform {self.selection.platform.name}", self.selection.defaults))
        return resolve(layers, scopes)

    def shared_settings(self) -> Settings:
        """Return the cached settings. Do not modify them."""
        if not self.loading.done:  # each that is loaded may change some
            return self.settings()
        caches = self.current_caches()
        if caches.settings is None:
            caches.settings = self.settings()
        shared: Settings = caches.settings
        return shared

    def current_caches(self) -> Caches:
        """Return the decisions of the active scope; new after each activation."""
        scope = CURRENT_SCOPE.get()
        if scope is None:
            return self.caches
        # Compared on use: scopes of other threads and tasks are out of the reach of invalidate().
        if scope.generation != self.generation:
            scope.caches = Caches()
            scope.generation = self.generation
        return scope.caches

    def decide_once(
        self, cache: Callable[[Caches], dict[Key, Any]], key: Key, decide: Callable[[], Value]
    ) -> Value:
        """Return the decision that a cache of the active scope keeps under ``key``, or make one.

        A new decision is kept, unless what it rests on has changed while it was made.
        """
        known: Value | None = cache(self.current_caches()).get(key)
        if known is not None:
            return known
        generation = self.generation
        # Made without the lock, as plugins' code may run.
        decision = decide()
        with self.lock:
            if self.generation == generation:
                cache(self.current_caches())[key] = decision
        return decision

    def checks_values(self) -> bool:
        """Return True if ops check values of tensors on accelerators; cached."""
        caches = self.current_caches()
        if caches.check_values is None:
            caches.check_values = self.shared_settings().config.check_values is True
        return caches.check_values

    def log_fallback(self, kernel: str, reason: str) -> None:
        """Log once for each reason that a call ran the native definition instead of ``kernel``."""
        logged = _LOGGED_FALLBACKS.of(self)
        if logger.isEnabledFor(logging.DEBUG) and (kernel, reason) not in logged:
            logged.add((kernel, reason))
            words = "%s gives way to the native definition for the first time: %s"
            extra = {"opgraft.kernel": printable(kernel), "opgraft.reason": reason}
            logger.debug(words, printable(kernel), reason, extra=extra)

    def invalidate(self) -> None:
        """Forget what was decided, because what the choices rest on has changed."""
        self.caches = Caches()
        self.generation += 1

    def activate(self, replacement: Replacement) -> Callable[[], None]:
        """Let a declared replacement take effect; returns the undo. Already active: a no-op."""
        with self.lock:
            if replacement in self.active:
                return lambda: None
            # A new list, as readers iterate without the lock.
            self.active = [
                *self.active,
                replacement,
            ]
            self.invalidate()
        return lambda: self.deactivate(replacement)

    def deactivate(self, replacement: Replacement) -> None:
        """Let a replacement no longer take effect; the declaration stays."""
        with self.lock:
            self.active = [known for known in self.active if known is not replacement]
            self.invalidate()

    def declare(
        self, what: str, provider: Provider, make: Callable[[], Callable[[], None]]
    ) -> None:
        """Declare something, until the plugin or platform that is being activated is left out.

        Args:
            what: its kind and name, such as ``op rms_norm``.
            provider: its distribution. Declarations of a distribution that is not activated now stay.
            make: declares it, and returns the undo.

        Raises:
            ConflictError: as ``make``.
        """
        transaction = ACTIVATING.get()
        with self.lock:
            declaration = Declaration(make, make())
            self.invalidate()
            for owner, declarations in self.registry.owned.items():
                if owner.provider == provider:
                    declarations.pop(what, None)  # of a definition that this one takes the place of
            if transaction is not None and transaction.provider == provider:
                self.registry.owned.setdefault(transaction.owner, {})[what] = declaration

    def renew_declarations(self, owner: Owner) -> None:
        """Renew the declarations of an owner, as its modules are not imported again.

        Raises:
            ConflictError: somebody else has taken a name meanwhile.
        """
        with self.lock:
            for declaration in self.registry.owned.get(owner, {}).values():
                declaration.renew()
            self.invalidate()

    def withdraw_declarations(self, owner: Owner) -> None:
        """Take back the declarations of an owner, because it is left out."""
        with self.lock:
            for declaration in self.registry.owned.get(owner, {}).values():
                declaration.withdraw()
            self.invalidate()

    def resolve_or_leave_out(self, replacement: Replacement, strict: bool) -> bool:
        """Look the target of a replacement up. Without one, leave the replacement out and warn.

        Returns:
            Whether the target is known. Other registrations stay in any case.

        Raises:
            UnknownTargetError: nothing has that name, in strict mode.
            RegistrationError: the replacement does not fit its target.
        """
        try:
            self.registry.resolve_pending(replacement)
        except UnknownTargetError as error:
            if strict:
                raise
            self.deactivate(replacement)
            replacement.findings = (str(error),)
            plugin = self.plugins.get(replacement.plugin or "")
            rest = f"the rest of plugin {plugin.name!r} stays" if plugin else "the rest stays"
            attributes = plugin.attributes() if plugin else {}
            logger.warning("%s It is left out; %s.", error, rest, extra=attributes)
            return False
        return True

    def drop_superseded(self) -> None:
        """Deactivate replacements whose declaration a reloaded definition has taken over."""
        declared = set(self.registry.replacements)
        self.active = [known for known in self.active if known in declared]


_KEYS = itertools.count()


class StateValue(Generic[Value]):
    """A value that one module remembers for the process, in the host state, until ``reset``.

    Example::

        SHADOWS = StateValue[dict[str, Shadow]](dict)  # at the top of the module
        SHADOWS.get()[name] = shadow

    Args:
        make: returns the first value, when somebody asks for it.
    """

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make = make
        # A number, as compilers of torch 2.8 do not find other objects among the keys of a dict.
        self._key = next(_KEYS)

    def get(self) -> Value:
        """Return the value of this process."""
        return self.of(_STATE)

    def of(self, state: HostState) -> Value:
        """Return the value in a state."""
        if self._key not in state.values:
            # Without the lock, as ``make`` may run code of others.
            made = self._make()
            with state.lock:
                state.values.setdefault(self._key, made)
        return cast("Value", state.values[self._key])

    def peek(self) -> Value | None:
        """Return the value of this process, ``None`` before it is made. Compilers can trace it."""
        return cast("Value | None", _STATE.values.get(self._key))

    def set(self, value: Value) -> None:
        """Replace the value of this process."""
        with _STATE.lock:
            _STATE.values[self._key] = value


_LOGGED_FALLBACKS = StateValue[set[tuple[str, str]]](set)
"""Kernels that gave way to the native definition at a call, each with the reason, as they were logged."""

_STATE = HostState()


def _begin_anew() -> None:
    global _STATE  # the one place that replaces the one object
    # The generation goes on, so that scopes which are open see that their caches are stale.
    _STATE = HostState(
        registry=_STATE.registry, generation=_STATE.generation + 1, identity=_STATE.identity
    )


LOADING_PATIENCE = 60.0
"""Seconds that a thread waits for another one that loads plugins."""


@contextmanager
def loading(state: HostState) -> Iterator[None]:
    """Hold the loading lock.

    Raises:
        PluginError: another thread has held it for a minute, most likely because it waits for this very thread.
    """
    if not state.loading.lock.acquire(timeout=LOADING_PATIENCE):
        raise PluginError(
            f"plugins have been loading in another thread for {LOADING_PATIENCE:g} s, which may wait for this one: "
            "call opgraft.load_plugins() before starting threads, and construct no ops while a plugin is imported"
        )
    try:
        yield
    finally:
        state.loading.lock.release()


def host_state() -> HostState:
    """Return the state of this process."""
    return _STATE


def reset() -> None:
    """Forget the selected platform, the loaded plugins and every activation; keep what was declared.

    Op classes stay registered. Replacements apply again when their plugin or platform is activated again, or when a
    script registers them again. Existing ops keep their kernels. Compiled code is dropped. Open scopes of
    ``set_config`` stay open. If another thread loads plugins, the function waits.

    Raises:
        PluginError: a plugin or a platform calls it while it is loaded, which would forget earlier ones.
    """
    transaction = ACTIVATING.get()
    if transaction is not None:
        raise PluginError(
            f"{transaction.owner} called opgraft.reset() while it was loaded: leave that to who loads plugins"
        )
    with loading(_STATE):
        if _STATE.environment is not None and _STATE.environment.log:
            set_level(None)
        _begin_anew()
    if "torch" in sys.modules:  # who never imported it has compiled nothing
        sys.modules["torch"].compiler.reset()


class _Fork(threading.local):
    """The locks of the forking thread, so that no other thread holds them in the child for ever."""

    def __init__(self) -> None:
        self.held: list[threading.RLock] = []

    def begins(self) -> None:
        """Wait for another thread that loads plugins: a child could not go on with its work."""
        locks = (_STATE.loading.lock, _STATE.lock)
        self.held = [lock for lock in locks if lock.acquire(timeout=LOADING_PATIENCE)]

    def ends(self) -> None:
        for lock in reversed(self.held):
            lock.release()
        self.held = []

    def begins_child(self) -> None:
        """Go on in the child, with a fresh state if another thread held the parent's."""
        whole = len(self.held) == 2
        self.ends()
        if not whole:
            _begin_anew()
        _STATE.identity = _new_identity()


_fork = _Fork()
if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(
        before=_fork.begins, after_in_parent=_fork.ends, after_in_child=_fork.begins_child
    )
