"""Discovery of installed platforms and plugins by their metadata, without any import."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import importlib_metadata
from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.base.version import __version__
from opgraft.config import FIELDS, NATIVE_CHOICE, Field
from opgraft.config.environment import read_simulated
from opgraft.config.plugin_settings import SETTINGS_GROUP
from opgraft.errors import ConfigError, close_matches
from opgraft.plugins.metadata import (
    Problem,
    distributions,
    entry_point_rows,
    fields_of,
    groups_in,
    is_stray,
    place_of,
    text_of,
)
from opgraft.plugins.namesakes import installed_among
from opgraft.plugins.settings_file import fields_of_package
from opgraft.registry.decision import Provider
from opgraft.registry.state import StateValue, host_state

PLATFORM_GROUP = "opgraft.platforms"
PLUGIN_GROUP = "opgraft.plugins"
PLATFORM_BRIDGES = "opgraft.platform_bridges"
BRIDGE_GROUPS = MappingProxyType(
    {PLATFORM_BRIDGES: PLATFORM_GROUP, "opgraft.plugin_bridges": PLUGIN_GROUP}
)
"""Groups of bridges, each with the group of the result.

The name of a bridge's entry point is a group of another host. Its function turns an ``Offer`` in
that group into a ``PlatformSpec`` or a plugin.
"""

PORTERS = "opgraft.porters"
"""The group of functions that rewrite a plugin of another host.

The name of an entry point is the other host's. The function takes a folder and returns an
``opgraft.plugins.bridges.Ported``.
"""

FOR_OTHER_HOSTS = (*BRIDGE_GROUPS, PORTERS)
"""Groups of helpers. No allow list names them: they run for a plugin or folder of the user."""

HOST_DISTRIBUTION = "opgraft"
CHECKED = (HOST_DISTRIBUTION, "torch")
"""The distributions that a plugin must fit in their version."""

_OWN = (PLATFORM_GROUP, PLUGIN_GROUP, SETTINGS_GROUP, *FOR_OTHER_HOSTS)
_MOST = 1000  # entry points of a distribution
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_FOREIGN = "other characters than letters, digits, '_', '.' and '-', such as a space"
_VALUE = re.compile(r"\w[\w.]*(\s*:\s*\w[\w.]*)?(\s*\[.*\])?")
_SIMULATED = "opgraft.testing.devices"
_BUILT_IN = "opgraft.platforms"
_NO_MODULE = "__main__"
_POINTS = "entry_points.txt"


@dataclass(frozen=True)
class Offer:
    """One entry point of a distribution.

    Attributes:
        group: the group of opgraft, for platforms or for plugins.
        name: the name of the entry point.
        value: the object, such as ``acme.plugin:SPEC``.
        provider: the distribution.
        requires: requirements of the distribution on opgraft and on torch.
        bridge: makes a platform or plugin of opgraft from an entry point of another host.
    """

    group: str
    name: str
    value: str
    provider: Provider
    requires: tuple[str, ...] = ()
    bridge: Offer | None = None

    @property
    def module(self) -> str:
        """The module in the entry point."""
        return self.value.partition(":")[0].partition("[")[0].strip()

    @property
    def package(self) -> str:
        """The top-level package of that module."""
        return self.module.partition(".")[0]

    @property
    def built_in(self) -> bool:
        """True for opgraft's own platforms. Other distributions may lay modules beside theirs."""
        if self.group != PLATFORM_GROUP or not _is_host(self.provider.name):
            return False
        return f"{self.module}.".startswith((f"{_BUILT_IN}.", f"{_SIMULATED}."))

    @property
    def stands_in(self) -> str:
        """The group in the metadata: with a bridge, a group of another host."""
        return self.bridge.name if self.bridge else self.group

    def is_above(self, module: str) -> bool:
        """Return True if a module is the module of the entry point, or lies below."""
        return f"{module}.".startswith(f"{self.module}.")

    def load(self) -> Any:
        """Import the object of the entry point; a bridge turns the object into opgraft's own."""
        if self.bridge is not None:
            return self.bridge.load()(self)
        point = importlib_metadata.EntryPoint(name=self.name, value=self.value, group=self.group)
        return point.load()

    def answers_to(self, name: str) -> bool:
        """Return True if a setting names the entry point or the distribution."""
        return normalized(name) in (normalized(self.name), normalized(self.provider.name))


