"""Discovery of installed platforms and plugins. Reads metadata only; imports nothing of theirs."""

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
from typing import Any

import importlib_metadata
from opgraft.base.text import described, printable
from opgraft.config import NATIVE_CHOICE
from opgraft.config.environment import read_simulated
from opgraft.errors import ConfigError, close_matches
from opgraft.logger import logger
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
from opgraft.plugins.namesakes import installed
from opgraft.registry.decision import Provider
from opgraft.registry.state import StateValue, host_state
from opgraft.version import __version__

PLATFORM_GROUP = "opgraft.platforms"
PLUGIN_GROUP = "opgraft.plugins"
PLATFORM_BRIDGES = "opgraft.platform_bridges"
BRIDGE_GROUPS = {PLATFORM_BRIDGES: PLATFORM_GROUP, "opgraft.plugin_bridges": PLUGIN_GROUP}
"""Groups of bridges, each with the group of what its bridges make. The name of a bridge's entry point is a group of
another host, and its function makes of an ``Offer`` that stands in that group a ``PlatformSpec`` or a plugin."""
PORTERS = "opgraft.porters"
"""The group of functions that rewrite a plugin of another host. The name of an entry point is that host's; the function
takes a folder and returns an ``opgraft.hosts.Ported``."""
FOR_OTHER_HOSTS = (*BRIDGE_GROUPS, PORTERS)
"""Groups of helpers that no allow list needs to name: they run only for a plugin, or a folder, that the user names."""
HOST_DISTRIBUTION = "opgraft"
CHECKED = (HOST_DISTRIBUTION, "torch")
"""The distributions whose versions a plugin must fit."""
_OWN = (PLATFORM_GROUP, PLUGIN_GROUP, *FOR_OTHER_HOSTS)
_MOST = 1000  # entry points of a distribution
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_FOREIGN = "other characters than letters, digits, '_', '.' and '-', such as a space"
_VALUE = re.compile(r"\w[\w.]*(\s*:\s*\w[\w.]*)?(\s*\[.*\])?")
_SIMULATED = "opgraft.testing.devices"
_BUILT_IN = "opgraft.platforms"
_NO_MODULE = "__main__"


@dataclass(frozen=True)
class Offer:
    """One entry point of a distribution.

    Attributes:
        group: that of opgraft, which tells what it is.
        requires: requirements of the distribution on opgraft and on torch.
        bridge: makes it a platform or plugin of opgraft, where it stands in a group of another host.
    """

    group: str
    name: str
    value: str
    provider: Provider
    requires: tuple[str, ...] = ()
    bridge: Offer | None = None

    @property
    def module(self) -> str:
        """The module that the entry point names."""
        return self.value.partition(":")[0].partition("[")[0].strip()

    @property
    def built_in(self) -> bool:
        """Return True for one of opgraft's own platforms, beside which others may lay modules of theirs."""
        own = self.group == PLATFORM_GROUP and _is_host(self.provider.name)
        return own and f"{self.module}.".startswith((f"{_BUILT_IN}.", f"{_SIMULATED}."))

    @property
    def stands_in(self) -> str:
        """The group of the entry point, which is another host's where there is a bridge."""
        return self.bridge.name if self.bridge else self.group

    def load(self) -> Any:
        """Import what the entry point names; with a bridge, have that make what opgraft expects."""
        if self.bridge is not None:
            return self.bridge.load()(self)
        return importlib_metadata.EntryPoint(
            name=self.name, value=self.value, group=self.group
        ).load()

    def answers_to(self, name: str) -> bool:
        """Tell whether a setting means this offer by ``name``: its entry-point name or its distribution's name."""
        return normalized(name) in (normalized(self.name), normalized(self.provider.name))


