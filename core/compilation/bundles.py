"""Bundles: the entries of a cache in one file, for machines with the same environment.

A bundle is code that is loaded without a further look, so one is taken only where its digest is the one that the user
names, or where it was signed with the user's key (HMAC-SHA256, RFC 2104: who can verify can sign).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import platform
import re
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from opgraft.base.files import read_regular, replacing
from opgraft.base.text import described
from opgraft.compilation.cache import ENTRY, KEY, SUMS, CompilationCache
from opgraft.compilation.sources import Sources
from opgraft.errors import CacheEntryError, InputError
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import current_platform
from opgraft.version import __version__

_MAGIC = b"opgraft bundle 1 "
_UNSIGNED = b"0" * 64
_HEADER = len(_MAGIC) + 64 + 1
"""Bytes before the archive: what it is, the signature in hexadecimal digits, a line's end."""

_INDEX = "bundle.json"
_LARGEST_INDEX = 1 << 20
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_CHUNK = 1 << 20
_SHORTEST_KEY, _LONGEST_KEY = 32, 1 << 16


@dataclass(frozen=True)
class Bundle:
    """A bundle that was written or taken.

    Attributes:
        file: its path or URL.
        entries: that it holds.
        taken: those of them that were not in the cache before; all of them where it was written.
        nbytes: of the file.
        sha256: of the file.
        signed: with a key.
    """

    file: str
    entries: int
    taken: int
    nbytes: int
    sha256: str
    signed: bool

    def to_dict(self) -> dict[str, str | int | bool]:
        """Return it as plain data."""
        return {
            "file": self.file,
            "entries": self.entries,
            "taken": self.taken,
            "bytes": self.nbytes,
            "sha256": self.sha256,
            "signed": self.signed,
        }


def environment() -> dict[str, str]:
    """Describe what compiled code of any model depends on. Imports no plugin, but the platform's class."""
    chosen = current_platform()
    known = {str(offer.provider) for offer in discover().offers if not offer.built_in}
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "Python": platform.python_version(),
        "opgraft": f"{__version__} {Sources().package('opgraft')[:12]}",
        "the platform": f"{chosen.name} {chosen.capability()}",
        "the processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "plugins": ", ".join(sorted(known)) or "none",
    }


def export_entries(
    cache: CompilationCache,
    file: str,
    key: bytes | None = None,
    *,
    only: Collection[str] | None = None,
) -> Bundle:
    """Write entries of a cache to a bundle. Who reads it meanwhile finds the former bundle of that name, if any.

    Args:
        cache: whose entries are written; those that are damaged are left out.
        file: a path, or a URL of fsspec such as ``s3://bucket/name``.
        key: what signs it.
        only: these entries, and not all.

    Raises:
        InputError: there is no entry, or the file cannot be written.
    """
    with _temporary() as written:
        written.write(_MAGIC + _UNSIGNED + b"\n")
        entries = _write_archive(cache, written, cache.keys if only is None else only)
        if not entries:
            raise InputError(
                f"the cache of compiled code in {cache.folder} has no entry to export: compile a model with "
                "compilation_config.cache on first, or name its folder by compilation_config.cache_folder"
            )
        if key is not None:
            header = _MAGIC + _signature(written, key) + b"\n"
            written.seek(0)
            written.write(header)
        written.seek(0)
        with _writing(file) as target:
            digest, nbytes = _copied(written, target)
    return Bundle(file, entries, entries, nbytes, digest, key is not None)


