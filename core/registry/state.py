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
from opgraft.base.log import logger, set_level
from opgraft.base.text import printable
from opgraft.config import CURRENT_SCOPE, OpgraftConfig, Settings, resolve
from opgraft.config.environment import Environment, read_environment
from opgraft.errors import PluginError, UnknownTargetError
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
    """The stage of a plugin. ``rejected``, ``vetoed`` and ``failed`` are ends with a reason."""

    DISCOVERED = "discovered"
    REJECTED = "rejected"
    SELECTED = "selected"
    LOADED = "loaded"
    VETOED = "vetoed"
    ACTIVATED = "activated"
    FAILED = "failed"


@dataclass
class PluginRecord:
    """One entry point of the group ``opgraft.plugins``, with the outcome of loading.

    Attributes:
        location: ``file:line`` of the failure or refusal in the plugin, else of the module.
        findings: faults of a plugin that was loaded nevertheless.
        notes: facts worth knowing.
        seconds: the time of the import.
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
        """Return attributes for log lines about the plugin."""
        own = {
            "opgraft.plugin.name": printable(self.name),
            "opgraft.plugin.status": self.status.value,
        }
        return {**own, **self.provider.attributes()}


@dataclass
class Transaction:
    """The activation of a plugin or platform, while it runs.

    Attributes:
        owner: the plugin or the platform.
        module: the module of the entry point.
        undos: take back all changes of the activation.
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
    """Attribute declarations within the block to a transaction."""
    loading = _STATE.loading
    outer = loading.transaction
    token = ACTIVATING.set(transaction)
    # A new thread starts without the context of its starter, so the variable is not enough.
    loading.transaction = transaction
    try:
        yield
    finally:
        loading.transaction = outer
        ACTIVATING.reset(token)


def _new_identity() -> str:
    return os.urandom(8).hex()


