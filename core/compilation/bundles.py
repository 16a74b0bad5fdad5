"""Bundles: the entries of a cache in one file, for machines with the same environment.

A bundle is code, and code is loaded without a further look. A cache takes a bundle only if the user
names the digest, or holds the key of the signature (HMAC-SHA256, RFC 2104: who can verify can
sign).
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

from opgraft.base.files import read_regular, replacing
from opgraft.base.text import described
from opgraft.base.version import __version__
from opgraft.compilation.cache import ENTRY, KEY, SUMS, CompilationCache
from opgraft.compilation.sources import Sources
from opgraft.errors import CacheEntryError, InputError
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import current_platform

_MAGIC = b"opgraft bundle 1 "
_UNSIGNED = b"0" * 64
_HEADER = len(_MAGIC) + 64 + 1
"""Bytes before the archive: the magic text, the signature in hexadecimal digits, a line's end."""

_INDEX = "bundle.json"
_LARGEST_INDEX = 1 << 20
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_CHUNK = 1 << 20
_SHORTEST_KEY = 32
_LONGEST_KEY = 1 << 16


@dataclass(frozen=True)
class Bundle:
    """The record of a bundle after an export or import.

    Attributes:
        file: the path or URL.
        entries: the number of entries in the bundle.
        taken: the number of entries that were new to the cache; after an export, all.
        nbytes: the size of the file.
        sha256: the digest of the file.
        signed: the bundle is signed with a key.
    """

    file: str
    entries: int
    taken: int
    nbytes: int
    sha256: str
    signed: bool

    def to_dict(self) -> dict[str, str | int | bool]:
        """Return the record as plain data."""
        return {
            "file": self.file,
            "entries": self.entries,
            "taken": self.taken,
            "bytes": self.nbytes,
            "sha256": self.sha256,
            "signed": self.signed,
        }


def environment() -> dict[str, str]:
    """Describe the environment of compiled code: versions, platform, processor and plugins.

    No plugin is imported, except for the class of the platform.
    """
    # A bundle that cannot be read is refused without torch, which takes seconds to import.
    import torch

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
    """Write entries of a cache to a bundle. Readers find the former bundle until the end.

    Args:
        cache: the cache with the entries. Damaged entries are left out.
        file: a path, or a URL of fsspec such as ``s3://bucket/name``.
        key: signs the bundle, if given.
        only: the keys of the entries; by default all.

    Raises:
        InputError: there is no entry, or the file cannot be written.
    """
    with _temporary() as written:
        written.write(_MAGIC + _UNSIGNED + b"\n")
        entries = _write_archive(cache, written, cache.keys if only is None else only)
        if not entries:
            raise InputError(
                f"the cache of compiled code in {cache.folder} has no entry to export: compile a "
                "model with compilation_config.cache on first, or name its folder by "
                "compilation_config.cache_folder"
            )
        # The signature covers the archive, and takes its place in the header now.
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
    """Take the new entries of a bundle into a cache.

    Args:
        cache: gets the entries.
        file: a path, or a URL of fsspec.
        key: the key of the signature.
        sha256: the digest in hexadecimal digits. The digest or the key is required.
        only: the expected keys of the entries; by default any.

    Raises:
        InputError: the file cannot be read, has another digest or signature, was made in another
            environment, is damaged, or is larger than the cache may be.
    """
    if key is None and sha256 is None:
        raise InputError(
            f"{file} holds code, which is taken only if you say that it is the one you mean: name "
            "its digest by --sha256, or the key that it is signed with by --key"
        )
    # A copy, so that nobody changes the file after the check.
    with _temporary() as copy:
        with _reading(file) as source:
            header = _header(file, source)
            digest, nbytes = _copied(source, copy, header, cache.limit)
        if nbytes > cache.limit:
            raise InputError(
                f"{file} is larger than the cache may be, {cache.limit} bytes: raise "
                "compilation_config.cache_bytes"
            )
        signed = _expect_meant(file, copy, digest, key, sha256)
        try:
            entries, taken = _take_all(cache, file, copy, only)
        except InputError:
            raise
        except (OSError, CacheEntryError) as error:
            raise InputError(
                f"the folder {cache.folder} takes no entry of {file}: {described(error)}"
            ) from error
        # An archive by another program may raise anything.
        except Exception as error:
            raise InputError(f"{file} is damaged: {described(error)}: export it anew") from error
    return Bundle(file, entries, taken, nbytes, digest, signed)