@dataclass
class Discovery:
    """The result of one scan of the installed distributions.

    Attributes:
        offers: the entry points for opgraft that code is loaded from.
        problems: unusable metadata.
        distributions: the distributions with offers, without opgraft itself.
        groups: every group of entry points with its distributions, for any host.
        providers: the answers of ``provider_of``.
        sections: the entry points for settings, by distribution. The names mean no plugin.
        settings: the settings that distributions declare, by dotted name.
    """

    offers: list[Offer] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    distributions: dict[Provider, importlib_metadata.Distribution] = field(default_factory=dict)
    groups: dict[str, list[importlib_metadata.Distribution]] = field(default_factory=dict)
    providers: dict[str, Provider] = field(default_factory=dict)
    sections: dict[Provider, Offer] = field(default_factory=dict)
    settings: dict[str, Field] = field(default_factory=dict)

    @functools.cached_property
    def packages(self) -> frozenset[str]:
        """The top-level packages of plugins and platforms that are made for opgraft."""
        own = [offer for offer in self.offers if not offer.built_in and offer.bridge is None]
        return frozenset(offer.package for offer in own)

    def of_group(self, group: str) -> list[Offer]:
        return [offer for offer in self.offers if offer.group == group]

    def provider_of(self, module: str) -> Provider:
        """Return the distribution of a module of opgraft or a plugin; else the package."""
        # Asked for each class that a plugin declares.
        known = self.providers.get(module)
        if known is None:
            known = self._provider_of(module)
            self.providers[module] = known
        return known

    def _provider_of(self, module: str) -> Provider:
        package = module.partition(".")[0]
        if package == HOST_DISTRIBUTION:
            return Provider(HOST_DISTRIBUTION, __version__)
        offers = [offer for offer in self.offers if offer.package == package]
        nearest = _nearest(offers, module)
        if nearest is not None:
            return nearest.provider
        owners = list(dict.fromkeys(offer.provider for offer in offers))
        if len(owners) > 1:  # a shared namespace
            listing = [each for each in owners if _lists(self.distributions.get(each), module)]
            owners = listing or owners
        if not owners:
            # The entry points of a distribution may name some of its top-level packages only.
            owners = [each for each, found in self.distributions.items() if _has(found, module)]
        return owners[0] if owners else Provider(package)

    def has_plugin(self, provider: Provider) -> bool:
        """Return True if a distribution offers plugins, and so decides later about replacements."""
        return any(offer.provider == provider for offer in self.of_group(PLUGIN_GROUP))

    def is_bridge(self, module: str) -> bool:
        """Return True if a module belongs to a bridge that an installed plugin needs."""
        package = module.partition(".")[0]
        return any(
            each.bridge is not None and each.bridge.package == package for each in self.offers
        )

    def platforms_of(self, provider: Provider) -> list[str]:
        """Return the names of a distribution's platforms, without opgraft's own."""
        offers = self.of_group(PLATFORM_GROUP)
        return [each.name for each in offers if each.provider == provider and not each.built_in]

    def plugin_of(self, module: str, provider: Provider) -> str | None:
        """Return the plugin of a module: the nearest entry point above, or the only one.

        ``None`` if the distribution has several plugins and no name decides.
        """
        offers = [offer for offer in self.of_group(PLUGIN_GROUP) if offer.provider == provider]
        nearest = _nearest(offers, module)
        if nearest is not None:
            return nearest.name
        return offers[0].name if len(offers) == 1 else None


def _nearest(offers: Sequence[Offer], module: str) -> Offer | None:
    """Return the offer with the longest module above a module."""
    # Two plugins may share a package: the longer name is the closer one.
    above = [offer for offer in offers if offer.is_above(module)]
    return max(above, key=lambda offer: len(offer.module), default=None)


_DISCOVERY = StateValue[Discovery](lambda: scan())  # defined below


def discover() -> Discovery:
    """Return the installed platforms and plugins, scanned once per process."""
    state = host_state()
    # Two threads may ask at the same time, and a scan takes a while.
    with state.lock:
        return _DISCOVERY.of(state)


def is_built_in(platform: str) -> bool:
    """Return True if the platform of a name is one of opgraft's own."""
    offers = discover().of_group(PLATFORM_GROUP)
    return any(offer.built_in for offer in offers if offer.name == platform)