def import_entries(
    cache: CompilationCache,
    file: str,
    *,
    key: bytes | None = None,
    sha256: str | None = None,
    only: Collection[str] | None = None,
) -> Bundle:
    """Take the entries of a bundle into a cache, those that it has not.

    Args:
        cache: that gets them.
        file: a path, or a URL of fsspec.
        key: what it was signed with.
        sha256: its digest, in hexadecimal digits; one of the two is needed.
        only: the entries that are expected of it.

    Raises:
        InputError: the file cannot be read, is not the one that was meant, was made in another environment, is
            damaged, or is larger than the cache may be.
    """
    if key is None and sha256 is None:
        raise InputError(
            f"{file} holds code, which is taken only if you say that it is the one you mean: name its digest by "
            "--sha256, or the key that it is signed with by --key"
        )
    with _temporary() as copy:
        with _reading(file) as source:
            digest, nbytes = _copied(source, copy, _header(file, source), cache.limit)
        if nbytes > cache.limit:
            raise InputError(
                f"{file} is larger than the cache may be, {cache.limit} bytes: raise compilation_config.cache_bytes"
            )
        signed = _expect_meant(file, copy, digest, key, sha256)
        try:
            with zipfile.ZipFile(copy) as archive:
                entries = _contents(archive, cache.limit)
                _expect_environment(file, json.loads(archive.read(_INDEX))["environment"])
                if only is not None and entries.keys() != {*only}:
                    raise InputError(
                        f"{file} has other entries than {', '.join(only)}: export these anew"
                    )
                taken = sum(_taken(cache, archive, name, files) for name, files in entries.items())
        except InputError:
            raise
        except (OSError, CacheEntryError) as error:
            raise InputError(
                f"the folder {cache.folder} takes no entry of {file}: {described(error)}"
            ) from error
        except (
            Exception
        ) as error:  # of an archive that another one wrote, whatever reading that raises
            raise InputError(f"{file} is damaged: {described(error)}: export it anew") from error
    return Bundle(file, len(entries), taken, nbytes, digest, signed)


def read_key(file: Path) -> bytes:
    """Read a key: any bytes, which nobody but their owner may read.

    Raises:
        InputError: it cannot be read, is too short, or others may read it.
    """
    try:
        key = read_regular(file, _LONGEST_KEY)
        state = file.stat()
    except (OSError, ValueError) as error:
        raise InputError(f"the key {file} cannot be read: {described(error)}") from error
    if len(key) < _SHORTEST_KEY:
        raise InputError(
            f"the key {file} has {len(key)} bytes, expected {_SHORTEST_KEY} or more: make one by "
            f"'head -c {_SHORTEST_KEY} /dev/urandom > {file}; chmod 600 {file}'"
        )
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise InputError(
            f"the key {file} belongs to another user, or others may read or write it: make one of mode 0600"
        )
    return key


def _write_archive(cache: CompilationCache, file: IO[bytes], keys: Collection[str]) -> int:
    """Append an archive of those entries that are whole, each of which stays while it is read; returns their number."""
    count = 0
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(_INDEX, json.dumps({"environment": environment()}))
        for key in keys:
            with cache.locked(key), contextlib.suppress(CacheEntryError):
                found = cache.read(key)
                if found is not None:
                    for path in sorted(found[0].iterdir()):
                        archive.write(path, f"{key}/{path.name}")
                    count += 1
    return count


def _contents(archive: zipfile.ZipFile, limit: int) -> dict[str, list[str]]:
    """Return the files of each entry, all of whose names and sizes are in order."""
    entries: dict[str, list[str]] = {}
    for info in archive.infolist():
        if info.filename == _INDEX:
            if info.file_size > _LARGEST_INDEX:
                raise ValueError(f"{_INDEX} has {info.file_size} bytes")
            continue
        key, _, name = info.filename.partition("/")
        if not KEY.fullmatch(key) or not _FILE.fullmatch(name):
            raise ValueError(f"it holds {info.filename!r}, which is no file of an entry")
        entries.setdefault(key, []).append(name)
    if sum(info.file_size for info in archive.infolist()) > limit:
        raise InputError(
            f"its entries take more than {limit} bytes, which the cache may: raise compilation_config.cache_bytes"
        )
    return entries


def _taken(cache: CompilationCache, archive: zipfile.ZipFile, key: str, files: list[str]) -> bool:
    """Write an entry that the cache has not, and tell whether that was so."""
    with cache.locked(key):
        with contextlib.suppress(CacheEntryError):
            if cache.read(key) is not None:
                return False
        with cache.written(key) as (folder, description):
            description.update(json.loads(archive.read(f"{key}/{ENTRY}")))
            for name in {*files} - {ENTRY, SUMS}:
                (folder / name).write_bytes(archive.read(f"{key}/{name}"))
    return True


