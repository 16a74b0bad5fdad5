"""One pass over the plugins: select, import, call hooks, resolve targets; each is a transaction."""

from __future__ import annotations

import importlib
import reprlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import pluggy
from opgraft.base.log import logger
from opgraft.base.text import described, printable, shortened
from opgraft.config import OpgraftConfig
from opgraft.errors import PluginError, close_matches, raised_in
from opgraft.platform import Platform
from opgraft.plugins import hookspecs
from opgraft.plugins.admission import check_admission, objection
from opgraft.plugins.changes import Change
from opgraft.plugins.discovery import PLUGIN_GROUP, Offer, discover
from opgraft.plugins.outcomes import failure_of, may_patch_torch, rejection_of, replacements_of
from opgraft.plugins.remarks import STARTED
from opgraft.plugins.requirements import FAULTS, asked_for, check_adjustment
from opgraft.registry.adapter import Adapter, CallAdapter
from opgraft.registry.contracts import check_contracts
from opgraft.registry.declarations import ANY_PLATFORM, Owner, unapplied_at
from opgraft.registry.finding import Finding
from opgraft.registry.op_classes import location_of
from opgraft.registry.plugin_adapters import PLUGIN_ADAPTERS
from opgraft.registry.state import (
    HostState,
    PluginRecord,
    PluginStatus,
    Transaction,
    activating,
    host_state,
)
from opgraft.registry.watching import watching_code

_MOST_ADAPTERS = 10_000
_LONGEST_TRACEBACK = 20_000  # characters, of its end


