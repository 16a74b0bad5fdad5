"""``Machine``: everything that a probe may look at.

A probe is a pure function ``probe(machine) -> Evidence``. A probe imports no torch, creates no
device context and never raises. It looks only at files below ``machine.root``, at
``machine.environ`` and at installed packages. So a folder of recorded files stands for any machine.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opgraft.base.installed import version_of
from opgraft.errors import InputError

_LARGEST_FILE = 1 << 20
"""Bytes of a file that are read. The files of probes in /proc and /sys are far smaller."""

_SHORTEST_SECRET = 3
"""Characters of a secret that is masked."""

_SHORTEST_VALUE = 6
"""Characters of any other value that is masked. Shorter values are common words."""

_SECRET = re.compile(r"(?i)secret|token|passw|credential|_key")
RECORD = "machine.json"
"""The file of a recorded machine with environment, packages and denied paths."""


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch, as the text of its module ``version`` tells. Torch is not imported.

    Attributes:
        version: such as ``2.9.0+cu128``.
        backends: versions of the libraries below torch, such as ``{"cuda": "12.8"}``.
    """

    version: str
    backends: Mapping[str, str]


@dataclass(frozen=True)
class Machine:
    """A machine as probes see it. Without arguments, this machine.

    Attributes:
        root: the folder above /proc, /sys and /dev.
        environ: the environment variables.
        packages: distribution name → version. ``None`` means the packages of this Python.
        torch: the installed torch. With ``packages``, ``None`` means that torch is not installed.
        denied: existing paths without permission to open. A recorded tree cannot show those.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    packages: Mapping[str, str] | None = None
    torch: TorchBuild | None = None
    denied: frozenset[str] = frozenset()
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Findings that several probes share, such as the list of PCI functions."""

    def __post_init__(self) -> None:
        # Machine("/folder") is a common slip.
        object.__setattr__(self, "root", Path(self.root))

    @classmethod
    def recorded(cls, root: Path) -> Machine:
        """Open a machine from a folder that ``opgraft detect --record`` wrote.

        Raises:
            InputError: the folder or its ``machine.json`` is missing or damaged.
        """
        try:
            text = cls(root, environ={}).read(f"/{RECORD}")
            if text is None:
                raise ValueError("it cannot be read")
            data = json.loads(text)
            return cls.from_dict(root, {**data, "packages": _texts(data["packages"])})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{root} is no recorded machine: {RECORD} cannot be used ({error!r})"
            ) from error

    @classmethod
    def from_dict(cls, root: Path, data: Mapping[str, Any]) -> Machine:
        """Return a machine from the data of ``to_dict`` and the tree below ``root``.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: the data is of another form.
        """
        environ = _texts(data["environ"])
        packages = data["packages"]
        build = data.get("torch")
        torch = None
        if build:
            torch = TorchBuild(str(build["version"]), _texts(build["backends"]))
        return cls(
            root,
            environ=environ,
            packages=None if packages is None else _texts(packages),
            torch=torch,
            denied=frozenset(data.get("denied", ())),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything beside the tree, as plain data for a child process."""
        return {
            "environ": self.variables(),
            "packages": None if self.packages is None else dict(self.packages),
            "torch": torch_data(self.torch),
            "denied": sorted(self.denied),
        }

    def path(self, path: str) -> Path:
        """Return the place of an absolute path such as ``/proc/cpuinfo`` below the root."""
        return self.root / path.lstrip("/")

    def _place(self, path: str) -> str:
        """Return ``path`` below the root as a string."""
        # A probe reads hundreds of files. To make a Path takes as long as to read a file.
        return os.path.join(self.root, path.lstrip("/"))

    def _inside(self, path: str) -> str:
        """Return the place of a path whose links are followed.

        Raises:
            ValueError: a symbolic link leads out of the tree. Someone else may have made the tree,
                and must not choose a file of this machine.
        """
        place = self._place(path)
        if self._real_root is not None and self._leads_out(place):
            raise ValueError(f"{path} leads out of {self.root}")
        return place

    def _leads_out(self, place: str) -> bool:
        """Return True if a link on the way to a place ends outside of the tree."""
        # Looks at links are slow, so each part of a path is looked at once.
        outside = self._outside.get(place)
        if outside is None:
            folder, _, name = place.rpartition("/")
            # A link in a folder decides for everything below the folder.
            outside = bool(folder) and self._leads_out(folder)
            if not outside and (name == ".." or os.path.islink(place)):
                outside = self._ends_outside(place)
            self._outside[place] = outside
        return outside

    def _ends_outside(self, place: str) -> bool:
        root = self._real_root or os.sep
        common = os.path.commonpath((os.path.realpath(place), root))
        return common != self._real_root

    @functools.cached_property
    def _outside(self) -> dict[str, bool]:
        """Answers of ``_leads_out`` by place. Links above the root do not count."""
        return {str(place): False for place in (self.root, *self.root.parents)}

    def _beside(self, path: str) -> str:
        """Return the place of a path. A link in the last part is not followed.

        Raises:
            ValueError: as ``_inside``.
        """
        folder, name = os.path.split(path.rstrip("/"))
        return os.path.join(self._inside(folder), name)

    @functools.cached_property
    def _real_root(self) -> str | None:
        """The root without symbolic links, or ``None`` for ``/``."""
        real = os.path.realpath(self.root)
        return real if real != os.sep else None

    def read(self, path: str) -> str | None:
        """Return the first 1 MiB of a text file, or ``None`` if the file cannot be read."""
        try:
            # A pipe must not block the probe.
            handle = os.open(self._inside(path), os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, ValueError):
            return None
        try:
            return b"".join(_chunks(handle)).decode("utf-8", errors="replace")
        except OSError:
            return None
        finally:
            os.close(handle)

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder. The list is empty if the folder cannot be read."""
        try:
            return sorted(os.listdir(self._inside(folder)))
        except (OSError, ValueError):
            return []

    def unlisted(self, folder: str) -> str | None:
        """Return the reason if a folder cannot be listed, else ``None``."""
        try:
            os.listdir(self._inside(folder))
        except FileNotFoundError:
            return "it does not exist"
        except OSError as error:
            return error.strerror or str(error)
        except ValueError as error:
            return str(error)
        return None

    def link(self, path: str) -> str | None:
        """Return the last part of a link's target, such as the name of a driver, or ``None``."""
        try:
            return os.path.basename(os.readlink(self._beside(path)))
        except (OSError, ValueError):
            return None

    def exists(self, path: str) -> bool:
        """Return True if a path exists. The target of a link may be missing."""
        try:
            return os.path.lexists(self._beside(path))
        except ValueError:
            return False

    def may_open(self, path: str) -> bool:
        """Return True if this user may read and write a device node."""
        if path in self.denied:
            return False
        try:
            return os.access(self._inside(path), os.R_OK | os.W_OK)
        except ValueError:
            return False

    def version_of(self, package: str) -> str | None:
        """Return the version of an installed distribution, or ``None``."""
        if self.packages is None:
            return version_of(package)
        return self.packages.get(package)

    def variables(self) -> dict[str, str]:
        """Return the environment variables for a child process, without secrets."""
        return without_secrets(self.environ)

    def torch_build(self) -> TorchBuild | None:
        """Return the installed torch, or ``None``."""
        return _installed_torch() if self.packages is None else self.torch


def torch_data(build: TorchBuild | None) -> dict[str, Any] | None:
    """Return a torch build as plain data."""
    if build is None:
        return None
    return {"version": build.version, "backends": dict(build.backends)}


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without secrets. The name of a secret has a word such as ``token``."""
    return {name: value for name, value in environ.items() if not _SECRET.search(name)}


def masked(data: Any, variables: Mapping[str, str]) -> Any:
    """Return plain data with ``$NAME`` in place of the values of variables.

    Existing paths stay. Values of less than 3 characters stay. If a name speaks of no secret,
    values of less than 6 characters and parts of longer words stay too.

    Example: with ``{"DATABASE_URL": "db://host"}``, ``"to db://host"`` becomes
    ``"to $DATABASE_URL"``.
    """
    values: dict[str, str] = {}
    patterns: dict[str, str] = {}
    # Secrets come last: of two variables with one value, the secret gives the name and the pattern.
    for name in sorted(variables, key=_speaks_of_secret):
        value = variables[name]
        is_secret = _speaks_of_secret(name)
        shortest = _SHORTEST_SECRET if is_secret else _SHORTEST_VALUE
        is_path = value.startswith("/") and os.path.lexists(value)
        if len(value) < shortest or is_path:
            continue
        literal = re.escape(value)
        values[value] = f"${name}"
        patterns[value] = literal if is_secret else rf"(?<!\w){literal}(?!\w)"
    if not values:
        return data
    # The longest value first, because another value may be a part of it.
    longest_first = sorted(values, key=len, reverse=True)
    pattern = re.compile("|".join(patterns[value] for value in longest_first))
    return mapped(data, lambda text: pattern.sub(lambda found: values[found[0]], text))


def _speaks_of_secret(name: str) -> bool:
    return _SECRET.search(name) is not None


def mapped(data: Any, change: Callable[[str], str]) -> Any:
    """Return plain data with each text changed. Keys of mappings stay."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, dict):
        return {name: mapped(value, change) for name, value in data.items()}
    if isinstance(data, list):
        return [mapped(value, change) for value in data]
    return data


def _texts(value: Any) -> dict[str, str]:
    """Return a JSON object that maps names to strings, such as an environment.

    Raises:
        ValueError: the object is another one, or no environment can hold a name or string.
    """
    is_object = isinstance(value, dict)
    if not is_object or not all(_is_plain_text(text) for text in value.values()):
        raise ValueError(f"{value!r:.80} does not map names to strings")
    if any("=" in name or "\0" in name for name in value):
        raise ValueError("a name has '=' in it")
    return dict(value)


def _is_plain_text(text: Any) -> bool:
    # No environment variable holds a zero byte.
    return isinstance(text, str) and "\0" not in text


def _chunks(handle: int) -> Iterator[bytes]:
    """Yield the content of an open file in pieces, up to ``_LARGEST_FILE`` bytes."""
    left = _LARGEST_FILE
    while left > 0:
        # Most files of /sys are one short piece.
        chunk = os.read(handle, min(left, 1 << 14))
        if not chunk:
            return
        left -= len(chunk)
        yield chunk


UNREAD = "of an unknown version"
"""The version of an installed torch without a readable ``version.py``."""


@functools.lru_cache(maxsize=1)
def _installed_torch() -> TorchBuild | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "version.py"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return TorchBuild(UNREAD, {})
    assignment = r"^(\w+)(?:\s*:[^=\n]+)?\s*=\s*'([^'\n]*)'"
    values = dict(re.findall(assignment, text, re.MULTILINE))
    version = values.pop("__version__", "unknown")
    # The rest are backends, such as cuda, but for the commit.
    values.pop("git_version", None)
    return TorchBuild(version, values)