@dataclass
class Discovery:
    """The result of one scan of the installed distributions.

    ``distributions`` has those that offer something, opgraft itself aside. ``groups`` has for each group of entry
    points, whoever reads it, the distributions with that group. ``providers`` keeps the answers of ``provider_of``.
    """

    offers: list[Offer] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    distributions: dict[Provider, importlib_metadata.Distribution] = field(default_factory=dict)
    groups: dict[str, list[importlib_metadata.Distribution]] = field(default_factory=dict)
    providers: dict[str, Provider] = field(default_factory=dict)

    def of_group(self, group: str) -> list[Offer]:
        return [offer for offer in self.offers if offer.group == group]

    def provider_of(self, module: str) -> Provider:
        """Return the distribution of a module, which opgraft and plugins have; else the top-level package itself."""
        known = self.providers.get(module)
        if known is None:
            known = self.providers[module] = self._provider_of(module)
        return known

    def _provider_of(self, module: str) -> Provider:
        package = module.partition(".")[0]
        if package == HOST_DISTRIBUTION:
            return Provider(HOST_DISTRIBUTION, __version__)
        offers = [offer for offer in self.offers if offer.module.partition(".")[0] == package]
        above = [offer for offer in offers if f"{module}.".startswith(f"{offer.module}.")]
        owners = list(dict.fromkeys(offer.provider for offer in offers))
        if above:
            return max(above, key=lambda offer: len(offer.module)).provider
        if len(owners) > 1:  # of a namespace that they share
            owners = [
                each for each in owners if _lists(self.distributions.get(each), module)
            ] or owners
        if (
            not owners
        ):  # a distribution may have more top-level packages than those of its entry points
            owners = [each for each, found in self.distributions.items() if _has(found, module)]
        return owners[0] if owners else Provider(package)

    def has_plugin(self, provider: Provider) -> bool:
        """Return True if a distribution offers plugins, on whose activation what its modules declare depends."""
        return any(offer.provider == provider for offer in self.of_group(PLUGIN_GROUP))

    def platforms_of(self, provider: Provider) -> list[str]:
        """Return the names of the platforms that a distribution offers, those of opgraft itself aside."""
        offers = self.of_group(PLATFORM_GROUP)
        return [each.name for each in offers if each.provider == provider and not each.built_in]

    def plugin_of(self, module: str, provider: Provider) -> str | None:
        """Return the plugin of a module of ``provider``: the nearest entry point above it, or the only one.

        ``None`` where its distribution has several and no name decides.
        """
        offers = [offer for offer in self.of_group(PLUGIN_GROUP) if offer.provider == provider]
        above = [offer for offer in offers if f"{module}.".startswith(f"{offer.module}.")]
        if above:
            return max(above, key=lambda offer: len(offer.module)).name
        return offers[0].name if len(offers) == 1 else None


_DISCOVERY = StateValue[Discovery](lambda: scan())  # defined below


def discover() -> Discovery:
    """Return the installed platforms and plugins, scanned once per process."""
    state = host_state()
    with state.lock:
        return _DISCOVERY.of(state)


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


def names_of(plugin: str) -> tuple[str, list[str], list[str]]:
    """Return the distribution that a name means, with the names of the plugins and of the platforms that it offers.

    A built-in platform stands for itself alone.

    Raises:
        ConfigError: nothing that is installed answers to the name.
    """
    built_in = {offer.name for offer in discover().of_group(PLATFORM_GROUP) if offer.built_in}
    if plugin in built_in:
        return HOST_DISTRIBUTION, [], [plugin]
    offers = [offer for offer in discover().offers if not offer.built_in]
    meant = next((offer.provider for offer in offers if offer.answers_to(plugin)), None)
    if meant is None:
        known = (
            built_in | {offer.name for offer in offers} | {offer.provider.name for offer in offers}
        )
        raise ConfigError(
            f"no plugin or platform {plugin!r} is installed: {close_matches(plugin, known)}"
        )
    own = [offer for offer in offers if offer.provider == meant]
    plugins = [offer.name for offer in own if offer.group == PLUGIN_GROUP]
    return meant.name, plugins, [offer.name for offer in own if offer.group == PLATFORM_GROUP]


