"""A folder that the caches of several machines share: what one has compiled the others take, if it is signed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import opgraft
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from opgraft import CompilationConfig
from opgraft.compilation.bundles import export_entries
from opgraft.compilation.cache import CompilationCache
from opgraft.compilation.shared_folder import SharedFolder, count_entries
from opgraft.errors import ConfigError, InputError
from torch import nn

SIGNING = bytes(range(32))
A, B = "a" * 40, "b" * 40


class Plain(nn.Module):
    """The smallest model that generates code."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * self.factor)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_bytes(SIGNING)
    file.chmod(0o600)
    return file


@pytest.fixture(params=["file://{}/shared", "{}/shared", "memory://opgraft-shared"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "shared").mkdir()
    yield request.param.format(tmp_path)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def machine(tmp_path: Path, key: Path) -> Callable[..., opgraft.Compiled]:
    """Compile a model with a cache that nobody else has."""

    def compiled(name: str, url: str, **settings: Any) -> opgraft.Compiled:
        given: dict[str, Any] = {"cache_remote": url, "cache_key": str(key), **settings}
        config = CompilationConfig(level=2, cache=True, cache_folder=str(tmp_path / name), **given)
        found = opgraft.compile(Plain().eval(), config, args=(torch.randn(3, 4),))
        assert isinstance(found, opgraft.Compiled)
        torch.testing.assert_close(found(torch.ones(2, 4)), torch.full((2, 4), 2.0))
        return found

    return compiled


@pytest.fixture
def full(tmp_path: Path) -> CompilationCache:
    """A cache of two entries."""
    cache = CompilationCache(tmp_path / "full", 1 << 20)
    for name in (A, B):
        with cache.locked(name), cache.written(name) as (folder, _):
            (folder / "code.pt2").write_bytes(name.encode() * 1000)
    return cache


@pytest.fixture
def empty(tmp_path: Path) -> CompilationCache:
    return CompilationCache(tmp_path / "empty", 1 << 20)


def names(url: str) -> list[str]:
    system, path = fsspec.url_to_fs(url)
    return sorted(name.rpartition("/")[2] for name in system.ls(path, detail=False))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.*")  # torch's own, where inductor starts
def test_what_one_machine_compiles_others_take(
    machine: Callable[..., opgraft.Compiled], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model and its code are put there when they are made, and loaded where a cache has not got them."""
    url = f"file://{tmp_path}/shared"
    (tmp_path / "shared").mkdir()
    assert machine("first", url).decision.reason.startswith("one graph")
    assert count_entries(url) == len(names(url)) == 2
    for _ in range(2):
        assert machine("second", url).decision.reason.startswith(
            "taken from the cache of compiled code"
        )
    assert "share" not in caplog.text


def test_entries_travel(url: str, full: CompilationCache, empty: CompilationCache) -> None:
    """An entry comes as it was, once, and one that nobody has shared does not."""
    SharedFolder(f"{url}/", SIGNING).share(full, [A])
    assert (names(url), count_entries(url)) == ([f"{A}.bundle"], 1)
    for name in (A, A, B):
        SharedFolder(url, SIGNING).fetch(empty, name)
    assert empty.keys == [A]
    entry = empty.read(A)
    assert entry is not None
    assert (entry[0] / "code.pt2").read_bytes() == A.encode() * 1000


@pytest.mark.parametrize(
    ("key", "only", "message"),
    [
        (None, A, "is not signed"),
        (SIGNING[::-1], A, "was not signed with this key"),
        (SIGNING, B, f"has other entries than {A}"),
    ],
)
def test_what_is_not_meant_is_refused(
    key: bytes | None,
    only: str,
    message: str,
    url: str,
    full: CompilationCache,
    empty: CompilationCache,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What nobody has signed, or another key, or an entry under the name of another; and it is replaced."""
    folder = SharedFolder(url, SIGNING)
    export_entries(full, f"{url}/{A}.bundle", key, only={only})
    folder.fetch(empty, A)
    assert not empty.keys
    assert message in caplog.text
    folder.share(full, [A])
    folder.fetch(empty, A)
    assert empty.keys == [A]


def test_a_folder_that_fails_is_told_once(
    full: CompilationCache,
    empty: CompilationCache,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that is no folder, or has no file system, raises nothing, and is let be afterwards."""
    (tmp_path / "file").write_text("")
    for url in (f"{tmp_path}/file", f"file://{tmp_path}/none", "nonsense://there/folder"):
        folder = SharedFolder(url, SIGNING)
        caplog.clear()
        for _ in range(2):
            folder.share(full, [A, B])
            folder.fetch(empty, A)
        (record,) = caplog.records
        assert "caches share: InputError: the bundle " in record.message


def test_a_key_is_needed(machine: Callable[..., opgraft.Compiled], tmp_path: Path) -> None:
    """What is in the folder is code: without a key, or with one that others may read, nothing is compiled."""
    with pytest.raises(
        ConfigError, match="cache_key is not: what is there is code, which is taken only if it is"
    ):
        machine("first", str(tmp_path), cache_key=None)
    (tmp_path / "open").write_bytes(SIGNING)
    (tmp_path / "open").chmod(0o644)
    with pytest.raises(
        ConfigError, match=r"cache_key cannot be used: InputError: the key .* others may read"
    ):
        machine("first", str(tmp_path), cache_key=str(tmp_path / "open"))


def test_a_bundle_is_replaced_at_once(url: str, full: CompilationCache) -> None:
    """An export that is interrupted leaves the bundle that was there, whole, and nothing beside it."""
    file = f"{url}/bundle"
    export_entries(full, file, SIGNING)
    before = fsspec.open(file).open().read()

    def halfway(source: Any, target: Any) -> None:
        target.write(source.read(1000))
        raise OSError("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opgraft.compilation.bundles._copied", halfway)
        with pytest.raises(InputError, match="bundle cannot be written: OSError: planted"):
            export_entries(full, file)
    assert fsspec.open(file).open().read() == before
    assert names(url) == ["bundle"]


def test_the_command_line_tells_of_it(cli: Any, tmp_path: Path) -> None:
    """`opgraft cache info` counts what is in the folder, or says why it cannot."""
    (tmp_path / "shared").mkdir()
    told = cli("cache", "info", "--json", "--compilation_config.cache_remote", f"{tmp_path}/shared")
    assert json.loads(told.stdout)["shared"] == {
        "folder": f"{tmp_path}/shared",
        "entries": 0,
        "problem": None,
    }
    told = cli("cache", "info", "--compilation_config.cache_remote", "nonsense://there")
    assert "shared: the folder nonsense://there cannot be read: ValueError: " in told.stdout