def names_of(plugin: str) -> tuple[str, list[str], list[str]]:
    """Return the distribution of a name, with plugins and platforms.

    A built-in platform stands for itself alone.

    Raises:
        ConfigError: nothing installed answers to the name.
    """
    built_in = {offer.name for offer in discover().of_group(PLATFORM_GROUP) if offer.built_in}
    # All built-in platforms are of the distribution opgraft, which would mean every one.
    if plugin in built_in:
        return HOST_DISTRIBUTION, [], [plugin]
    offers = [offer for offer in discover().offers if not offer.built_in]
    meant = next((offer.provider for offer in offers if offer.answers_to(plugin)), None)
    if meant is None:
        names = {offer.name for offer in offers} | {offer.provider.name for offer in offers}
        near = close_matches(plugin, built_in | names)
        raise ConfigError(f"no plugin or platform {plugin!r} is installed: {near}")
    own = [offer for offer in offers if offer.provider == meant]
    plugins = [offer.name for offer in own if offer.group == PLUGIN_GROUP]
    platforms = [offer.name for offer in own if offer.group == PLATFORM_GROUP]
    return meant.name, plugins, platforms


def scan() -> Discovery:
    """Read the entry points of every installed distribution.

    If several distributions have one name, the first on ``sys.path`` counts; in one folder, the
    installed one. The platform of the simulated device is offered if the environment names a
    device.
    """
    scanned = _Scan()
    scanned.read_own()
    scanned.read_bridged()
    return scanned.finished()