def _expect_meant(
    file: str, copy: IO[bytes], digest: str, key: bytes | None, sha256: str | None
) -> bool:
    """See that a bundle is the one that the user means, and tell whether its signature says so."""
    copy.seek(len(_MAGIC))
    signature = copy.read(len(_UNSIGNED))
    if sha256 is not None and not hmac.compare_digest(sha256.lower().encode(), digest.encode()):
        raise InputError(
            f"{file} has the SHA-256 {digest}, expected {sha256}: it is damaged or another one"
        )
    if key is None:
        return False
    if signature == _UNSIGNED:
        raise InputError(
            f"{file} is not signed: export it with --key, or name its digest by --sha256"
        )
    if not hmac.compare_digest(signature, _signature(copy, key)):
        raise InputError(
            f"{file} was not signed with this key, or has changed since: nothing of it is taken"
        )
    return True


def _expect_environment(file: str, there: Mapping[str, str]) -> None:
    other = [
        f"{name}: {there.get(name)!s:.200} there, {value} here"
        for name, value in environment().items()
        if there.get(name) != value
    ]
    if other:
        raise InputError(
            f"{file} was made in another environment, in which code may differ ({'; '.join(other)}): import it on a "
            "machine like that, or compile here"
        )


def _signature(file: IO[bytes], key: bytes) -> bytes:
    """Return the signature of the archive in a bundle."""
    signature = hmac.new(key, digestmod="sha256")
    file.seek(_HEADER)
    for chunk in _chunks(file):
        signature.update(chunk)
    return signature.hexdigest().encode()


def _copied(
    source: IO[bytes], target: IO[bytes], begun: bytes = b"", limit: int | None = None
) -> tuple[str, int]:
    """Copy a file of which the first bytes were read, or the beginning of one of more than ``limit`` bytes.

    Returns the digest of what was copied, and how many bytes it has.
    """
    digest, nbytes = hashlib.sha256(begun), target.write(begun)
    for chunk in _chunks(source):
        target.write(chunk)
        digest.update(chunk)
        nbytes += len(chunk)
        if limit is not None and nbytes > limit:
            break
    return digest.hexdigest(), nbytes


def _header(file: str, source: IO[bytes]) -> bytes:
    """Read the header of a bundle, before anything else of it."""
    header = source.read(_HEADER)
    if len(header) < _HEADER or not header.startswith(_MAGIC):
        raise InputError(
            f"{file} is no bundle of compiled code: 'opgraft cache export' writes them"
        )
    return header


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(functools.partial(file.read, _CHUNK), b"")


@contextlib.contextmanager
def _reading(file: str) -> Iterator[IO[bytes]]:
    """Open a path or a URL; of a pipe or a device nothing is read."""
    if os.path.exists(file) and not os.path.isfile(file):
        raise InputError(f"the bundle {file} cannot be read: it is no regular file")
    import fsspec  # which comes with torch, and is imported by few others

    with _told(file, "read"), fsspec.open(file, "rb") as opened:
        yield opened


@contextlib.contextmanager
def _writing(file: str) -> Iterator[IO[bytes]]:
    """Open a path or a URL whose content changes at the end alone, and not at all where that is not reached."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    with _told(file, "written"):
        system, path = fsspec.url_to_fs(file)
        if isinstance(system, LocalFileSystem):  # whose transactions move a file from another disk
            with replacing(Path(path), 0o644) as opened:
                yield opened
        else:
            with system.transaction, system.open(path, "wb") as opened:
                yield opened


@contextlib.contextmanager
def _told(file: str, done: str) -> Iterator[None]:
    """Raise ``InputError`` for whatever file systems raise."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the bundle {file} cannot be {done}: {described(error)}") from error


@contextlib.contextmanager
def _temporary() -> Iterator[IO[bytes]]:
    """Open a file without a name.

    Raises:
        InputError: it cannot be made, or what is put into it cannot be read or written, as on a full disk.
    """
    try:
        with tempfile.TemporaryFile() as file:
            yield file
    except OSError as error:
        raise InputError(
            f"a bundle cannot be put into a temporary file: {described(error)}: where no space is left, set TMPDIR "
            "to a folder with room"
        ) from error
