"""Loading the class of the chosen platform, and letting the platform set up the process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.config import OpgraftConfig
from opgraft.config.environment import PLATFORM, PLUGINS_DISABLE
from opgraft.errors import ConflictError, PlatformError, raised_in
from opgraft.platform import Platform, effective_chain
from opgraft.plugins.changes import Change
from opgraft.plugins.discovery import HOST_DISTRIBUTION, Offer, discover
from opgraft.plugins.guarded_methods import expect_plain
from opgraft.plugins.kept_properties import keep_properties
from opgraft.plugins.remarks import PLATFORM_FINDINGS, PLATFORM_NOTES, STARTED
from opgraft.plugins.requirements import check_adjustment
from opgraft.registry.decision import Provider
from opgraft.registry.declarations import Owner
from opgraft.registry.finding import Finding
from opgraft.registry.op_classes import location_of
from opgraft.registry.state import PlatformSelection, Transaction, activating, host_state
from opgraft.registry.watching import watching_code


def load_platform(offer: Offer) -> tuple[Platform, OpgraftConfig]:
    """Load the chosen platform and its default settings, and check both.

    Loading an out-of-tree platform is a transaction. If the platform cannot be used, its
    declarations, such as ops and replacements, and its changes of the process are taken back. If
    the platform can be used, changes for others are set back. Functions of torch are the exception:
    a device may need another one.

    Raises:
        PlatformError: the platform cannot be loaded, or breaks the contract of platforms.
    """
    if offer.built_in:
        return _loaded(offer)
    whose, when = f"platform {offer.name!r} of {offer.provider}", "while its class was loaded"
    with ExitStack() as undos:
        owner = Owner("platform", offer.name, offer.provider)
        transaction = Transaction(owner, offer.module, undos)
        undos.callback(host_state().withdraw_declarations, owner)
        undos.callback(_confine_replacements, transaction)
        with (
            activating(transaction),
            _guarded(whose, offer.provider, when, lambda change: change.patch) as places,
        ):
            loaded = _loaded(offer)
            places.append(location_of(type(loaded[0])))
        _activate_declarations_of_platform(transaction)
        undos.pop_all()  # nothing raised: what was declared stays
    return loaded


def _confine_replacements(transaction: Transaction) -> None:
    """Confine the declarations of a platform without use.

    Another platform of the distribution must not run the kernels.
    """
    for replacement in host_state().registry.replacements:
        if replacement.activation is transaction:
            replacement.platforms = (transaction.owner.name,)


def _activate_declarations_of_platform(transaction: Transaction) -> None:
    """Activate the declarations of the platform's modules, whoever imported them.

    If the distribution has plugins, the activation of these decides about replacements.

    Raises:
        PlatformError: the name of a declaration is taken.
    """
    state, provider, name = host_state(), transaction.provider, transaction.owner.name
    try:
        state.renew_declarations(transaction.owner)
    except ConflictError as error:
        raise PlatformError(f"{transaction.owner} of {provider} cannot be used: {error}") from error
    if discover().has_plugin(provider):
        return
    own = [each for each in state.registry.replacements if each.provider == provider]
    for replacement in own:
        if name in replacement.platforms:
            transaction.undos.callback(state.activate(replacement))
    elsewhere = [each for each in own if name not in each.platforms]
    if elsewhere:
        classes = ", ".join(each.cls.__qualname__ for each in elsewhere)
        others = ", ".join(dict.fromkeys(each.platforms[0] for each in elsewhere))
        message = (
            f"{transaction.owner} of {provider} goes without {classes}: they were declared while "
            f"platform {others} was loaded, which was left out. Set {PLATFORM}={name} to load "
            f"{name!r} alone."
        )
        report(Finding(message, provider, elsewhere[0].location))


def _loaded(offer: Offer) -> tuple[Platform, OpgraftConfig]:
    spec: Any = None
    cls: Any = None
    try:
        with watching_code(
            f"platform {offer.name!r} of {offer.provider} while its class was loaded",
            offer.provider,
        ):
            spec = offer.load()
            cls = spec.load_class()
            if isinstance(cls, Platform):
                raise TypeError(f"it is an instance of {type(cls).__qualname__}, name the class")
            platform = cls()
            if not isinstance(platform, Platform):
                raise TypeError(f"it is a {type(platform).__name__}, expected an opgraft.Platform")
            if not offer.built_in:
                keep_properties(platform, offer.name, offer.provider)
            if platform.name != offer.name:
                raise TypeError(
                    f"it calls itself {platform.name!r}, its entry point is {offer.name!r}"
                )
            effective_chain(platform)
            defaults = expect_plain(platform.default_config())
        if not isinstance(defaults, OpgraftConfig):
            kind = type(defaults).__name__
            raise TypeError(f"default_config returned a {kind}, expected an opgraft.OpgraftConfig")
        check_adjustment(defaults)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PlatformError(
            f"the class of platform {offer.name!r} ({offer.provider}, {offer.value}) cannot be "
            f"used: {described(error)}",
            _place_of_platform_error(offer, spec, cls, error),
        ) from error
    return platform, defaults


def _place_of_platform_error(offer: Offer, spec: Any, cls: Any, error: BaseException) -> str | None:
    """Return ``file:line`` of the code of a platform that raised, or else of the class.

    Args:
        cls: the class, if it was loaded.
    """
    path = getattr(spec, "platform_class", None)
    # A function that loads the class may be code of a bridge to another host.
    named = path if isinstance(path, str) else offer.module
    module, _, name = named.partition(":")
    home = cls.__module__ if isinstance(cls, type) else module
    for package in (offer.package, home.partition(".")[0]):
        place = raised_in(package, error)
        if place is not None:
            return place
    loaded = sys.modules.get(module)
    cls = cls or getattr(loaded, name, None)
    if isinstance(cls, type):
        return location_of(cls)
    file = getattr(loaded, "__file__", None)
    return file and f"{file}:1"


def prepare_platform(selection: PlatformSelection, config: OpgraftConfig) -> None:
    """Call ``Platform.prepare`` of the selected platform.

    Changes of the process stay, and are notes.

    Raises:
        PlatformError: the method raised. All changes are set back.
    """
    name = selection.platform.name
    provider = selection.provider
    whose = f"platform {name!r} of {provider}"
    if provider is None or provider.name == HOST_DISTRIBUTION:
        _call_prepare(selection.platform, config, whose, provider)
        return
    with _guarded(whose, provider, "in its method prepare", lambda change: True) as places:
        places.append(location_of(type(selection.platform).prepare))
        _call_prepare(selection.platform, config, whose, provider)


def _call_prepare(
    platform: Platform, config: OpgraftConfig, whose: str, provider: Provider | None
) -> None:
    try:
        with watching_code(f"{whose} in its method prepare", provider):
            set_up: Callable[..., Any] = platform.prepare
            expect_plain(set_up(config))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin's code
        raise PlatformError(
            f"{whose} cannot be set up: its prepare() raised {described(error)}. Choose another by "
            f"{PLATFORM}, or go without its plugin by {PLUGINS_DISABLE}."
        ) from error


def report(finding: Finding) -> None:
    """Log a fault of a platform once, and keep the finding for ``opgraft plugins``."""
    findings = PLATFORM_FINDINGS.get()
    if finding not in findings:
        findings.append(finding)
        logger.warning("%s", printable(str(finding)))


@contextmanager
def _guarded(
    whose: str, provider: Provider, when: str, stays: Callable[[Change], bool]
) -> Iterator[list[str]]:
    """Set back the changes by a step for others, and every change if the step raises.

    Yields a list for the place of the code, if known.
    """
    kept, told, places = list[Change](), list[str](), list[str]()

    def keep(changes: Sequence[Change], words: Sequence[str]) -> None:
        kept.extend(changes)
        started = [change.started for change in changes if change.started is not None]
        STARTED.get().update(dict.fromkeys(started, provider))
        told.extend(words)

    # With torch, which detection does without.
    guarding = importlib.import_module("opgraft.plugins.guarding")
    try:
        with guarding.Guard().watching(when, stays, keep):
            yield places
    except BaseException:
        told += [f"changed {change.what} {when}: {change.set_back()}" for change in kept]
        raise
    else:
        notes = [f"{whose} changed {change.what} {when}: it stays" for change in kept]
        PLATFORM_NOTES.get().extend((provider, note) for note in notes)
    finally:
        for words in told:
            report(Finding(f"{whose} {words}", provider, next(iter(places), None)))