class _Scan:
    """A scan in progress.

    Attributes:
        discovery: the result.
        offered: the entry points, with rivals for one name.
    """

    def __init__(self) -> None:
        self.discovery = Discovery()
        self.offered: list[Offer] = []
        self._seen: dict[str, Provider] = {}

    def read_own(self) -> None:
        """Read the entry points in groups of opgraft."""
        # Outdated metadata must go before names are compared, or the wrong version would count.
        own = self._naming_opgraft()
        outdated = self._outdated([found for found, _ in own])
        for found, text in own:
            if found in outdated:
                continue
            try:
                self._read(found, text)
            except Exception as error:  # of metadata that may be anything
                self._report(_malformed(found, error))

    def read_bridged(self) -> None:
        """Read the entry points of other hosts with a bridge."""
        for bridge in [offer for offer in self.offered if offer.group in BRIDGE_GROUPS]:
            bridged = self.discovery.groups.get(bridge.name, [])
            outdated = self._outdated(bridged)
            for found in bridged:
                if found in outdated:
                    continue
                try:
                    self.offered += self._bridged(found, bridge)
                except Exception as error:  # one faulty library must not hide the others
                    self._report(_malformed(found, error))

    def finished(self) -> Discovery:
        """Admit the offers, log the problems, and return the result."""
        discovery = self.discovery
        if read_simulated():
            host = Provider(HOST_DISTRIBUTION, __version__)
            value = f"{_SIMULATED}:SPEC"
            self.offered.append(Offer(PLATFORM_GROUP, "simulated", value, host))
        known: dict[tuple[str, str], Offer] = {}
        # Built-in platforms come first, and keep the names.
        for offer in sorted(self.offered, key=lambda offer: not offer.built_in):
            reason = self._refusal(offer, known)
            if reason:
                self._report(Problem(offer.provider, reason))
        for offer in discovery.sections.values():
            self._add_settings(offer)
        # A folder may be on sys.path twice.
        discovery.problems = list(dict.fromkeys(discovery.problems))
        for problem in discovery.problems:
            provider, reason = problem.provider, printable(problem.reason)
            words = "plugin metadata of %s is ignored: %s"
            logger.warning(words, provider, reason, extra=provider.attributes())
        return discovery

    def _add_settings(self, offer: Offer) -> None:
        """Add the settings that a distribution declares. A faulty file adds none."""
        known = {**FIELDS, **self.discovery.settings}
        section = offer.name
        owner = str(offer.provider)
        try:
            found = fields_of_package(offer.value, section, owner, known)
        except Exception as error:  # a file may be anything, and finders are somebody's code
            reason = f"its settings {section!r} in {offer.value} are not used: {error}"
            self._report(Problem(offer.provider, printable(reason)))
            return
        self.discovery.settings.update(found)

    def _report(self, problem: Problem) -> None:
        self.discovery.problems.append(problem)

    def _naming_opgraft(self) -> list[tuple[importlib_metadata.Distribution, str]]:
        """Return the distributions with entry points for opgraft, and the texts.

        The groups of all distributions are noted on the way.
        """
        own: list[tuple[importlib_metadata.Distribution, str]] = []
        for found in distributions():
            if isinstance(found, Problem):
                self._report(found)
                continue
            try:
                # Most distributions end here, unparsed: start-up waits for this loop.
                text = text_of(found, _POINTS) or ""
                for group in groups_in(text):
                    self.discovery.groups.setdefault(group, []).append(found)
                if "opgraft." in text:
                    own.append((found, text))
            except Exception as error:  # metadata may be anything, and finders are somebody's code
                self._report(_malformed(found, error))
        return own

    def _outdated(
        self, several: Sequence[importlib_metadata.Distribution]
    ) -> list[importlib_metadata.Distribution]:
        """Return the distributions beside the installed version of the same one.

        A broken upgrade leaves the metadata of the former version in the folder.
        """
        outdated = []
        for namesakes in _namesakes(several):
            rows = list(namesakes.values())
            chosen, why = installed_among([found for found, _ in rows])
            best, counting = rows[chosen]
            left = {place for place, (found, _) in namesakes.items() if found is not best}
            # A folder that is on sys.path twice gives each distribution twice.
            outdated += [found for found in several if str(place_of(found)) in left]
            for place, (found, provider) in namesakes.items():
                if provider == counting:
                    continue
                reason = (
                    f"its metadata is left beside that of {counting} in one folder, which counts, "
                    f"as {why}: remove {place}, or install the one that you want again"
                )
                self._report(Problem(provider, reason, _version_line(found, place)))
        return outdated

    def _read(self, found: importlib_metadata.Distribution, text: str) -> None:
        """Add the offers of a distribution; ``text`` has its entry points."""
        fields = fields_of(found)
        provider = _provider(fields)
        _check(text, _OWN)
        if not _is_host(provider.name):
            if self._counts(found, provider):
                self.offered += _offers(found, provider, fields.get("requires-dist", []))
            return
        own = self._own_offers(found)
        # An egg-info in the working folder may be of another time: the installed one comes first.
        is_installed = text_of(found, "METADATA") is not None
        self.offered = own + self.offered if is_installed else self.offered + own

    def _bridged(self, found: importlib_metadata.Distribution, bridge: Offer) -> list[Offer]:
        """Return the offers of a distribution through a bridge.

        There are none if the distribution has offers for opgraft itself, or is the other host. The
        name of a host begins the name of its groups.
        """
        text = text_of(found, _POINTS) or ""
        fields = fields_of(found)
        provider = _provider(fields)
        offers_itself = {PLATFORM_GROUP, PLUGIN_GROUP} & set(groups_in(text))
        if offers_itself or normalized(provider.name) == bridge.name.split(".")[0]:
            return []
        _check(text, (bridge.name,))
        if not self._counts(found, provider):
            return []
        requires = _checked(fields.get("requires-dist", []))
        group = BRIDGE_GROUPS[bridge.group]
        return [
            Offer(group, point.name, point.value, provider, requires, bridge)
            for point in found.entry_points
            if point.group == bridge.name
        ]

    def _counts(self, found: importlib_metadata.Distribution, provider: Provider) -> bool:
        """Return True if a distribution is the first of its name.

        A later one of another version is a problem.

        Raises:
            ValueError: a build left the distribution in the working folder.
        """
        if is_stray(found):
            raise ValueError(
                "a build left it in the working folder, and nothing has installed it: remove it"
            )
        first = self._seen.setdefault(normalized(provider.name), provider)
        if first != provider:
            reason = (
                f"it is another installation of {first}, which comes first on sys.path: "
                f"uninstall one of them ({place_of(found)})"
            )
            self._report(Problem(provider, reason))
            return False
        return self.discovery.distributions.setdefault(provider, found) is found

    def _own_offers(self, distribution: importlib_metadata.Distribution) -> list[Offer]:
        """Return the offers of a distribution with opgraft's name, as far as they are opgraft's.

        There may be several such distributions: beside the installed one an ``opgraft.egg-info``
        of another time in the working folder, or an impostor. An offer of any of them counts if
        its module is opgraft's and exists.
        """
        offers = list(_offers(distribution, Provider(HOST_DISTRIBUTION, __version__), []))
        # Anybody may call a distribution opgraft, and built-in platforms run unguarded.
        foreign = [offer.value for offer in offers if not offer.built_in]
        if foreign:
            place = str(place_of(distribution) or type(distribution).__qualname__)
            reason = (
                f"it calls itself {HOST_DISTRIBUTION} and offers {', '.join(foreign)}, which is no "
                "part of opgraft: uninstall it, or give it a name of its own"
            )
            self._report(Problem(Provider(place), reason))
        return [offer for offer in offers if offer.built_in and _exists(offer.module)]

    def _refusal(self, offer: Offer, known: dict[tuple[str, str], Offer]) -> str:
        """Admit an offer, or return the reason against the offer. The first of equals counts."""
        entry = f"its entry point {offer.name!r} in {offer.group}"
        if (offer.group, offer.name) == (PLUGIN_GROUP, NATIVE_CHOICE):
            return (
                f"{entry} could not be chosen by the setting providers, where that name means an "
                "op's native definition: give it another name"
            )
        namesake = self._namesake(offer)
        if namesake is not None:
            return (
                f"{entry} has the name of the distribution {namesake}, which a setting with that "
                "name means: give it another name, or uninstall one of the two"
            )
        section = self.discovery.sections.get(offer.provider)
        if offer.group == SETTINGS_GROUP and section is not None:
            # The limit on settings holds for a distribution. One reason stands for all sections.
            return (
                f"it has several sections in {SETTINGS_GROUP}, and {section.name!r} counts: "
                "declare all settings of the distribution there"
            )
        rival = known.setdefault((offer.group, offer.name), offer)
        if rival is offer:
            self._admit(offer)
            return ""
        if rival.built_in and offer.built_in:
            return ""
        if rival.provider == offer.provider and not offer.built_in:
            return f"{entry} is there twice: {rival.value} counts"
        return (
            f"{entry} is already provided by {rival.provider}: uninstall one of the two "
            "distributions"
        )

    def _admit(self, offer: Offer) -> None:
        if offer.group == SETTINGS_GROUP:
            self.discovery.sections[offer.provider] = offer
        else:
            self.discovery.offers.append(offer)

    def _namesake(self, offer: Offer) -> str | None:
        """Return another distribution with the name of a plugin or platform."""
        # Lists in settings name plugins and distributions, and no sections.
        if offer.built_in or offer.group == SETTINGS_GROUP:
            return None
        if normalized(offer.name) == normalized(offer.provider.name):
            return None
        others = (provider.name for provider in self.discovery.distributions)
        for name in (HOST_DISTRIBUTION, *others):
            if normalized(name) == normalized(offer.name):
                return name
        return None


