"""The entry points of the bridge.

``platform`` and ``plugin`` adapt an entry point of vLLM. ``port_folder`` rewrites the source of a
plugin.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import importlib_metadata
import opgraft
from opgraft import Evidence, Machine, PlatformSpec
from opgraft.errors import InputError
from opgraft.plugins.bridges import Offer, Ported, discover, report_fault

from opgraft_vllm_bridge.finder import VllmFinder, is_installed
from opgraft_vllm_bridge.missing import MissingNameError
from opgraft_vllm_bridge.op_modules import import_alone, import_op_modules, op_modules

_PACKAGES = "pip install libcst tomlkit, or the bridge with its extra 'port'"
_TOLD = (
    "it is told this machine's variables, but for those whose names speak of secrets, such as TOKEN"
)
_ASIDE = "vLLM itself is installed, and runs its plugins: uninstall one of both"


def platform(offer: Offer) -> PlatformSpec:
    """Return a platform of opgraft for an entry point of the group ``vllm.platform_plugins``.

    The probe calls the entry point's function. The function returns the path of a platform class if
    the device is there.
    """

    def probe(machine: Machine) -> Evidence:
        if is_installed():
            return Evidence(False, _ASIDE)
        with _variables_of(machine), _last_warning() as told:
            path = _class_path(offer)
        if path is None:
            why = f" ({told[0]})" if told else ""
            return Evidence(False, f"{offer.value} finds no device{why}; {_TOLD}")
        return Evidence(True, f"{offer.value} returns {path}")

    def load() -> type[opgraft.Platform]:
        path = _class_path(offer)
        if path is None:
            raise opgraft.OpgraftError(f"{offer.value} found a device before, and finds none now")
        module, _, name = path.rpartition(".")
        # A late import: adapting imports torch, and probes do without torch.
        adapting = importlib.import_module("opgraft_vllm_bridge.adapting")
        theirs = getattr(importlib.import_module(module), name)
        adapted: type[opgraft.Platform] = adapting.adapted(offer, theirs)
        with adapting.loading(adapted):
            import_op_modules(offer, {offer.package, module.partition(".")[0]})
        return adapted

    return PlatformSpec(probe, load)


@contextmanager
def _variables_of(machine: Machine) -> Iterator[None]:
    """Within the block, put the variables of a machine into ``os.environ``.

    Functions of vLLM's plugins read ``os.environ``, and the process of a probe has few variables.
    The machine has all variables but those whose names speak of secrets.
    """
    before = dict(os.environ)
    os.environ.update(machine.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Plugin:
    """A function of the group ``vllm.general_plugins`` as a plugin of opgraft.

    Args:
        offer: the entry point.
        register: the function, or None if vLLM itself is installed and calls it.
        offers_platform: whether the distribution offers a platform. If so, the plugin applies on
            that platform only, otherwise on every platform.
    """

    def __init__(
        self, offer: Offer, register: Callable[[], Any] | None, *, offers_platform: bool
    ) -> None:
        self.offer = offer
        self.register = register
        self.platforms = None if offers_platform else "any"

    @opgraft.hookimpl
    def opgraft_veto(self) -> str | None:
        return None if self.register else _ASIDE

    @opgraft.hookimpl
    def opgraft_register_ops(self) -> None:
        if self.register is None:
            return
        try:
            self.register()
        except MissingNameError as error:
            self._import_alone(error)
        # A late import: the module imports torch, and probes do without torch.
        configs = importlib.import_module("opgraft_vllm_bridge.vllm_parts.model_configs")
        configs.give_configs_to_transformers()

    def _import_alone(self, error: MissingNameError) -> None:
        """Import the modules that register ops one by one, after the function has failed.

        Raises:
            MissingNameError: no such module could be imported. This is the function's error.
        """
        offer = self.offer
        imported = [import_alone(module, offer) for module in sorted(op_modules(offer.package))]
        if not any(imported):
            raise error
        fault = f"the vLLM plugin {offer.provider} goes without the rest of {offer.value}: {error}"
        report_fault(fault, offer.provider, error.location)


def plugin(offer: Offer) -> Plugin:
    """Return a plugin of opgraft for an entry point of the group ``vllm.general_plugins``."""
    offers_platform = bool(discover().platforms_of(offer.provider))
    if is_installed():
        return Plugin(offer, None, offers_platform=offers_platform)
    return Plugin(offer, _function(offer), offers_platform=offers_platform)


def port_folder(folder: Path) -> Ported:
    """Return the plugin of vLLM in a folder, rewritten for opgraft. None of its code runs.

    Raises:
        InputError: the folder has no plugin of vLLM, or a file cannot be read or parsed.
    """
    try:
        # These modules need libcst and tomlkit, which a running plugin does not need.
        source = importlib.import_module("opgraft_vllm_bridge.porting.source")
        porting = importlib.import_module("opgraft_vllm_bridge.porting.port")
    except ImportError as error:
        raise InputError(f"a plugin cannot be ported ({error}): {_PACKAGES}") from error
    ported: Ported = porting.port(source.read_source(folder))
    return ported


def _class_path(offer: Offer) -> str | None:
    """Call the function of a platform's entry point.

    Raises:
        TypeError: it returns something else than a dotted path or ``None``.
    """
    path = _function(offer)()
    if path is not None and not (isinstance(path, str) and "." in path):
        raise TypeError(
            f"{offer.value} returns {path!r:.80}, expected the dotted path of a class, or None"
        )
    return path


def _function(offer: Offer) -> Any:
    """Return the function of an entry point, with the finder of its plugin in place."""
    installed = _as_installed(offer)
    provider = installed.provider
    packages = {each.package for each in discover().offers if each.provider == provider}
    VllmFinder(provider.name).install(packages)
    point = importlib_metadata.EntryPoint(offer.name, offer.value, installed.stands_in)
    return point.load()


def _as_installed(offer: Offer) -> Offer:
    """Return an entry point with its distribution. The process of a probe does not know it."""
    for each in discover().offers:
        if (each.name, each.value, each.group) == (offer.name, offer.value, offer.group):
            return each
    return offer


class _LastWarning(logging.Handler):
    """Keeps the last warning.

    Attributes:
        told: the text of the warning as the one item, or no item.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # A call of a logger with wrong arguments must not fail a probe.
        try:
            self.told[:] = [record.getMessage()]
        except Exception:
            self.handleError(record)


@contextmanager
def _last_warning() -> Iterator[list[str]]:
    """Yield a list that holds the last warning that a plugin logs within the block."""
    handler = _LastWarning()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler.told
    finally:
        root.removeHandler(handler)