class PluginPass:
    """One pass over the installed plugins. ``undo_all`` takes back a pass that raises."""

    def __init__(self, state: HostState, platform: Platform, undo_all: ExitStack) -> None:
        self.state = state
        self.platform = platform
        self.undo_all = undo_all
        self.settings = state.settings()
        self.config = self.settings.config
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self.transactions: dict[str, Transaction] = {}
        # With torch, which start-up waits for.
        self.guard: Any = importlib.import_module("opgraft.plugins.guarding").Guard()

    def run(self) -> None:
        check_admission(self.settings)
        for offer in discover().of_group(PLUGIN_GROUP):
            self._consider(offer)
        hooks = self.manager.hook
        # Hook by hook, not plugin by plugin: a vetoed plugin leaves no defaults, and all defaults
        # hold when ops are registered.
        self._call_each(hooks.opgraft_veto, self._heed_veto)
        self._call_each(hooks.opgraft_config, self._add_defaults)
        self._call_each(hooks.opgraft_register_ops, self._expect_nothing)
        self._call_each(hooks.opgraft_graft_adapters, self._add_adapters)
        self._resolve_pending()
        self._check_adjusted_names()
        for name in self._alive():
            self.state.plugins[name].status = PluginStatus.ACTIVATED
            self.state.plugins[name].reason = _as_activated(self.state.plugins[name])

    def _consider(self, offer: Offer) -> None:
        record = PluginRecord(offer.name, offer.value, offer.provider)
        self.state.plugins[offer.name] = record
        record.platforms = tuple(discover().platforms_of(offer.provider))
        owner = Owner("plugin", offer.name, offer.provider)
        against = objection(offer, self.settings)
        is_elsewhere = bool(record.platforms) and self.platform.name not in record.platforms
        if against or is_elsewhere:
            self.state.withdraw_declarations(owner)
            self._reject(offer, record, against)
            return
        record.status = PluginStatus.SELECTED
        # A stack for each plugin: closed if the plugin fails, or with all others if the pass fails.
        undos = self.undo_all.enter_context(ExitStack())
        undos.callback(self.state.withdraw_declarations, owner)
        self.transactions[offer.name] = Transaction(owner, offer.module, undos)
        self._attempt(offer.name, "while it was loaded", partial(self._load, offer, record))

    def _reject(self, offer: Offer, record: PluginRecord, against: str | None) -> None:
        """Leave a plugin out, ``against`` the settings or for another platform.

        Raises:
            PluginError: a setting asks for the plugin, or strict mode finds a fault.
        """
        record.status = PluginStatus.REJECTED
        record.reason = against or _not_here(record.platforms, self.platform)
        if asked_for(offer, self.config.plugins or ()):
            hint = "" if against else ". 'opgraft detect --all' tells about its platform"
            origin = self.settings.origins["plugins"]
            raise PluginError(
                f"{origin} asks for plugin {offer.name!r} of {offer.provider}, which is not used: "
                f"{record.reason}{hint}."
            )
        if record.reason.startswith(FAULTS):
            self._warn_of(record)

    def _warn_of(self, record: PluginRecord) -> None:
        """Warn of a plugin that is shut out by a fault."""
        message = rejection_of(record)
        if self.config.strict:
            raise PluginError(f"strict mode: {message}")
        logger.warning("%s", printable(message), extra=record.attributes())

    def _load(self, offer: Offer, record: PluginRecord) -> None:
        # The doctor tells of slow imports.
        began = time.perf_counter()
        plugin = offer.load()
        record.seconds = time.perf_counter() - began
        record.status = PluginStatus.LOADED
        record.location = self._place(offer.name)
        if record.platforms:
            record.findings += _overruled_platforms(record, plugin)
        else:
            record.platforms = _stated_platforms(plugin)
        if ANY_PLATFORM not in record.platforms and self.platform.name not in record.platforms:
            record.status = PluginStatus.REJECTED
            record.reason = _not_here(record.platforms, self.platform)
            return
        # Before anything of the plugin is used.
        check_contracts(getattr(plugin, "contracts", None))
        self._activate_declarations_of_plugin(record)
        self._check_hook_names(plugin)
        self.manager.register(plugin, offer.name)
        declared = any(each.plugin == offer.name for each in self.state.registry.replacements)
        if not self.manager.get_hookcallers(plugin) and not declared:
            raise _no_hook(offer, plugin)

    def _check_hook_names(self, plugin: object) -> None:
        """Reject a function that is marked as a hook without the name of one."""
        # pluggy checks the names of all plugins at once. Then no plugin can be taken back alone.
        for name in dir(plugin):
            marked = self.manager.parse_hookimpl_opts(plugin, name)
            if marked and not marked["optionalhook"] and name not in hookspecs.RESULT_TYPES:
                place = location_of(getattr(plugin, name))
                near = close_matches(name, hookspecs.RESULT_TYPES)
                raise PluginError(
                    f"{name} at {place} is marked as a hook, and there is none of that name: "
                    f"{near}",
                    place,
                )

    def _activate_declarations_of_plugin(self, record: PluginRecord) -> None:
        """Activate the declarations of the plugin's modules, whoever imported them.

        A replacement in these modules was declared at the import, maybe before this activation.
        ``declaring._declare`` activates only what the running activation declares.
        """
        undos = self.transactions[record.name].undos
        self.state.renew_declarations(self.transactions[record.name].owner)
        for replacement in self.state.registry.replacements:
            if replacement.plugin is None and replacement.provider == record.provider:
                replacement.plugin = record.name
            if replacement.plugin == record.name:
                replacement.platforms = record.platforms
                undos.callback(self.state.activate(replacement))

    def _call_each(self, hook: pluggy.HookCaller, use: Callable[[str, Any], None]) -> None:
        # In pluggy's own order, but one by one, as each runs inside a transaction of its own.
        for implementation in reversed(hook.get_hookimpls()):
            offered = {"platform": self.platform}
            arguments = [offered[name] for name in implementation.argnames]
            call = partial(implementation.function, *arguments)
            step = partial(self._call, hook.name, implementation, call, use)
            self._attempt(
                implementation.plugin_name,
                f"in its hook {hook.name}",
                step,
                implementation.function,
            )

    def _call(
        self,
        hook: str,
        implementation: pluggy.HookImpl,
        call: Callable[[], Any],
        use: Callable[[str, Any], None],
    ) -> None:
        result = call()
        expected = hookspecs.RESULT_TYPES[hook]
        if not isinstance(result, expected):
            names = " or ".join(
                "None" if kind is type(None) else kind.__name__ for kind in expected
            )
            place = location_of(implementation.function)
            raise PluginError(f"{hook} returned a {type(result).__name__}, expected {names}", place)
        use(implementation.plugin_name, result)

    def _heed_veto(self, name: str, reason: str | None) -> None:
        if reason is not None:
            record = self.state.plugins[name]
            record.status = PluginStatus.VETOED
            # Plain text: a plugin's own kind of it may raise whenever it is looked at.
            record.reason = shortened(str.__str__(reason))

    def _add_defaults(self, name: str, config: OpgraftConfig | None) -> None:
        if config is not None:
            check_adjustment(config)
            self._append(name, self.state.adjustments, (f"plugin {name}", config))

    def _expect_nothing(self, name: str, result: None) -> None:
        """Ignore the result: registering ops has none, and its effects are in the registry."""

    def _add_adapters(self, name: str, adapters: Iterable[Adapter | CallAdapter]) -> None:
        for number, adapter in enumerate(adapters):
            if number == _MOST_ADAPTERS:
                raise PluginError(
                    f"opgraft_graft_adapters returned more than {_MOST_ADAPTERS:,} of them"
                )
            if not isinstance(adapter, Adapter | CallAdapter):
                raise PluginError(
                    f"opgraft_graft_adapters returned a {type(adapter).__name__}, expected an "
                    "opgraft.Adapter or an opgraft.CallAdapter"
                )
            _expect_usable(adapter)
            self._append(name, PLUGIN_ADAPTERS.get(), (self.transactions[name].provider, adapter))

    def _append(self, name: str, items: list[Any], item: Any) -> None:
        # In the transaction, so that the item goes when the plugin fails later.
        items.append(item)
        self.transactions[name].undos.callback(items.remove, item)

    def _resolve_pending(self) -> None:
        for replacement in [each for each in self.state.active if each.target is None]:
            resolve = partial(
                self.state.resolve_or_leave_out, replacement, bool(self.config.strict)
            )
            if replacement.plugin is None:
                resolve()
            elif replacement.plugin in self._alive():
                self._attempt(replacement.plugin, "when its targets were looked up", resolve)

    def _check_adjusted_names(self) -> None:
        for origin, config in list(self.state.adjustments):
            registry = self.state.registry
            unknown: list[str] = []
            # Only now: ops are registered after the defaults of plugins are known.
            for field, ops in config.op_names().items():
                known = registry.named_by(field)
                unknown += [op for op in ops if op not in known]
            if unknown:
                step = partial(_reject_names, unknown, registry.records())
                self._attempt(origin.removeprefix("plugin "), "in its hook opgraft_config", step)

    def _attempt(
        self, name: str, when: str, step: Callable[[], object], hook: object = None
    ) -> None:
        """Run one step of a plugin inside its transaction. If the step fails, take the plugin back.

        ``hook`` is the function of the plugin that the step calls, if any.
        """
        transaction = self.transactions[name]
        record = self.state.plugins[name]
        whose = f"{transaction.owner} of {transaction.provider}"
        try:
            with (
                activating(transaction),
                watching_code(f"{whose} {when}", transaction.provider),
                self._guarded(name, when, hook),
            ):
                step()
            # Behind the step: its additions are known by now, and an undo is no change.
            if record.status in (PluginStatus.REJECTED, PluginStatus.VETOED):
                record.location = self._place(name, hook)
                self._withdraw(name, record.status, record.reason)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a plugin must not end the process
            self._fail(name, when, error)

    def _fail(self, name: str, when: str, error: BaseException) -> None:
        """Take back a plugin with a failed step, and record the failure.

        Raises:
            PluginError: in strict mode, or if a setting names the plugin.
        """
        record = self.state.plugins[name]
        self._withdraw(name, PluginStatus.FAILED, f"{when}: {described(error)}")
        # As text: the traceback itself would keep alive the objects of the plugin's frames.
        record.traceback = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
        known = error.location if isinstance(error, PluginError) else None
        package = self.transactions[name].module.partition(".")[0]
        record.location = known or raised_in(package, error)
        message = failure_of(record)
        if self.config.strict or any(offer.name == name for offer in self._named()):
            raise PluginError(message) from error
        logger.warning("%s It is left out.", printable(message), extra=record.attributes())

    def _guarded(self, name: str, when: str, hook: object) -> AbstractContextManager[None]:
        """Set back the changes of the process by a step. Additions end with the plugin."""
        record = self.state.plugins[name]
        undos = self.transactions[name].undos

        def report(kept: Sequence[Change], told: Sequence[str]) -> None:
            for change in kept:
                undos.callback(change.set_back)
                if change.started is not None:
                    STARTED.get()[change.started] = record.provider
                record.notes += (
                    f"changed {change.what} {when}: it stays as long as the plugin does",
                )
            for words in told:
                message = f"plugin {name} of {record.provider} {words}"
                finding = Finding(message, record.provider, self._place(name, hook))
                record.findings += (finding,)
                logger.warning("%s", printable(str(finding)), extra=record.attributes())

        guarded: AbstractContextManager[None] = self.guard.watching(
            when, partial(self._may_stay, record), report
        )
        return guarded

    def _may_stay(self, record: PluginRecord, change: Change) -> bool:
        """Return True for a change of torch by the distribution of the device."""
        return change.patch and may_patch_torch(record.provider)

    def _place(self, name: str, hook: object = None) -> str | None:
        """Return ``file:line`` of the hook, or of the first line of the module."""
        file = getattr(sys.modules.get(self.transactions[name].module), "__file__", None)
        return location_of(hook) if hook is not None else file and f"{file}:1"

    def _withdraw(self, name: str, status: PluginStatus, reason: str) -> None:
        # Undone first, so that the former state is what the next plugin finds.
        self.transactions[name].undos.close()
        self.guard.forget()
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)
        self.state.plugins[name].status = status
        self.state.plugins[name].reason = reason

    def _named(self) -> list[Offer]:
        return [
            o for o in discover().of_group(PLUGIN_GROUP) if asked_for(o, self.config.plugins or ())
        ]

    def _alive(self) -> list[str]:
        return [
            name
            for name in self.transactions
            if self.state.plugins[name].status is PluginStatus.LOADED
        ]