@dataclass
class LoadingState:
    """The progress of loading plugins.

    Attributes:
        lock: held by the thread that decides on the platform and loads plugins. Threads take this
            lock before ``HostState.lock``, never after.
        thread: the thread that loads plugins. Ops that plugins construct meanwhile are bound to the
            plugins active by then.
        done: all plugins are loaded.
        config: the settings at the time of loading.
        transaction: the innermost activation, also for the threads that it starts.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    thread: int | None = None
    done: bool = False
    config: OpgraftConfig | None = None
    transaction: Transaction | None = None


@dataclass
class HostState:
    """Everything that opgraft remembers in a process.

    Attributes:
        registry: all declarations. ``reset`` keeps them.
        lock: held for a moment around changes of this object, never while a plugin's code or an
            import runs.
        loading: the progress of loading plugins, with the loading lock.
        selection: the platform, once it is decided.
        plugins: every installed plugin by name.
        active: the active replacements.
        adjustments: the settings that plugins adjust, each with the plugin's name.
        environment: the settings of the environment, after the first read.
        caches: the decisions outside of every scope of settings.
        generation: grows whenever decisions are forgotten.
        identity: a number for this process alone. Process numbers repeat in containers.
        values: the values of single modules, by the key of the ``StateValue``.
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
        environment = self.known_environment()
        scope = CURRENT_SCOPE.get()
        file = scope.file if scope and scope.file else environment.file
        from_file = file.layers if file else ()
        scopes = scope.layers if scope else ()
        layers = [*self.adjustments, *from_file, *environment.layers]
        # A platform knows less of the machine than plugins, files and users: its layer is lowest.
        if self.selection is not None:
            layers.insert(0, (f"platform {self.selection.platform.name}", self.selection.defaults))
        return resolve(layers, scopes, self.registry.names_by_class())

    def shared_settings(self) -> Settings:
        """Return the cached settings. Do not modify them."""
        # Each plugin may still adjust settings.
        if not self.loading.done:
            return self.settings()
        caches = self.current_caches()
        if caches.settings is None:
            caches.settings = self.settings()
        shared: Settings = caches.settings
        return shared

    def current_caches(self) -> Caches:
        """Return the decisions of the active scope. Each activation empties them."""
        scope = CURRENT_SCOPE.get()
        if scope is None:
            return self.caches
        # Compared on use: invalidate() cannot reach the scopes of other threads and tasks.
        if scope.generation != self.generation:
            scope.caches = Caches()
            scope.generation = self.generation
        return scope.caches

    def decide_once(
        self, cache: Callable[[Caches], dict[Key, Any]], key: Key, decide: Callable[[], Value]
    ) -> Value:
        """Return the decision for ``key`` from a cache of the active scope, or make one.

        A new decision is kept, unless a plugin or setting has changed meanwhile.

        Args:
            cache: returns the cache among all caches of a scope.
            key: the key of the decision.
            decide: makes the decision. May run code of plugins.
        """
        # Without the lock: a dict gives the old value or the new one, and every call comes here.
        known: Value | None = cache(self.current_caches()).get(key)
        if known is not None:
            return known
        generation = self.generation
        # Made without the lock, as plugins' code may run.
        decision = decide()
        with self.lock:
            # A change meanwhile makes the decision stale: the next caller decides again.
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
        """Log a call of the native definition in place of ``kernel``, once for each reason."""
        logged = _LOGGED_FALLBACKS.of(self)
        # This runs whenever a kernel gives way, so the test must be cheap.
        if logger.isEnabledFor(logging.DEBUG) and (kernel, reason) not in logged:
            logged.add((kernel, reason))
            words = "%s gives way to the native definition for the first time: %s"
            extra = {"opgraft.kernel": printable(kernel), "opgraft.reason": reason}
            logger.debug(words, printable(kernel), reason, extra=extra)

    def invalidate(self) -> None:
        """Forget all decisions, since a plugin or a setting has changed."""
        # A new object: another thread may read the former one at this moment.
        self.caches = Caches()
        self.generation += 1

    def activate(self, replacement: Replacement) -> Callable[[], None]:
        """Let a declared replacement take effect, and return the undo."""
        with self.lock:
            # Whoever activated the replacement first has the undo.
            if replacement in self.active:
                return lambda: None
            # A new list, as readers iterate without the lock.
            self.active = [*self.active, replacement]
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
        """Make a declaration. It holds until the plugin or platform under activation is left out.

        Args:
            what: kind and name, such as ``op rms_norm``.
            provider: the distribution. A declaration outside of an activation of this distribution
                stays for good.
            make: makes the declaration, and returns the undo.

        Raises:
            ConflictError: as ``make``.
        """
        transaction = ACTIVATING.get() or self.loading.transaction
        with self.lock:
            take_back = make()
            declaration = Declaration(make, take_back)
            self.invalidate()
            for owner, declarations in self.registry.owned.items():
                if owner.provider == provider:
                    # A former definition of the same name.
                    declarations.pop(what, None)
            if transaction is not None and transaction.provider == provider:
                self.registry.owned.setdefault(transaction.owner, {})[what] = declaration

    def renew_declarations(self, owner: Owner) -> None:
        """Renew the declarations of an owner. Python does not import the modules again.

        Raises:
            ConflictError: somebody else has taken a name meanwhile.
        """
        with self.lock:
            for declaration in self.registry.owned.get(owner, {}).values():
                declaration.renew()
            self.invalidate()

    def withdraw_declarations(self, owner: Owner) -> None:
        """Take back the declarations of an owner that is left out."""
        with self.lock:
            for declaration in self.registry.owned.get(owner, {}).values():
                declaration.withdraw()
            self.invalidate()

    def resolve_or_leave_out(self, replacement: Replacement, strict: bool) -> bool:
        """Look up the target of a replacement. Without a target, leave it out with a warning.

        Returns:
            True if the target is known. Other registrations stay in any case.

        Raises:
            UnknownTargetError: no class has that name, in strict mode.
            RegistrationError: the replacement does not fit the target.
        """
        try:
            self.registry.resolve_pending(replacement)
        # Only strict mode stops a program for a wrong name in one plugin.
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
        """Deactivate replacements without a declaration, such as those of a reloaded module."""
        declared = set(self.registry.replacements)
        self.active = [known for known in self.active if known in declared]


