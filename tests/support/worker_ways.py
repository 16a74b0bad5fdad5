"""Ways in which a worker decides otherwise than the process that started it, tried in turn by a program in a worker.

The program has a copy of this file beside it, and the distributions of the test in the first folder of its path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import opgraft
from opgraft.binding.pluggable_class import choose_class
from opgraft.distributed import Communicator
from opgraft.ops import RMSNorm

FOLDER = Path(__file__).parent


def answers() -> dict[str, str]:
    """What the worker answers, by way: its kernel and class, or the error with which it stops."""
    return {name: _answer(way) for name, way in WAYS.items()}


def _answer(way: Callable[[], AbstractContextManager[None]]) -> str:
    with way():
        opgraft.reset()
        try:
            return f"{RMSNorm(4).binding.kernel.winner} {choose_class(Communicator).cls.__name__}"
        except opgraft.OpgraftError as error:
            return f"{type(error).__name__}: {error}"


@contextmanager
def variables(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def written(path: Path, change: Callable[[str], str]) -> Iterator[None]:
    """Change a file, or write one that was not there."""
    before = path.read_text() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(change(before or ""))
    try:
        yield
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)


@contextmanager
def another_order() -> Iterator[None]:
    """Let the second of two plugins come first, by the name of its folder of metadata."""
    place = _site() / "brix-1.0.dist-info"
    moved = place.rename(_site() / "aaa-1.0.dist-info")
    try:
        yield
    finally:
        moved.rename(place)


def _site() -> Path:
    return Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0])


def _metadata(
    distribution: str, file: str, change: Callable[[str], str]
) -> AbstractContextManager[None]:
    return written(_site() / f"{distribution}.dist-info" / file, change)


def _quarantine() -> AbstractContextManager[None]:
    place = Path(os.environ["XDG_STATE_HOME"]) / "opgraft/quarantine/acme.json"
    return written(place, lambda _: (FOLDER / "quarantine.json").read_text())


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "alike": variables,
    "selection": partial(variables, OPGRAFT_CUSTOM_OPS="-rms_norm"),
    "plugins": partial(variables, OPGRAFT_PLUGINS=""),
    "variable": partial(variables, OPGRAFT_PROVIDERS="rms_norm=acme"),
    "lockfile": partial(variables, OPGRAFT_LOCKFILE=str(FOLDER / "all.lock")),
    "kernel of a file of settings": partial(variables, OPGRAFT_CONFIG=str(FOLDER / "ops.toml")),
    "class of a file of settings": partial(variables, OPGRAFT_CONFIG=str(FOLDER / "classes.toml")),
    "version of a plugin": lambda: _metadata(
        "acme-1.0", "METADATA", lambda text: text.replace("1.0", "1.1")
    ),
    "files of a plugin": lambda: _metadata(
        "acme-1.0", "RECORD", lambda text: f"{text}acme_more.py,sha256=x,1\n"
    ),
    "version of torch": lambda: _metadata(
        "torch-99.0", "METADATA", lambda _: "Name: torch\nVersion: 99.0\n"
    ),
    "order of plugins": another_order,
    "quarantine": _quarantine,
    "platform": partial(
        variables, OPGRAFT_PLATFORM="simulated", OPGRAFT_SIMULATED_DEVICE="default"
    ),
}