def _as_activated(record: PluginRecord) -> str:
    """Return the platforms of an active plugin, and its replacements without a target."""
    dead = ", ".join(row.asked_for for row in replacements_of(record) if row.target is None)
    left_out = f"; left out: {dead}, which no registered op answers to" if dead else ""
    return f"applies on {', '.join(record.platforms)}{left_out}"


def _expect_usable(adapter: Adapter | CallAdapter) -> None:
    """Raise ``PluginError`` for a row with values of the wrong kind, before ``graft`` uses them."""
    _expect_field(adapter, "op", "a class", isinstance(adapter.op, type))
    _expect_field(adapter, "recognise", "a function", callable(adapter.recognise))
    if isinstance(adapter, CallAdapter):
        _expect_field(adapter, "substitute", "a function", callable(adapter.substitute))
        expected = "a name with {name} as the only field"
        _expect_field(adapter, "child", expected, _is_name(adapter.child))


def _expect_field(adapter: Adapter | CallAdapter, field: str, expected: str, fits: bool) -> None:
    if not fits:
        value = reprlib.repr(getattr(adapter, field))
        raise PluginError(
            f"opgraft_graft_adapters returned a row {adapter.name!r} with {field}={value}: "
            f"expected {expected}"
        )


def _is_name(child: str) -> bool:
    """Return True if the name of a child can be made of a function's name."""
    try:
        return str.format(child, name="function").isidentifier()
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def _reject_names(unknown: list[str], known: Iterable[str]) -> None:
    near = close_matches(unknown[0], known)
    raise PluginError(f"it names the op {unknown[0]!r}, which nobody registers: {near}")