def scan() -> Discovery:
    """Read the entry points of every distribution that can be found.

    Of several distributions of one name, the first on ``sys.path`` counts; of several in one folder, the installed
    one. The platform of the simulated device is offered if the environment names one.
    """
    discovery = Discovery()
    seen: dict[str, Provider] = {}
    offered: list[Offer] = []
    own = _of_opgraft(discovery)
    outdated = _outdated([found for found, _ in own], discovery)
    for found, text in own:
        if found in outdated:
            continue
        try:
            offered = _read(found, text, discovery, seen, offered)
        except Exception as error:  # likewise
            discovery.problems.append(_malformed(found, error))
    for bridge in [offer for offer in offered if offer.group in BRIDGE_GROUPS]:
        bridged = discovery.groups.get(bridge.name, [])
        outdated = _outdated(bridged, discovery)
        for found in bridged:
            if found in outdated:
                continue
            try:
                offered += _bridged(found, bridge, discovery, seen)
            except Exception as error:  # likewise
                discovery.problems.append(_malformed(found, error))
    discovery.problems = list(dict.fromkeys(discovery.problems))
    if read_simulated():
        host = Provider(HOST_DISTRIBUTION, __version__)
        offered.append(Offer(PLATFORM_GROUP, "simulated", f"{_SIMULATED}:SPEC", host))
    known: dict[tuple[str, str], Offer] = {}
    for offer in sorted(offered, key=lambda offer: not offer.built_in):  # ours keep their names
        _admit(offer, known, discovery)
    for problem in discovery.problems:
        words = "plugin metadata of %s is ignored: %s"
        logger.warning(
            words, problem.provider, printable(problem.reason), extra=problem.provider.attributes()
        )
    return discovery


def _of_opgraft(discovery: Discovery) -> list[tuple[importlib_metadata.Distribution, str]]:
    """Return the distributions with entry points for opgraft, and the text of these.

    ``discovery`` is given the groups of all distributions, and the problems of reading them.
    """
    own: list[tuple[importlib_metadata.Distribution, str]] = []
    for found in distributions():
        if isinstance(found, Problem):
            discovery.problems.append(found)
            continue
        try:
            # Most distributions end here, before anything is parsed: start-up waits for this loop.
            text = text_of(found, "entry_points.txt") or ""
            for group in groups_in(text):
                discovery.groups.setdefault(group, []).append(found)
            if "opgraft." in text:
                own.append((found, text))
        except (
            Exception
        ) as error:  # of metadata that may be anything, and finders that are somebody's code
            discovery.problems.append(_malformed(found, error))
    return own


_Namesakes = dict[str, tuple[importlib_metadata.Distribution, Provider]]
"""By the folder of its metadata: a distribution, and what it is."""


def _outdated(
    several: Sequence[importlib_metadata.Distribution], discovery: Discovery
) -> list[importlib_metadata.Distribution]:
    """Return distributions beside the installed version of the same one, and list the problems.

    An upgrade that did not end leaves the metadata of the former version in its folder.
    """
    outdated = []
    for namesakes in _namesakes(several):
        rows = list(namesakes.values())
        chosen, why = installed([found for found, _ in rows])
        best, counting = rows[chosen]
        outdated += [found for found, _ in rows if found is not best]
        for place, (found, provider) in namesakes.items():
            if provider == counting:
                continue
            reason = (
                f"its metadata is left beside that of {counting} in one folder, which counts, as "
                f"{why}: remove {place}, or install the one that you want again"
            )
            discovery.problems.append(Problem(provider, reason, _version_line(found, place)))
    return outdated


def _namesakes(several: Sequence[importlib_metadata.Distribution]) -> list[_Namesakes]:
    """Return the distributions of one name in one folder, of every name with more than one."""
    places: dict[tuple[str, str], _Namesakes] = {}
    for found in several:
        with suppress(Exception):  # metadata that cannot be read is a problem of its own
            place, provider = place_of(found), _provider(fields_of(found))
            if place is None or _is_host(provider.name) or is_stray(found):
                continue
            key = (str(place.parent), normalized(provider.name))
            places.setdefault(key, {}).setdefault(str(place), (found, provider))
    return [namesakes for namesakes in places.values() if len(namesakes) > 1]


def _version_line(found: importlib_metadata.Distribution, place: str) -> str:
    """Return ``file:line`` of the version in a distribution's metadata."""
    name = "METADATA" if text_of(found, "METADATA") else "PKG-INFO"
    lines = (text_of(found, name) or "").splitlines()
    number = next(
        (count for count, line in enumerate(lines, 1) if line.lower().startswith("version:")), 1
    )
    return f"{os.path.join(place, name)}:{number}"


