"""The entry points of the bridge: two make a platform or a plugin of one of vLLM's, one ports a plugin's source."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import importlib_metadata
import opgraft
from opgraft import Evidence, Fact, Machine, PlatformSpec
from opgraft.errors import InputError
from opgraft.hosts import Offer, Ported, discover

from opgraft_vllm_bridge.finder import VllmFinder, is_installed
from opgraft_vllm_bridge.judging import Judgement, expect_counterparts, judge

_PACKAGES = "pip install libcst tomlkit, or the bridge with its extra 'port'"
_TOLD = (
    "it is told this machine's variables, but for those whose names speak of secrets, such as TOKEN"
)
_ASIDE = "vLLM itself is installed, and runs its plugins: uninstall one of both"


def platform(offer: Offer) -> PlatformSpec:
    """Return a platform of opgraft for an entry point of the group ``vllm.platform_plugins``.

    The probe calls the entry point's function, which returns the path of a class if the device is
    there. The function reads the variables that the machine tells probes.
    """

    def probe(machine: Machine) -> Evidence:
        if is_installed():
            return Evidence(False, _ASIDE)
        with _variables_of(machine):
            path = _class_path(offer)
        if path is None:
            return Evidence(False, f"{offer.value} finds no device; {_TOLD}")
        judgement = _judged(offer, path.rpartition(".")[0])
        expect_counterparts(offer.name, judgement)
        facts = [
            Fact(place, f"opgraft does not call {name}")
            for name, place in judgement.uncalled.items()
        ]
        return Evidence(True, f"{offer.value} returns {path}", facts=tuple(facts))

    def load() -> type[opgraft.Platform]:
        path = _class_path(offer)
        if path is None:
            raise opgraft.OpgraftError(
                f"{offer.value}, which has found a device, finds none any more"
            )
        module, _, name = path.rpartition(".")
        expect_counterparts(offer.name, _judged(offer, module))
        # With torch, which a probe does without.
        adapting = importlib.import_module("opgraft_vllm_bridge.adapting")
        adapted: type[opgraft.Platform] = adapting.adapted(
            offer.name, getattr(importlib.import_module(module), name)
        )
        return adapted

    return PlatformSpec(probe, load)


@contextmanager
def _variables_of(machine: Machine) -> Iterator[None]:
    """Give a function of vLLM the variables of a machine, which it reads from ``os.environ``.

    A process that asks a probe has a minimal environment. The machine has all variables but those
    whose names speak of secrets.
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
        register: the function; ``None`` where it is vLLM's to call it.
        offers_platform: its distribution offers a platform, where it applies then; else it applies on any.
    """

    def __init__(self, register: Callable[[], Any] | None, *, offers_platform: bool) -> None:
        self.register = register
        self.platforms = None if offers_platform else "any"

    @opgraft.hookimpl
    def opgraft_veto(self) -> str | None:
        return None if self.register else _ASIDE

    @opgraft.hookimpl
    def opgraft_register_ops(self) -> None:
        if self.register:
            self.register()


def plugin(offer: Offer) -> Plugin:
    """Return a plugin of opgraft for an entry point of the group ``vllm.general_plugins``.

    Raises:
        PluginError: it uses what has no counterpart.
    """
    offers_platform = bool(discover().platforms_of(offer.provider))
    if is_installed():
        return Plugin(None, offers_platform=offers_platform)
    expect_counterparts(offer.name, _judged(offer))
    return Plugin(_function(offer), offers_platform=offers_platform)


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
    """Call the function of a platform's entry point, whose module must have counterparts for all that it uses.

    Raises:
        PluginError: it has not, or it returns something else than a dotted path or ``None``.
    """
    expect_counterparts(offer.name, _judged(offer))
    path = _function(offer)()
    if path is not None and not (isinstance(path, str) and "." in path):
        raise TypeError(
            f"{offer.value} returns {path!r:.80}, expected the dotted path of a class, or None"
        )
    return path


def _judged(offer: Offer, *modules: str) -> Judgement:
    """Judge what an entry point leads to: its function and these modules, without the functions of other ones."""
    apart = {_point(each).attr for each in discover().offers if each.module == offer.module} - {
        _point(offer).attr
    }
    return judge(offer.module, *modules, apart=apart)


def _function(offer: Offer) -> Any:
    VllmFinder(offer.name).install()
    return _point(offer).load()


def _point(offer: Offer) -> importlib_metadata.EntryPoint:
    return importlib_metadata.EntryPoint(offer.name, offer.value, offer.stands_in)