_Namesakes = dict[str, tuple[importlib_metadata.Distribution, Provider]]
"""Distributions of one name, by the folder of the metadata."""


def _namesakes(several: Sequence[importlib_metadata.Distribution]) -> list[_Namesakes]:
    """Return distributions with one name in one folder, by name."""
    places: dict[tuple[str, str], _Namesakes] = {}
    for found in several:
        with suppress(Exception):  # metadata that cannot be read is a problem of its own
            # Metadata in an archive has no folder to leave something in.
            place, provider = place_of(found), _provider(fields_of(found))
            if place is None or _is_host(provider.name) or is_stray(found):
                continue
            key = (str(place.parent), normalized(provider.name))
            places.setdefault(key, {}).setdefault(str(place), (found, provider))
    return [namesakes for namesakes in places.values() if len(namesakes) > 1]


def _version_line(found: importlib_metadata.Distribution, place: str) -> str:
    """Return ``file:line`` of the version in a distribution's metadata."""
    name = "METADATA" if text_of(found, "METADATA") else "PKG-INFO"
    path = os.path.join(place, name)
    lines = (text_of(found, name) or "").splitlines()
    for number, line in enumerate(lines, 1):
        if line.lower().startswith("version:"):
            return f"{path}:{number}"
    return f"{path}:1"


def _malformed(found: importlib_metadata.Distribution, error: Exception) -> Problem:
    """Describe a distribution with unreadable metadata, by name if readable."""
    place = place_of(found)
    provider = Provider(str(place or type(found).__qualname__))
    with suppress(Exception):
        provider = _provider(fields_of(found))
    where = f" ({place})" if place else ""
    why = described(error)
    reason = f"its plugin metadata is malformed: {why}{where}"
    location = None
    with suppress(Exception):  # the file itself may be what cannot be read
        location = _line_of_row(found, str(place), why)
    return Problem(provider, reason, location)