def _malformed(found: importlib_metadata.Distribution, error: Exception) -> Problem:
    """Describe a distribution whose metadata cannot be read, by its name where at least that can."""
    provider = Provider(str(place_of(found) or type(found).__qualname__))
    with suppress(Exception):
        provider = _provider(fields_of(found))
    place = f" ({place_of(found)})" if place_of(found) else ""
    return Problem(provider, f"its plugin metadata is malformed: {described(error)}{place}")


def _provider(fields: Mapping[str, list[str]]) -> Provider:
    return Provider(fields["name"][0], fields["version"][0])


def _read(
    found: importlib_metadata.Distribution,
    text: str,
    discovery: Discovery,
    seen: dict[str, Provider],
    offered: list[Offer],
) -> list[Offer]:
    """Return what is ``offered`` with a distribution that names opgraft among its entry points, the ``text``."""
    fields = fields_of(found)
    provider = _provider(fields)
    _check(text, _OWN)
    if _is_host(provider.name):
        own = _own_offers(found, discovery)
        is_installed = text_of(found, "METADATA") is not None  # an egg-info may be of another time
        return own + offered if is_installed else offered + own
    counts = _counts(found, provider, discovery, seen)
    return (
        offered + list(_offers(found, provider, fields.get("requires-dist", [])))
        if counts
        else offered
    )


def _bridged(
    found: importlib_metadata.Distribution,
    bridge: Offer,
    discovery: Discovery,
    seen: dict[str, Provider],
) -> list[Offer]:
    """Return what a distribution offers through a bridge: nothing where it offers something to opgraft itself.

    Neither does the host count to which the group belongs, whose name begins the group's.
    """
    text = text_of(found, "entry_points.txt") or ""
    fields = fields_of(found)
    provider = _provider(fields)
    if {PLATFORM_GROUP, PLUGIN_GROUP} & set(groups_in(text)) or normalized(
        provider.name
    ) == bridge.name.split(".")[0]:
        return []
    _check(text, (bridge.name,))
    if not _counts(found, provider, discovery, seen):
        return []
    checked = _checked(fields.get("requires-dist", []))
    points = [point for point in found.entry_points if point.group == bridge.name]
    group = BRIDGE_GROUPS[bridge.group]
    return [Offer(group, point.name, point.value, provider, checked, bridge) for point in points]


def _counts(
    found: importlib_metadata.Distribution,
    provider: Provider,
    discovery: Discovery,
    seen: dict[str, Provider],
) -> bool:
    """Return True if a distribution is the first of its name; a later one of another version is a problem."""
    if is_stray(found):
        raise ValueError(
            "a build left it in the working folder, and nothing has installed it: remove it"
        )
    first = seen.setdefault(normalized(provider.name), provider)
    if first != provider:
        reason = f"it is another installation of {first}, which comes first on sys.path: uninstall one of them"
        discovery.problems.append(Problem(provider, f"{reason} ({place_of(found)})"))
        return False
    return discovery.distributions.setdefault(provider, found) is found


def _check(text: str, groups: Collection[str]) -> None:
    """Reject entry points in ``groups`` that are none.

    Raises:
        ValueError: one is there.
    """
    rows = list(entry_point_rows(text))
    if len(rows) > _MOST:
        raise ValueError(f"it has more than {_MOST:,} entry points")
    for group, row in rows:
        name, _, value = (part.strip() for part in row.partition("="))
        module = value.partition(":")[0].partition(".")[0].strip()
        fits = _NAME.fullmatch(name) and _VALUE.fullmatch(value) and module != _NO_MODULE
        if group in groups and not fits:
            told = (
                "" if _NAME.fullmatch(name) or not name else f": the name {name!r} has {_FOREIGN}"
            )
            raise ValueError(f"{row!r} in {group}, expected 'name = package.module:object'{told}")


def is_editable(distribution: importlib_metadata.Distribution | None) -> bool:
    """Tell whether a distribution is an editable install: its source lies elsewhere, where no RECORD lists it."""
    return _editable_source(distribution) is not None


def _editable_source(distribution: importlib_metadata.Distribution | None) -> str | None:
    """Return the URL of the source of an editable install, ``None`` for any other distribution."""
    try:
        origin = json.loads((distribution and text_of(distribution, "direct_url.json")) or "{}")
        editable = origin.get("dir_info", {}).get("editable") is True
        return str(origin.get("url", "")) if editable else None
    except (ValueError, AttributeError, RecursionError):  # of another form than installers write
        return None