def _take_all(
    cache: CompilationCache, file: str, copy: IO[bytes], only: Collection[str] | None
) -> tuple[int, int]:
    """Take the new entries of an archive into a cache.

    Args:
        cache: gets the entries.
        file: the name of the bundle, for messages.
        copy: the bundle.
        only: the expected keys of the entries; by default any.

    Returns:
        The number of all entries, and the number of new ones.

    Raises:
        InputError: the archive is of another environment, or has other or too large entries.
    """
    with zipfile.ZipFile(copy) as archive:
        entries = _contents(archive, cache.limit)
        index = json.loads(archive.read(_INDEX))
        _expect_environment(file, index["environment"])
        if only is not None and entries.keys() != {*only}:
            raise InputError(f"{file} has other entries than {', '.join(only)}: export these anew")
        taken = sum(_taken(cache, archive, name, files) for name, files in entries.items())
    return len(entries), taken


def read_key(file: Path) -> bytes:
    """Read a key: any bytes in a file that only the owner may read.

    Raises:
        InputError: the file cannot be read, is too short, or others may read or write the file.
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
            f"the key {file} belongs to another user, or others may read or write it: make one of "
            "mode 0600"
        )
    return key


def _write_archive(cache: CompilationCache, file: IO[bytes], keys: Collection[str]) -> int:
    """Append an archive of undamaged entries, and return the number of entries."""
    count = 0
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(_INDEX, json.dumps({"environment": environment()}))
        for key in keys:
            # Under the lock, no other process removes the entry.
            with cache.locked(key), contextlib.suppress(CacheEntryError):
                found = cache.read(key)
                if found is None:
                    continue
                folder, _ = found
                for path in sorted(folder.iterdir()):
                    archive.write(path, f"{key}/{path.name}")
                count += 1
    return count


def _contents(archive: zipfile.ZipFile, limit: int) -> dict[str, list[str]]:
    """Check names and sizes in an archive, and return the names of files by entry.

    Raises:
        ValueError: the archive holds a file with another name than those of entries.
        InputError: the entries take more than ``limit`` bytes.
    """
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
            f"its entries take more than {limit} bytes, which the cache may: raise "
            "compilation_config.cache_bytes"
        )
    return entries


def _taken(cache: CompilationCache, archive: zipfile.ZipFile, key: str, files: list[str]) -> bool:
    """Write an entry into the cache; return False if the cache has the entry already."""
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
    """Check the digest and the signature of a bundle; return True if the bundle is signed.

    Raises:
        InputError: the digest is another one, or the signature is missing or wrong.
    """
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
            f"{file} was made in another environment, in which code may differ "
            f"({'; '.join(other)}): import it on a machine like that, or compile here"
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
    """Copy a file, up to a little more than ``limit`` bytes.

    Args:
        source: the file.
        target: gets the copy.
        begun: bytes of the file that were read before.
        limit: by default none.

    Returns:
        The digest and the number of the copied bytes.
    """
    digest = hashlib.sha256(begun)
    nbytes = target.write(begun)
    for chunk in _chunks(source):
        target.write(chunk)
        digest.update(chunk)
        nbytes += len(chunk)
        if limit is not None and nbytes > limit:
            break
    return digest.hexdigest(), nbytes


def _header(file: str, source: IO[bytes]) -> bytes:
    """Read the header of a bundle, the first bytes.

    Raises:
        InputError: the file is no bundle.
    """
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
    """Open a path or a URL for reading.

    Raises:
        InputError: the file cannot be read, or is a pipe or a device.
    """
    if os.path.exists(file) and not os.path.isfile(file):
        raise InputError(f"the bundle {file} cannot be read: it is no regular file")
    # fsspec comes with torch, and few need the slow import.
    import fsspec

    with _told(file, "read"), fsspec.open(file, "rb") as opened:
        yield opened


@contextlib.contextmanager
def _writing(file: str) -> Iterator[IO[bytes]]:
    """Open a path or a URL for writing. The content changes at the end, or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    with _told(file, "written"):
        system, path = fsspec.url_to_fs(file)
        # The transactions of fsspec would move a local file from another disk.
        if isinstance(system, LocalFileSystem):
            with replacing(Path(path), 0o644) as opened:
                yield opened
        else:
            with system.transaction, system.open(path, "wb") as opened:
                yield opened


@contextlib.contextmanager
def _told(file: str, done: str) -> Iterator[None]:
    """Turn any error of a file system into ``InputError``."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the bundle {file} cannot be {done}: {described(error)}") from error


@contextlib.contextmanager
def _temporary() -> Iterator[IO[bytes]]:
    """Open a temporary file without a name.

    Raises:
        InputError: the file cannot be made, read or written, as on a full disk.
    """
    try:
        with tempfile.TemporaryFile() as file:
            yield file
    except OSError as error:
        raise InputError(
            f"a bundle cannot be put into a temporary file: {described(error)}: where no space is "
            "left, set TMPDIR to a folder with room"
        ) from error
