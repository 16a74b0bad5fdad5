"""The machine as a probe may look at it.

A probe is a pure function ``probe(machine) -> Evidence``. It imports no torch, creates no device context and never
raises; it looks at the files below ``machine.root``, at ``machine.environ`` and at installed packages only, so that a
folder of recorded files stands for any machine.
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

_LARGEST_FILE = 1 << 20  # bytes; the files of /proc and /sys that probes read are far smaller
_SHORTEST_SECRET = 3  # characters
_SHORTEST_VALUE = 6  # of variables whose names speak of no secret
_SECRET = re.compile(r"(?i)secret|token|passw|credential|_key")
RECORD = "machine.json"
"""The file of a recorded machine that holds what is not in its tree: environment, packages, denied paths."""


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch, read from its ``version.py`` without importing it.

    ``backends`` maps the names that the file gives a version for, such as ``cuda``, to that version.
    """

    version: str
    backends: Mapping[str, str]


@dataclass(frozen=True)
class Machine:
    """A machine as probes see it; without arguments, the one that this process runs on.

    Attributes:
        root: the folder that has /proc, /sys and /dev below it.
        environ: the environment variables.
        packages: distribution name → version; ``None`` means those installed in this Python.
        torch: the installed torch; ``None`` with ``packages`` given means none is installed.
        denied: paths that exist and may not be opened, where the tree cannot say so itself.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    packages: Mapping[str, str] | None = None
    torch: TorchBuild | None = None
    denied: frozenset[str] = frozenset()
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """A store in which probes keep what several of them read, such as the list of PCI functions."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))  # Machine("/folder") is a common slip

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
        """Undo ``to_dict``, for the tree below ``root``.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: the data is of another form.
        """
        build = data.get("torch")
        return cls(
            root,
            environ=_texts(data["environ"]),
            packages=None if data["packages"] is None else _texts(data["packages"]),
            torch=TorchBuild(str(build["version"]), _texts(build["backends"])) if build else None,
            denied=frozenset(data.get("denied", ())),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what is not in the tree, as plain data for a child process."""
        build = self.torch
        return {
            "environ": self.variables(),
            "packages": None if self.packages is None else dict(self.packages),
            "torch": {"version": build.version, "backends": dict(build.backends)}
            if build
            else None,
            "denied": sorted(self.denied),
        }

    def path(self, path: str) -> Path:
        """Return the place of an absolute path such as ``/proc/cpuinfo`` below the root."""
        return self.root / path.lstrip("/")

    def _place(self, path: str) -> str:
        """Return ``path`` as a string: a probe asks for hundreds of files, and a Path costs as much as reading one."""
        return os.path.join(self.root, path.lstrip("/"))

    def _inside(self, path: str) -> str:
        """Return the place of a path that will be followed.

        Raises:
            ValueError: a symbolic link leads out of the tree, which somebody else may have made. What lies outside is
                none of theirs.
        """
        place = self._place(path)
        if self._real_root is not None and self._leads_out(place):
            raise ValueError(f"{path} leads out of {self.root}")
        return place

    def _leads_out(self, place: str) -> bool:
        """Tell whether a link on the way to a place ends outside of the tree. Ask for each part once: it is slow."""
        outside = self._outside.get(place)
        if outside is None:
            folder, _, name = place.rpartition("/")
            outside = bool(folder) and self._leads_out(folder)
            if not outside and (name == ".." or os.path.islink(place)):
                outside = (
                    os.path.commonpath((os.path.realpath(place), self._real_root or os.sep))
                    != self._real_root
                )
            self._outside[place] = outside
        return outside

    @functools.cached_property
    def _outside(self) -> dict[str, bool]:
        """Answers of ``_leads_out`` by place; what lies above the root does not count."""
        return {str(place): False for place in (self.root, *self.root.parents)}

    def _beside(self, path: str) -> str:
        """Return the place of a path whose last part is looked at without being followed. Raises as ``_inside``."""
        folder, name = os.path.split(path.rstrip("/"))
        return os.path.join(self._inside(folder), name)

    @functools.cached_property
    def _real_root(self) -> str | None:
        """The root without symbolic links, ``None`` where it is that of the whole file system."""
        real = os.path.realpath(self.root)
        return real if real != os.sep else None

    def read(self, path: str) -> str | None:
        """Read the text of a file, at most 1 MiB of it, or ``None`` where it cannot be read."""
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
        """List the sorted names in a folder; none where it cannot be listed."""
        try:
            return sorted(os.listdir(self._inside(folder)))
        except (OSError, ValueError):
            return []

    def unlisted(self, folder: str) -> str | None:
        """Return the reason if a folder cannot be listed, else ``None``; ``names`` is empty then too."""
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
        """Return the last part of a symbolic link's target, such as the name of a driver, or ``None``."""
        try:
            return os.path.basename(os.readlink(self._beside(path)))
        except (OSError, ValueError):
            return None

    def exists(self, path: str) -> bool:
        """Tell whether there is something at a path."""
        try:
            return os.path.lexists(self._beside(path))
        except ValueError:
            return False

    def may_open(self, path: str) -> bool:
        """Tell whether this user may read and write a device node."""
        try:
            return path not in self.denied and os.access(self._inside(path), os.R_OK | os.W_OK)
        except ValueError:
            return False

    def version_of(self, package: str) -> str | None:
        """Return the version of an installed distribution, or ``None``."""
        return self.packages.get(package) if self.packages is not None else version_of(package)

    def variables(self) -> dict[str, str]:
        """Return the environment variables that a child process is told: all but those whose names speak of secrets."""
        return without_secrets(self.environ)

    def torch_build(self) -> TorchBuild | None:
        """Return the installed torch, or ``None`` where there is none."""
        return self.torch if self.packages is not None else _installed_torch()


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose names do not speak of secrets."""
    return {name: value for name, value in environ.items() if not _SECRET.search(name)}


def masked(data: Any, variables: Mapping[str, str]) -> Any:
    """Return plain data in whose texts the values of variables stand as ``$NAME``, as in ``"to $DATABASE_URL"``.

    Paths that exist stay. So do values of less than 3 characters and, where the name speaks of no secret, words of
    less than 6 and parts of longer words.
    """
    values: dict[str, str] = {}
    patterns: dict[str, str] = {}
    # Which count where values are equal.
    for name in sorted(variables, key=lambda name: bool(_SECRET.search(name))):
        value, secret = variables[name], _SECRET.search(name)
        if len(value) < (_SHORTEST_SECRET if secret else _SHORTEST_VALUE):
            continue
        if not (value.startswith("/") and os.path.lexists(value)):
            values[value] = f"${name}"
            patterns[value] = re.escape(value) if secret else rf"(?<!\w){re.escape(value)}(?!\w)"
    if not values:
        return data
    pattern = re.compile(
        "|".join(patterns[value] for value in sorted(values, key=len, reverse=True))
    )
    return mapped(data, lambda text: pattern.sub(lambda found: values[found[0]], text))


def mapped(data: Any, change: Callable[[str], str]) -> Any:
    """Return plain data with each of its texts changed, keys of mappings aside."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, dict):
        return {name: mapped(value, change) for name, value in data.items()}
    return [mapped(value, change) for value in data] if isinstance(data, list) else data


def _texts(value: Any) -> dict[str, str]:
    """Return a JSON object that maps names to strings, as environments and versions are."""
    if not isinstance(value, dict) or not all(
        isinstance(text, str) and "\0" not in text for text in value.values()
    ):
        raise ValueError(f"{value!r:.80} does not map names to strings")
    if any("=" in name or "\0" in name for name in value):
        raise ValueError("a name has '=' in it")
    return value


def _chunks(handle: int) -> Iterator[bytes]:
    """Yield the content of an open file in pieces, up to ``_LARGEST_FILE``; most files of /sys are one short piece."""
    left = _LARGEST_FILE
    while left > 0 and (chunk := os.read(handle, min(left, 1 << 14))):
        left -= len(chunk)
        yield chunk


UNREAD = "of an unknown version"
"""The version of an installed torch whose ``version.py`` could not be read."""


@functools.lru_cache(maxsize=1)
def _installed_torch() -> TorchBuild | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return TorchBuild(UNREAD, {})
    values = dict(re.findall(r"^(\w+)(?:\s*:[^=\n]+)?\s*=\s*'([^'\n]*)'", text, re.MULTILINE))
    version = values.pop("__version__", "unknown")
    values.pop("git_version", None)
    return TorchBuild(version, values)
