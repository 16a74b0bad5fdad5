"""Bundles of compiled code: what one machine has compiled, another one of its kind loads, and nobody else's."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.compilation import bundles
from opgraft.compilation.bundles import export_entries, import_entries, read_key
from opgraft.compilation.cache import CompilationCache
from opgraft.compilation.key import digest
from opgraft.compilation.packages import nodes_of
from opgraft.errors import CacheEntryError, InputError
from torch import Tensor, nn

KEYS = [digest(number) for number in range(3)]
SIGNING = bytes(range(32))


@pytest.fixture
def full(tmp_path: Path) -> CompilationCache:
    """A cache of three entries."""
    cache = CompilationCache(tmp_path / "full", 1 << 20)
    for key in KEYS:
        with cache.locked(key), cache.written(key) as (folder, description):
            (folder / "code.pt2").write_bytes(key.encode() * 100)
            description["of"] = key
    return cache


@pytest.fixture
def empty(tmp_path: Path) -> CompilationCache:
    return CompilationCache(tmp_path / "empty", 1 << 20)


def content(cache: CompilationCache) -> dict[str, tuple[bytes, Any]]:
    found = {}
    for key in cache.keys:
        entry = cache.read(key)
        assert entry is not None
        found[key] = ((entry[0] / "code.pt2").read_bytes(), entry[1])
    return found


@pytest.mark.parametrize("url", ["{}", "file://{}"])
def test_entries_travel(
    url: str, full: CompilationCache, empty: CompilationCache, tmp_path: Path
) -> None:
    """By path or URL, by digest or signature; an entry that is there stays as it is."""
    file = url.format(tmp_path / "bundle")
    written = export_entries(full, file)
    assert (written.entries, written.signed) == (3, False)
    assert written.sha256 == hashlib.sha256((tmp_path / "bundle").read_bytes()).hexdigest()
    assert written.nbytes == (tmp_path / "bundle").stat().st_size
    assert import_entries(empty, file, sha256=written.sha256.upper()).taken == 3
    assert content(empty) == content(full)
    empty.discard(KEYS[1])
    signed = export_entries(full, file, SIGNING)
    assert signed.signed
    taken = import_entries(empty, file, key=SIGNING)
    assert (taken.entries, taken.taken, taken.signed, taken.sha256) == (3, 1, True, signed.sha256)
    assert content(empty) == content(full)


def test_damaged_entries_are_left_behind(
    full: CompilationCache, empty: CompilationCache, tmp_path: Path
) -> None:
    """And damaged ones are replaced."""
    file = str(tmp_path / "bundle")
    (full.folder / KEYS[0] / "code.pt2").write_bytes(b"")
    assert export_entries(full, file, SIGNING).entries == 2
    import_entries(empty, file, key=SIGNING)
    (empty.folder / KEYS[1] / "code.pt2").write_bytes(b"")
    with pytest.raises(CacheEntryError):
        empty.read(KEYS[1])
    assert import_entries(empty, file, key=SIGNING).taken == 1
    assert set(content(empty)) == set(KEYS[1:])


def cut(content: bytes) -> bytes:
    return content[:-40]


def changed(content: bytes) -> bytes:
    return content.replace(KEYS[0].encode() * 100, KEYS[1].encode() * 100)


@pytest.mark.parametrize(
    ("change", "trust", "message"),
    [
        (cut, {"key": SIGNING}, "not signed with this key, or has changed"),
        (changed, {"key": SIGNING}, "not signed with this key, or has changed"),
        (None, {"key": SIGNING[::-1]}, "not signed with this key"),
        (None, {"sha256": "0" * 64}, "expected 0{64}: it is damaged or another one"),
        (None, {}, r"--sha256, or the key that it is signed with by --key"),
        (lambda content: b"PK" + content, {"key": SIGNING}, "is no bundle of compiled code"),
        (lambda content: content[:20], {"key": SIGNING}, "is no bundle of compiled code"),
        (
            lambda content: content[:17] + b"0" * 64 + content[81:],
            {"key": SIGNING},
            "is not signed",
        ),
    ],
)
def test_what_is_not_meant_is_refused(
    change: Callable[[bytes], bytes] | None,
    trust: dict[str, Any],
    message: str,
    full: CompilationCache,
    empty: CompilationCache,
    tmp_path: Path,
) -> None:
    """Nothing of it is looked at."""
    file = tmp_path / "bundle"
    export_entries(full, str(file), SIGNING)
    if change:
        before = file.read_bytes()
        file.write_bytes(change(before))
        assert file.read_bytes() != before
    with pytest.raises(InputError, match=message):
        import_entries(empty, str(file), **trust)
    assert not empty.keys


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("../evil", b"", "no file of an entry"),
        (f"{KEYS[0]}/../../evil", b"", "no file of an entry"),
        (f"{KEYS[0]}/.hidden", b"", "no file of an entry"),
        (f"{KEYS[0]}/\x1b[31m", b"", r"no file of an entry"),
        (f"{KEYS[0]}/code.pt2", b"", "entry.json"),
        (f"{KEYS[0]}/entry.json", b"no JSON", "is damaged"),
        (f"{KEYS[0]}/large", bytes(1 << 21), "cache_bytes"),
        ("bundle.json", bytes(1 << 21), r"bundle.json|cache_bytes"),
    ],
)
def test_archives_of_others(
    name: str, written: bytes, message: str, empty: CompilationCache, tmp_path: Path
) -> None:
    """What is signed may still be no bundle: no file is written outside of an entry, and no half an entry stays."""
    file = tmp_path / "bundle"
    with file.open("wb") as target:
        target.write(b"opgraft bundle 1 " + b"0" * 64 + b"\n")
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            if name != "bundle.json":
                archive.writestr("bundle.json", json.dumps({"environment": bundles.environment()}))
            archive.writestr(name, written)
    with pytest.raises(InputError, match=message) as raised:
        import_entries(empty, str(file), sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    assert "\x1b" not in str(raised.value)
    assert not empty.keys
    assert not list(tmp_path.glob("**/evil"))


def test_another_environment_is_named(
    full: CompilationCache, empty: CompilationCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What differs is told, with what is there and here."""
    file = str(tmp_path / "bundle")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.8.0+there")
        export_entries(full, file, SIGNING)
    with pytest.raises(
        InputError, match=rf"torch: 2\.8\.0\+there \w+ there, {re.escape(torch.__version__)} "
    ):
        import_entries(empty, file, key=SIGNING)
    assert not empty.keys