_KEYS = itertools.count()


class StateValue(Generic[Value]):
    """A value of one module for the process, in the host state, until ``reset``.

    Example::

        SHADOWS = StateValue[dict[str, Shadow]](dict)  # at the top of the module
        SHADOWS.get()[name] = shadow

    Args:
        make: returns the first value, at the first use.
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
            # Another thread may have been faster. All threads must see one value.
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
"""Logged kernels with the reason, after calls of the native definition in their place."""

_STATE = HostState()


def _begin_anew() -> None:
    global _STATE
    # The generation goes on, so that open scopes find their caches stale.
    _STATE = HostState(
        registry=_STATE.registry, generation=_STATE.generation + 1, identity=_STATE.identity
    )


LOADING_PATIENCE = 60.0
"""Seconds of waiting for another thread that loads plugins."""


@contextmanager
def holding_the_loading_lock(state: HostState) -> Iterator[None]:
    """Hold ``state.loading.lock``: this thread alone decides on the platform and loads plugins.

    Raises:
        PluginError: another thread has held the lock for a minute, most likely since it waits for
            this thread.
    """
    if not state.loading.lock.acquire(timeout=LOADING_PATIENCE):
        raise PluginError(
            f"plugins have been loading in another thread for {LOADING_PATIENCE:g} s, which may "
            "wait for this one: call opgraft.load_plugins() before starting threads, and construct "
            "no ops while a plugin is imported"
        )
    try:
        yield
    finally:
        state.loading.lock.release()


def host_state() -> HostState:
    """Return the state of this process."""
    return _STATE


def reset() -> None:
    """Forget the selected platform, the loaded plugins and every activation.

    Declarations stay: op classes remain registered. A replacement applies again after its plugin or
    platform is activated again, or after a script registers the replacement again. Existing ops
    keep their kernels. Compiled code is dropped. Open scopes of ``set_config`` stay open. If
    another thread loads plugins, the function waits.

    Raises:
        PluginError: a plugin or platform calls the function while it is loaded. That would forget
            the plugins loaded before.
    """
    transaction = ACTIVATING.get()
    if transaction is not None:
        raise PluginError(
            f"{transaction.owner} called opgraft.reset() while it was loaded: leave that to who "
            "loads plugins"
        )
    with holding_the_loading_lock(_STATE):
        # The level came from a variable, which may have changed.
        if _STATE.environment is not None and _STATE.environment.log:
            set_level(None)
        _begin_anew()
    # Without torch, nothing was compiled.
    if "torch" in sys.modules:
        sys.modules["torch"].compiler.reset()


class _Fork(threading.local):
    """Holds the locks during a fork: a lock of another thread would stay locked in the child."""

    def __init__(self) -> None:
        self.held: list[threading.RLock] = []

    def begins(self) -> None:
        """Take the locks, and wait for a thread that loads plugins: a child could not go on."""
        # In the order of all threads. Another order could end in a deadlock.
        locks = (_STATE.loading.lock, _STATE.lock)
        self.held = [lock for lock in locks if lock.acquire(timeout=LOADING_PATIENCE)]

    def ends(self) -> None:
        # In the reverse order of taking.
        for lock in reversed(self.held):
            lock.release()
        self.held = []

    def begins_child(self) -> None:
        """Go on in the child; with a new state, if another thread held a lock of the parent."""
        # A lock that could not be taken is held by a thread that the child does not have.
        whole = len(self.held) == 2
        self.ends()
        if not whole:
            _begin_anew()
        # Both processes have the identity of the parent until here.
        _STATE.identity = _new_identity()


_fork = _Fork()
# Windows does not fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_fork.begins, after_in_parent=_fork.ends, after_in_child=_fork.begins_child
    )
