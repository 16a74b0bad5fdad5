"""``StoredBlocks``: full blocks of the cache in a folder, for this process and later ones.

An entry is a file with one block of each layer of a rank: a signature, then the bytes. The folder
of an entry is named by everything that the numbers depend on, and the file by the hash of the
tokens up to the end of the block. So an entry of another model, kernel or prompt is never found.

An entry that was cut, exchanged or changed does not have its signature. It counts as missing, and
is removed.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.compilation.bundles import read_key
from opgraft.config import CacheConfig
from opgraft.config.environment import cache_home
from opgraft.errors import ConfigError, InputError
from torch import Tensor

_ENTRY = re.compile("[0-9a-f]{64}")
"""The name of an entry. Files of other names belong to others, and stay."""

_SIGNATURE_BYTES = sha256().digest_size
_KEY_BYTES = 32

_MOST_WAITING = 1 << 28
"""Bytes of blocks that wait to be written, at most. Further blocks are not saved."""

_MOST_KNOWN = 1 << 16
"""Names of entries that are known to exist, at most."""

_CHECKS = 64
"""The size of the folder is checked so often while as many bytes are written as it may have."""

_LEFT = 0.9
"""The share of the limit that is left to entries, once they take more than the limit."""


class StoredBlocks:
    """The entries of a rank.

    A failure of the folder stops no request: the tokens are computed, and a warning says why.

    Args:
        settings: ``cache.store``, ``store_bytes`` and ``store_key``.
        origin: everything that the numbers in a block depend on, beside its tokens.
        groups: the caches of the layers of each group, ``[blocks, …]``.

    Raises:
        ConfigError: the folder or the key cannot be used.
    """

    def __init__(
        self,
        settings: CacheConfig,
        origin: Mapping[str, str],
        groups: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self._files, self._root = _file_system(str(settings.store))
        self._key = _key(settings.store_key)
        self._limit = settings.store_bytes
        rows = "".join(f"{name}\0{value}\0" for name, value in sorted(origin.items()))
        # By the key, so that nobody takes the entries of another key for damaged ones.
        named = hmac.new(self._key, rows.encode(), "sha256").hexdigest()
        self._folder = f"{self._root}/{named[:32]}"
        self._groups = [list(layers.values()) for layers in groups]
        self._entry_bytes = sum(map(_bytes_of_block, self._caches()))
        # Entries that are there, unless another process has removed them since.
        self._known: OrderedDict[str, None] = OrderedDict()
        self._lock = Lock()
        self._has_warned = False
        self._unchecked = self._limit
        self._writer = ThreadPoolExecutor(1, "opgraft-stored-blocks")
        self._writes: list[tuple[Future[None], int]] = []

    def _caches(self) -> list[Tensor]:
        return [cache for layers in self._groups for cache in layers]

    @torch.inference_mode()
    def save(self, blocks: Sequence[tuple[bytes, Sequence[int]]]) -> None:
        """Copy blocks, and write them from a thread.

        Args:
            blocks: the hash of the tokens, and the block of each group.
        """
        fresh = [(digest, each) for digest, each in blocks if digest.hex() not in self._known]
        nbytes = len(fresh) * self._entry_bytes
        self._writes = [(write, size) for write, size in self._writes if not write.done()]
        waiting = sum(size for _, size in self._writes)
        if not fresh or waiting + nbytes > _MOST_WAITING:
            return
        copied = [(digest.hex(), self._copied(each)) for digest, each in fresh]
        self._writes.append((self._writer.submit(self._write_all, copied), nbytes))

    def _copied(self, blocks: Sequence[int]) -> bytearray:
        """Return the bytes of one block of each group."""
        parts = []
        for block, caches in zip(blocks, self._groups, strict=True):
            parts += [cache[block].flatten().view(torch.uint8) for cache in caches]
        content = bytearray(self._entry_bytes)
        torch.frombuffer(content, dtype=torch.uint8).copy_(torch.cat(parts))
        return content

    def count(self, digests: Sequence[bytes]) -> int:
        """Return the number of hashes with an entry, up to the first one without."""
        for place, digest in enumerate(digests):
            name = digest.hex()
            if name not in self._known and not self._exists(name):
                return place
        return len(digests)

    @torch.inference_mode()
    def load(self, wanted: Sequence[tuple[bytes, Sequence[int | None]]]) -> int:
        """Fill blocks from entries, in order, until an entry is missing or damaged.

        Args:
            wanted: the hash of the tokens, and the block of each group; ``None`` if the group needs
                none.

        Returns:
            The number of the filled ones.
        """
        for number, (digest, blocks) in enumerate(wanted):
            content = self._read(digest.hex())
            if content is None:
                return number
            self._fill(blocks, torch.frombuffer(content, dtype=torch.uint8))
        return len(wanted)

    def _fill(self, blocks: Sequence[int | None], content: Tensor) -> None:
        begin = 0
        for block, caches in zip(blocks, self._groups, strict=True):
            for cache in caches:
                end = begin + _bytes_of_block(cache)
                if block is not None:
                    part = content[begin:end].view(cache.dtype)
                    cache[block].copy_(part.view(cache.shape[1:]))
                begin = end

    def discard(self, digests: Sequence[bytes]) -> None:
        """Remove entries, also those that are being written."""
        names = [digest.hex() for digest in digests]
        self._writes.append((self._writer.submit(self._remove_all, names), 0))

    def finish(self) -> None:
        """Wait until all blocks are written."""
        wait(write for write, _ in self._writes)

    def _write_all(self, copied: Sequence[tuple[str, bytearray]]) -> None:
        """Write entries. Only the thread of the writer calls this."""
        try:
            for name, content in copied:
                if not self._exists(name):
                    self._write(name, content)
                self._note(name)
            if self._unchecked >= self._limit // _CHECKS:
                self._unchecked = 0
                self._make_room()
        # File systems may raise anything.
        except Exception as error:
            self._warn("written", error)

    def _write(self, name: str, content: bytearray) -> None:
        self._files.makedirs(self._folder, exist_ok=True)
        # A reader of a half written entry takes it for a damaged one.
        self._files.pipe_file(self._path(name), self._signature(name, content) + content)
        self._unchecked += len(content)

    def _read(self, name: str) -> bytearray | None:
        """Return the content of an entry; ``None`` if it is missing or damaged."""
        path = self._path(name)
        try:
            found = self._files.cat_file(path)
        except FileNotFoundError:
            self._known.pop(name, None)
            return None
        except Exception as error:
            self._warn("read", error)
            return None
        signature, content = found[:_SIGNATURE_BYTES], found[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(name, content)):
            self._remove_all([name])
            return None
        self._note(name)
        # Other file systems than the local one tell the time of writing only.
        with contextlib.suppress(Exception):
            self._files.touch(path, truncate=False)
        return bytearray(content)

    def _remove_all(self, names: Sequence[str]) -> None:
        for name in names:
            self._known.pop(name, None)
            # Another process may have removed the file.
            with contextlib.suppress(Exception):
                self._files.rm_file(self._path(name))

    def _exists(self, name: str) -> bool:
        try:
            return bool(self._files.exists(self._path(name)))
        except Exception as error:
            self._warn("read", error)
            return False

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _note(self, name: str) -> None:
        # The thread of the writer notes entries, too.
        with self._lock:
            self._known[name] = None
            self._known.move_to_end(name)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def _signature(self, name: str, content: bytes | bytearray) -> bytes:
        # With the name: an entry in the place of another one is damaged.
        place = f"{self._folder.removeprefix(self._root)}/{name}/"
        signed = hmac.new(self._key, place.encode(), "sha256")
        signed.update(content)
        return signed.digest()

    def _make_room(self) -> None:
        """Remove the least recently used entries of all ranks and models, if there are too many."""
        entries = []
        for path, details in self._files.find(self._root, detail=True).items():
            if _ENTRY.fullmatch(path.rpartition("/")[2]):
                entries.append((path, details["size"]))
        nbytes = sum(size for _, size in entries)
        if nbytes <= self._limit:
            return
        for path, size in sorted(entries, key=lambda entry: self._last_use(entry[0])):
            if nbytes <= self._limit * _LEFT:
                return
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(path)
            nbytes -= size

    def _last_use(self, path: str) -> float:
        try:
            return float(self._files.modified(path).timestamp())
        # Another process has removed the file.
        except FileNotFoundError:
            return 0.0

    def _warn(self, verb: str, error: Exception) -> None:
        """Warn once, since a folder that cannot be reached fails again and again."""
        if not self._has_warned:
            logger.warning(
                "blocks of the cache cannot be %s in %s (%s): they are computed instead",
                verb,
                self._root,
                described(error),
            )
        self._has_warned = True


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there.

    Raises:
        ConfigError: the URL cannot be used.
    """
    # fsspec comes with torch, and few need the slow import.
    import fsspec

    try:
        files, path = fsspec.url_to_fs(os.path.expanduser(url))
        files.makedirs(path, exist_ok=True)
    # File systems may raise anything.
    except Exception as error:
        raise ConfigError(
            f"cache.store is {url!r:.200}, which cannot be used: {described(error)}: name a folder "
            "that this process may write to, or a URL of fsspec"
        ) from error
    return files, path.rstrip("/")


def _key(file: str | None) -> bytes:
    """Return the key of the signatures, which is made if the settings name none.

    Raises:
        ConfigError: the key cannot be used.
    """
    try:
        if file is not None:
            return read_key(Path(file).expanduser())
        own = cache_home() / "opgraft" / "blocks.key"
        if not own.exists():
            _make_key(own)
        return read_key(own)
    # There is no home folder, or it cannot be written to.
    except (InputError, RuntimeError, OSError) as error:
        raise ConfigError(f"cache.store_key cannot be used: {described(error)}") from error


def _make_key(file: Path) -> None:
    """Write a key of random bytes, unless another process is faster."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(secrets.token_bytes(_KEY_BYTES))
        # A link appears with the whole key, and replaces no other one.
        with contextlib.suppress(FileExistsError):
            os.link(written, file)
    finally:
        written.unlink(missing_ok=True)


def _bytes_of_block(cache: Tensor) -> int:
    return cache[0].numel() * cache.element_size()