def test_what_is_missing_or_too_large(
    full: CompilationCache, empty: CompilationCache, tmp_path: Path
) -> None:
    """A cache without entries, files that cannot be read or written, addresses of no file system, too small a cache."""
    file = str(tmp_path / "bundle")
    with pytest.raises(InputError, match="has no entry to export: compile a model"):
        export_entries(empty, file)
    for name in (str(tmp_path / "none" / "bundle"), "nonsense://bucket/bundle"):
        with pytest.raises(InputError, match=r"bundle cannot be (read|written): "):
            import_entries(empty, name, key=SIGNING)
    with pytest.raises(InputError, match="bundle cannot be written: "):
        export_entries(full, f"{tmp_path}/full/{KEYS[0]}/code.pt2/bundle")
    export_entries(full, file, SIGNING)
    empty.limit = 10_000
    with pytest.raises(InputError, match="larger than the cache may be, 10000 bytes: raise"):
        import_entries(empty, file, key=SIGNING)


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"short", 0o600, "has 5 bytes, expected 32"),
        (SIGNING, 0o644, "others may read"),
        (None, 0, "cannot be read"),
    ],
)
def test_keys(content: bytes | None, mode: int, message: str, tmp_path: Path) -> None:
    """A key is long, and its owner's alone."""
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(InputError, match=message):
        read_key(file)


def test_keys_and_bundles_are_files(
    full: CompilationCache, empty: CompilationCache, tmp_path: Path
) -> None:
    """A pipe or a device holds nobody up, and a key of another user signs nothing."""
    pipe, file = tmp_path / "pipe", tmp_path / "key"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(InputError, match="it is no regular file"):
            read_key(path)
        with pytest.raises(InputError, match="it is no regular file"):
            import_entries(empty, str(path), key=SIGNING)
    if os.getuid() == 0:
        file.write_bytes(SIGNING)
        file.chmod(0o600)
        os.chown(file, 12345, 0)
        with pytest.raises(InputError, match="belongs to another user"):
            read_key(file)


def test_a_full_disk_is_told(full: CompilationCache, tmp_path: Path) -> None:
    """Where the bundle is put together, with what to do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    try:
        with pytest.raises(
            InputError,
            match=r"into a temporary file: OSError: .*: where no space is left, set TMPDIR",
        ):
            export_entries(full, str(tmp_path / "bundle"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_folder_that_takes_nothing_is_told(
    full: CompilationCache, empty: CompilationCache, tmp_path: Path
) -> None:
    """It is the cache that is at fault, not the bundle."""
    export_entries(full, str(tmp_path / "bundle"), SIGNING)
    for key in KEYS:
        (empty.folder / f"{key}.lock").mkdir()
    with pytest.raises(InputError, match=r"the folder .*empty takes no entry of .*bundle: "):
        import_entries(empty, str(tmp_path / "bundle"), key=SIGNING)


def test_the_command_line(cli: Any, full: CompilationCache, tmp_path: Path) -> None:
    """What one machine writes with a key another takes; without one it needs the digest."""
    (tmp_path / "key").write_bytes(SIGNING)
    (tmp_path / "key").chmod(0o600)
    here, there = (
        ("--compilation_config.cache_folder", str(tmp_path / name)) for name in ("full", "there")
    )
    told = cli("cache", "export", "bundle", "--key", str(tmp_path / "key"), *here)
    assert told.stdout.startswith("bundle: 3 entries, "), told.stderr
    assert "0 entries" in cli("cache", "info", *there).stdout
    assert not (tmp_path / "there").exists()
    refused = cli("cache", "import", "bundle", *there)
    assert (refused.returncode, "--sha256" in refused.stderr) == (2, True)
    report = json.loads(
        cli("cache", "import", "bundle", "--key", str(tmp_path / "key"), "--json", *there).stdout
    )
    assert (report["schema"], report["taken"], report["signed"]) == (
        "opgraft.cache.import/1",
        3,
        True,
    )
    assert report["sha256"] in told.stdout
    schema = Path(__file__).parents[2] / "docs/reference/schemas/opgraft.cache.import.1.json"
    assert set(report) == set(json.loads(schema.read_text())["properties"])
    assert len(CompilationCache(tmp_path / "there", 1 << 20).keys) == 3


class Branching(nn.Module):
    """Computes one of two things, the first of which has a factor."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        taken: Tensor = torch.cond(x.sum() > 0, lambda x: x * self.factor, lambda x: x - 1, (x,))
        return taken


def test_branches_are_a_part_of_a_graph() -> None:
    """Graphs that differ inside of torch.cond alone are different code."""
    exported = [torch.export.export(Branching(factor), (torch.ones(3),)) for factor in (2, 3, 2)]
    first, second, third = (list(nodes_of(each.graph_module)) for each in exported)
    assert first == third != second