def _has(distribution: importlib_metadata.Distribution, module: str) -> bool:
    """Tell whether an imported module is of a distribution: in its RECORD, or in the source of an editable install."""
    if _lists(distribution, module):
        return True
    source = _editable_source(distribution)
    file = getattr(sys.modules.get(module), "__file__", None)
    if not source or not file:
        return False
    # As addresses: parsing one needs a module that start-up does without.
    return Path(file).resolve().as_uri().startswith(f"{source.rstrip('/')}/")


def _offers(
    distribution: importlib_metadata.Distribution, provider: Provider, requires: list[str]
) -> Iterator[Offer]:
    checked = _checked(requires)
    for point in distribution.entry_points:
        if point.group in _OWN:
            yield Offer(point.group, point.name, point.value, provider, checked)


def _checked(requires: list[str]) -> tuple[str, ...]:
    """Return the requirements on distributions whose versions are checked."""
    names = (
        normalized((re.match(r"\s*([\w.-]*\w)", line) or [""])[0].strip()) for line in requires
    )
    return tuple(line for name, line in zip(names, requires, strict=True) if name in CHECKED)


def _own_offers(distribution: importlib_metadata.Distribution, discovery: Discovery) -> list[Offer]:
    """Return what a distribution of opgraft's own name offers, as far as it is opgraft's.

    There may be several: beside the installed one an ``opgraft.egg-info`` of another time in the working folder, or an
    impostor. What any of them names counts if it is ours and there.
    """
    offers = list(_offers(distribution, Provider(HOST_DISTRIBUTION, __version__), []))
    foreign = [offer.value for offer in offers if not offer.built_in]
    if foreign:
        reason = f"it calls itself {HOST_DISTRIBUTION} and offers {', '.join(foreign)}, which is no part of opgraft"
        place = Provider(str(place_of(distribution) or type(distribution).__qualname__))
        discovery.problems.append(
            Problem(place, f"{reason}: uninstall it, or give it a name of its own")
        )
    return [offer for offer in offers if offer.built_in and _exists(offer.module)]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _is_host(name: str) -> bool:
    return normalized(name.strip()) == HOST_DISTRIBUTION


def _admit(offer: Offer, known: dict[tuple[str, str], Offer], discovery: Discovery) -> None:
    """Add an offer, or the reason why it is none."""
    if (offer.group, offer.name) == (PLUGIN_GROUP, NATIVE_CHOICE):
        reason = f"its entry point {offer.name!r} in {offer.group} could not be chosen by the setting providers"
        means = "where that name means an op's native definition: give it another name"
        discovery.problems.append(Problem(offer.provider, f"{reason}, {means}"))
        return
    owners = {
        normalized(name): name
        for name in (HOST_DISTRIBUTION, *(p.name for p in discovery.distributions))
    }
    namesake = owners.get(normalized(offer.name), offer.provider.name)
    if not offer.built_in and normalized(namesake) != normalized(offer.provider.name):
        reason = f"its entry point {offer.name!r} in {offer.group} has the name of the distribution {namesake}"
        means = "which a setting with that name means: give it another name, or uninstall one of the two"
        discovery.problems.append(Problem(offer.provider, f"{reason}, {means}"))
        return
    rival = known.setdefault((offer.group, offer.name), offer)
    if rival is offer:
        discovery.offers.append(offer)
    elif rival.provider == offer.provider and not offer.built_in:
        reason = (
            f"its entry point {offer.name!r} in {offer.group} is there twice: {rival.value} counts"
        )
        discovery.problems.append(Problem(offer.provider, reason))
    elif not (rival.built_in and offer.built_in):
        reason = f"its entry point {offer.name!r} in {offer.group} is already provided by {rival.provider}"
        discovery.problems.append(
            Problem(offer.provider, f"{reason}: uninstall one of the two distributions")
        )


@functools.lru_cache(maxsize=4096)  # each name is compared with many others
def normalized(name: str) -> str:
    """Return a distribution's name in the one spelling that all its spellings share."""
    return re.sub(r"[-_.]+", "-", name).lower()