def _line_of_row(found: importlib_metadata.Distribution, place: str, quoted_in: str) -> str | None:
    """Return ``file:line`` of the entry point that a message quotes."""
    for number, line in enumerate((text_of(found, _POINTS) or "").splitlines(), 1):
        if line.strip() and repr(line.strip()) in quoted_in:
            return f"{os.path.join(place, _POINTS)}:{number}"
    return None


def _provider(fields: Mapping[str, list[str]]) -> Provider:
    return Provider(fields["name"][0], fields["version"][0])


def _check(text: str, groups: Collection[str]) -> None:
    """Reject malformed entry points in ``groups``.

    Raises:
        ValueError: one is there, or there are too many.
    """
    # The file may be of any size: a limit keeps start-up short.
    rows = list(entry_point_rows(text))
    if len(rows) > _MOST:
        raise ValueError(f"it has more than {_MOST:,} entry points")
    for group, row in rows:
        if group not in groups:
            continue
        name, _, value = (part.strip() for part in row.partition("="))
        module = value.partition(":")[0].partition(".")[0].strip()
        if _NAME.fullmatch(name) and _VALUE.fullmatch(value) and module != _NO_MODULE:
            continue
        foreign = f": the name {name!r} has {_FOREIGN}"
        told = "" if _NAME.fullmatch(name) or not name else foreign
        raise ValueError(f"{row!r} in {group}, expected 'name = package.module:object'{told}")


def is_editable(distribution: importlib_metadata.Distribution | None) -> bool:
    """Return True for an editable install. No RECORD lists its source."""
    return _editable_source(distribution) is not None


def _editable_source(distribution: importlib_metadata.Distribution | None) -> str | None:
    """Return the URL of the source of an editable install, ``None`` for any other distribution."""
    if distribution is None:
        return None
    try:
        origin = json.loads(text_of(distribution, "direct_url.json") or "{}")
        is_editable_install = origin.get("dir_info", {}).get("editable") is True
        return str(origin.get("url", "")) if is_editable_install else None
    except (ValueError, AttributeError, RecursionError):  # of another form than installers write
        return None


def _has(distribution: importlib_metadata.Distribution, module: str) -> bool:
    """Return True if a RECORD lists a module, or the editable source has the module."""
    if _lists(distribution, module):
        return True
    source = _editable_source(distribution)
    file = getattr(sys.modules.get(module), "__file__", None)
    if not source or not file:
        return False
    # Compared as addresses: parsing one needs a module that start-up does without.
    return Path(file).resolve().as_uri().startswith(f"{source.rstrip('/')}/")


def _lists(distribution: importlib_metadata.Distribution | None, module: str) -> bool:
    """Return True if the RECORD of a distribution has the file of a module."""
    if distribution is None:
        return False
    try:
        record = text_of(distribution, "RECORD") or ""
    except (ValueError, OSError):
        return False
    path = re.escape(module.replace(".", "/"))
    return re.search(rf"^{path}(/__init__)?\.[^/,]+,", record, re.M) is not None


def _offers(
    distribution: importlib_metadata.Distribution, provider: Provider, requires: list[str]
) -> Iterator[Offer]:
    checked = _checked(requires)
    # Groups of other hosts need a bridge.
    for point in distribution.entry_points:
        if point.group in _OWN:
            yield Offer(point.group, point.name, point.value, provider, checked)


def _checked(requires: list[str]) -> tuple[str, ...]:
    """Return the requirements on distributions with checked versions."""
    checked = []
    for line in requires:
        # Parsing whole requirements would need packaging, whose import takes 20 ms.
        name = re.match(r"\s*([\w.-]*\w)", line)
        if name is not None and normalized(name[0].strip()) in CHECKED:
            checked.append(line)
    return tuple(checked)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above the module is missing
        return False


def _is_host(name: str) -> bool:
    return normalized(name.strip()) == HOST_DISTRIBUTION


# The names of distributions are compared again and again.
@functools.lru_cache(maxsize=4096)
def normalized(name: str) -> str:
    """Return a distribution's name in the normal spelling."""
    return re.sub(r"[-_.]+", "-", name).lower()