def _no_hook(offer: Offer, plugin: object) -> PluginError:
    """Return an error about a plugin without hooks, with the nearest reason in its code."""
    text = f"{offer.value} implements no hook and registers no op"
    for name, function, hint in hookspecs.unmarked(plugin):
        place = location_of(function)
        return PluginError(f"{text}: {name} at {place} is never called: {hint}", place)
    package = offer.module.partition(".")[0]
    for place, module in host_state().registry.unapplied.copy().items():
        if module.partition(".")[0] == package:
            return PluginError(f"{text}: {unapplied_at(place)}", place)
    return PluginError(f"{text}: mark a function named opgraft_register_ops with @opgraft.hookimpl")


def _overruled_platforms(record: PluginRecord, plugin: Any) -> tuple[Finding, ...]:
    """Find a ``platforms`` attribute that differs from the platforms of the distribution."""
    stated = getattr(plugin, "platforms", None)
    if stated is None or (
        isinstance(stated, (tuple, list)) and set(stated) == set(record.platforms)
    ):
        return ()
    names = ", ".join(record.platforms)
    message = (
        f"plugin {record.name} of {record.provider} states platforms = {reprlib.repr(stated)}, "
        f"which is ignored: its distribution offers the platform {names}, and it applies there "
        "only. Remove platforms, or move the plugin to a distribution that offers no platform."
    )
    return (Finding(message, record.provider, record.location),)


def _stated_platforms(plugin: object) -> tuple[str, ...]:
    """Return the plugin's ``platforms`` attribute, which a distribution without platform needs.

    Raises:
        PluginError: the attribute is missing, or neither "any" nor a sequence of names.
    """
    stated = getattr(plugin, "platforms", None)
    if stated == ANY_PLATFORM:
        return (ANY_PLATFORM,)
    if (
        isinstance(stated, (tuple, list))
        and stated
        and all(isinstance(name, str) for name in stated)
    ):
        return tuple(stated)
    raise PluginError(
        "its distribution offers no platform, so it must state where its kernels apply: platforms "
        f"= ('cpu',) or platforms = 'any' (it has {reprlib.repr(stated)})"
    )


def _not_here(platforms: tuple[str, ...], platform: Platform) -> str:
    return f"applies on {', '.join(platforms)} only, this process runs on {platform.name}"
