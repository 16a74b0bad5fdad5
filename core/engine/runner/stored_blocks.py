"""``StoredBlocks``: full blocks of the cache in a folder, for this process and later ones.

An entry is a file with one block of each layer of a rank: a signature, then the bytes. The folder
of an entry is named by everything that the numbers depend on, and the file by the hash of the
tokens up to the end of the block. So an entry of another model, kernel or prompt is never found.

An entry that was cut, exchanged or changed does not have its signature. It counts as missing, and
is written again.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import os
import re
import secrets
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import datetime
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar

import torch
from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.compilation.bundles import read_key
from opgraft.config import CacheConfig
from opgraft.config.environment import cache_home
from opgraft.errors import ConfigError, InputError
from opgraft.ops.attention.codes import LARGEST_CODES, SCALE_BYTES
from torch import Tensor

_FOLDER = "opgraft-blocks"
"""The folder of all entries, within the one of the settings. Nothing else is ever removed."""

_ENTRY = re.compile(f"/{_FOLDER}/[0-9a-f]{{32}}/[0-9a-f]{{64}}$")
"""The end of the path of an entry."""

_SIGNATURE_BYTES = sha256().digest_size
_KEY_BYTES = 32

_MOST_WAITING = 1 << 28
"""Bytes of blocks that wait to be written, at most. Later blocks of a step are left out."""

_CHECKS = 64
"""After each such part of its limit is written, the folder is measured."""

_LEFT = 0.9
"""The share of the limit that is left to entries, once they take more than the limit."""

_PATIENCE = 5.0
"""Seconds for reading the blocks of a request. Blocks that come later are computed."""

_READERS = 2
"""Threads that read entries, as checking a signature takes longer than copying the bytes."""

_AHEAD = 1 << 23
"""Bytes of entries that are read ahead of filling, at most."""

_TOUCHED = 1 << 28
"""Bytes of blocks that are written once at the start, at most. The system finds memory for blocks
at their first use, which can take longer than reading the entries."""

_MOST_TASKS = 8
"""Tasks of the thread that wait, at most, before it is told of the use of entries."""

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")

_OPEN: weakref.WeakSet[StoredBlocks] = weakref.WeakSet()
"""The stores of this process."""

_Call = Callable[[], None]
"""Work for a thread."""

_Answer = TypeVar("_Answer")


class _Task(NamedTuple):
    """Entries to write, the names of entries that were used, and a mark that both is done."""

    copied: Mapping[str, bytearray]
    used: Sequence[str]
    is_done: Event


class StoredBlocks:
    """The entries of a rank.

    A failure of the folder stops no request: the tokens are computed, and a warning says why.

    Args:
        settings: ``cache.store``, ``store_bytes`` and ``store_key``.
        origin: everything that the numbers in a block depend on, beside its tokens, as plain data.
        groups: the caches of the layers of each group, ``[blocks, …]``.
        part: of ``HandoverConfig``. A process that computes for another one leaves no block out.
            The other one removes the entries after reading.

    Raises:
        ConfigError: the folder or the key cannot be used.
    """

    def __init__(
        self,
        settings: CacheConfig,
        origin: Mapping[str, Any],
        groups: Sequence[Mapping[str, Tensor]],
        part: str = "",
    ) -> None:
        self._files, self._root = _file_system(str(settings.store))
        self._key = _key(settings.store_key)
        self._limit = settings.store_bytes
        self._part = part
        text = json.dumps(origin, sort_keys=True)
        # By the key, so that nobody takes the entries of another key for damaged ones.
        name = hmac.new(self._key, text.encode(), "sha256").hexdigest()[:32]
        self._folder = f"{self._root}/{name}"
        self._groups = [list(layers.values()) for layers in groups]
        caches = [cache for layers in self._groups for cache in layers]
        self._part_bytes = list(map(_bytes_of_block, caches))
        self._entry_bytes = sum(self._part_bytes)
        # Blocks are taken in their order.
        for cache in caches:
            cache[: _TOUCHED // self._entry_bytes].zero_()
        self._damaged: set[str] = set()
        self._has_warned = False
        self._unchecked = self._limit
        self._waiting: list[_Task] = []
        self._late: list[Future[Any]] = []
        self._writing = _queue_of_threads(self, "opgraft-write-blocks", 1)
        self._reading = _queue_of_threads(self, "opgraft-read-blocks", _READERS)
        _OPEN.add(self)

    @torch.inference_mode()
    def save(
        self, blocks: Sequence[tuple[bytes, Sequence[int]]], used: Sequence[bytes] = ()
    ) -> None:
        """Copy blocks, and write them from a thread.

        Args:
            blocks: the hash of the tokens, and the block of each group.
            used: hashes of blocks that requests found in the cache.
        """
        room = self._room()
        while self._part == "computes" and len(blocks) > room:
            self._save(blocks[:room], ())
            blocks = blocks[room:]
            # A folder that hangs must not keep the engine from its next step.
            if self._waiting and not self._waiting[0].is_done.wait(_PATIENCE):
                break
            room = self._room()
        room = self._room()
        if len(blocks) > room:
            self._warn("written", InputError(f"{len(blocks) - room} blocks find no place to wait"))
        self._save(blocks[:room], used)

    def _save(self, blocks: Sequence[tuple[bytes, Sequence[int]]], used: Sequence[bytes]) -> None:
        names = [self._name(digest) for digest in used] if self._may_touch() else []
        copied = {}
        try:
            for digest, each in blocks:
                content = self._copied(each)
                if content is not None:
                    copied[self._name(digest)] = content
        # A device may lack the memory for a copy.
        except Exception as error:
            self._warn("copied", error)
        if copied or names:
            task = _Task(copied, names, Event())
            self._waiting.append(task)
            self._writing.put(partial(self._write_task, task))

    def _room(self) -> int:
        """Return the number of blocks that may wait to be written now."""
        self._waiting = [task for task in self._waiting if not task.is_done.is_set()]
        waiting = sum(len(task.copied) for task in self._waiting)
        most = max(1, _MOST_WAITING // self._entry_bytes)
        return max(0, most - waiting)

    def _may_touch(self) -> bool:
        """Return True if the use of entries can be noted, and the thread keeps up with that."""
        return _is_local(self._files) and len(self._waiting) < _MOST_TASKS

    def _copied(self, blocks: Sequence[int]) -> bytearray | None:
        """Return the bytes of one block of each group; ``None`` if a number is not finite."""
        parts = []
        for block, caches in zip(blocks, self._groups, strict=True):
            parts += [cache[block] for cache in caches]
        numbers = [_numbers(part).flatten() for part in parts]
        if not torch.isfinite(torch.cat(numbers)).all():
            return None
        content = bytearray(self._entry_bytes)
        flat = [part.flatten().view(torch.uint8) for part in parts]
        torch.frombuffer(content, dtype=torch.uint8).copy_(torch.cat(flat))
        return content

    def count(self, digests: Sequence[bytes]) -> int:
        """Return about how many of the hashes have an entry, up to the first one without.

        Few entries are looked at: behind a missing one, later ones count as missing.
        """
        if not digests or self._hangs():
            return 0
        try:
            end = time.monotonic() + _PATIENCE
            return self._in_time(self._started(self._count, digests), end)
        # File systems may raise anything.
        except Exception as error:
            self._warn("read", error)
            return 0

    def _count(self, digests: Sequence[bytes]) -> int:
        # Other processes add entries, which a kept listing would not have.
        self._files.invalidate_cache(self._folder)
        if self._is_missing(digests[0]):
            return 0
        return bisect_left(digests, True, key=self._is_missing)

    def _is_missing(self, digest: bytes) -> bool:
        return not self._is_whole(self._path(self._name(digest)))

    @torch.inference_mode()
    def load(self, wanted: Sequence[tuple[bytes, Sequence[int | None]]]) -> int:
        """Fill blocks from entries, in order, until one is missing, damaged or late.

        Args:
            wanted: the hash of the tokens, and the block of each group; ``None`` if the group needs
                none.

        Returns:
            The number of the filled ones.
        """
        if self._hangs():
            return 0
        filled = 0
        end = time.monotonic() + _PATIENCE
        most = max(_READERS, _AHEAD // self._entry_bytes)
        reads: deque[Future[Tensor | None]] = deque()
        left = iter(wanted)
        try:
            for _, blocks in wanted:
                for digest, _ in islice(left, most - len(reads)):
                    reads.append(self._started(self._read, self._name(digest)))
                content = self._in_time(reads.popleft(), end)
                if content is None:
                    break
                self._fill(blocks, content)
                filled += 1
        except Exception as error:
            self._warn("read", error)
        for read in reads:
            read.cancel()
        return filled

    def _hangs(self) -> bool:
        """Return True while a call that was not in time goes on."""
        self._late = [call for call in self._late if not call.done()]
        return bool(self._late)

    def _started(self, function: Callable[..., _Answer], *given: object) -> Future[_Answer]:
        """Let a thread call a function."""
        call: Future[_Answer] = Future()

        def run() -> None:
            if not call.set_running_or_notify_cancel():
                return
            try:
                call.set_result(function(*given))
            except Exception as error:
                call.set_exception(error)

        self._reading.put(run)
        return call

    def _in_time(self, call: Future[_Answer], end: float) -> _Answer:
        """Return the answer of a thread.

        Raises:
            InputError: there is none at the given time.
            Exception: anything that the call raises.
        """
        wait([call], max(0.0, end - time.monotonic()))
        if not call.done():
            self._late.append(call)
            raise InputError(f"reading takes more than {_PATIENCE:g} s")
        return call.result()

    def _fill(self, blocks: Sequence[int | None], content: Tensor) -> None:
        parts = iter(torch.split(content, self._part_bytes))
        for block, caches in zip(blocks, self._groups, strict=True):
            for cache in caches:
                part = next(parts)
                if block is not None:
                    cache[block].copy_(part.view(cache.dtype).view(cache.shape[1:]))

    def finish(self, seconds: float) -> None:
        """Wait until all blocks are written, at most for the given time."""
        end = time.monotonic() + seconds
        for task in list(self._waiting):
            if not task.is_done.wait(max(0.0, end - time.monotonic())):
                return

    def _write_task(self, task: _Task) -> None:
        try:
            self._write_all(task)
        except Exception as error:
            self._warn("written", error)
        try:
            # After a failure too: the disk may be full.
            self._make_room_if_due()
        except Exception as error:
            self._warn("removed", error)
        task.is_done.set()

    def _write_all(self, task: _Task) -> None:
        for name, content in task.copied.items():
            if name in self._damaged or not self._is_whole(self._path(name)):
                self._write(name, content)
        for name in task.used:
            self._touch(self._path(name))

    def _write(self, name: str, content: bytearray) -> None:
        path = self._path(name)
        self._files.makedirs(self._folder, exist_ok=True)
        # A link in its place would lead to a file of others.
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(path)
        # A reader of a half written entry takes it for a missing one.
        self._files.pipe_file(path, self._signature(name, content) + content)
        self._damaged.discard(name)
        self._unchecked += len(content)

    def _read(self, name: str) -> Tensor | None:
        """Return the bytes of the blocks of an entry; ``None`` if it is missing or damaged."""
        path = self._path(name)
        if not self._is_whole(path):
            return None
        found = bytearray(_SIGNATURE_BYTES + self._entry_bytes)
        with self._files.open(path, "rb") as opened:
            length = opened.readinto(found)
        content = memoryview(found)[_SIGNATURE_BYTES:]
        signature = found[:_SIGNATURE_BYTES]
        is_whole = length == len(found)
        if not is_whole or not hmac.compare_digest(signature, self._signature(name, content)):
            self._damaged.add(name)
            return None
        if self._part == "takes":
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(path)
        else:
            self._touch(path)
        return torch.frombuffer(found, dtype=torch.uint8, offset=_SIGNATURE_BYTES)

    def _is_whole(self, path: str) -> bool:
        """Return True for a plain file of the size of an entry. Nothing is read from it."""
        try:
            found = self._files.info(path)
        except FileNotFoundError:
            return False
        is_plain = found["type"] == "file" and not found.get("islink")
        return is_plain and found["size"] == _SIGNATURE_BYTES + self._entry_bytes

    def _touch(self, path: str) -> None:
        # Other file systems than the local one tell the time of writing only.
        if _is_local(self._files):
            # The system's own time of files goes on in steps of milliseconds: a use could look as
            # old as a writing shortly before.
            now = time.time_ns()
            with contextlib.suppress(OSError):
                os.utime(path, ns=(now, now))

    def _name(self, digest: bytes) -> str:
        """Return the name of an entry. Nobody else can tell which tokens it is for."""
        return hmac.new(self._key, digest, "sha256").hexdigest()

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _signature(self, name: str, content: bytearray | memoryview) -> bytes:
        # With the name: an entry in the place of another one is damaged.
        place = f"{self._folder.rpartition('/')[2]}/{name}/"
        signed = hmac.new(self._key, place.encode(), "sha256")
        signed.update(content)
        return signed.digest()

    def _make_room_if_due(self) -> None:
        if self._unchecked < self._limit // _CHECKS:
            return
        self._unchecked = 0
        self._files.invalidate_cache(self._root)
        entries = []
        for path, details in self._files.find(self._root, detail=True).items():
            if _ENTRY.search(path):
                entries.append((_time_of(details), details["size"], path))
        nbytes = sum(size for _, size, _ in entries)
        if nbytes <= self._limit:
            return
        for _, size, path in sorted(entries):
            if nbytes <= self._limit * _LEFT:
                return
            # Another process may have removed the file.
            with contextlib.suppress(Exception):
                self._files.rm_file(path)
            nbytes -= size

    def _warn(self, verb: str, error: Exception) -> None:
        """Warn once, since a folder that cannot be reached fails again and again."""
        if not self._has_warned:
            logger.warning(
                "blocks of the cache cannot be %s in cache.store (%s): they are computed instead",
                verb,
                _without_credentials(described(error)),
            )
        self._has_warned = True


@atexit.register
def finish_writing(seconds: float = 10.0) -> None:
    """Wait until the stores of this process have written all, at most for the given time."""
    end = time.monotonic() + seconds
    for store in list(_OPEN):
        store.finish(max(0.0, end - time.monotonic()))


def _queue_of_threads(store: StoredBlocks, name: str, count: int) -> SimpleQueue[_Call | None]:
    """Return a queue of calls for new threads, which end with the store."""
    calls: SimpleQueue[_Call | None] = SimpleQueue()
    for _ in range(count):
        # As a daemon, so that a folder that hangs keeps no process from ending.
        Thread(target=_make_calls, args=(calls,), daemon=True, name=name).start()
        weakref.finalize(store, calls.put, None)
    return calls


def _make_calls(calls: SimpleQueue[_Call | None]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        call()
        # The call holds the store, and with that the cache, while this thread waits.
        del call


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path of our folder there.

    Raises:
        ConfigError: the URL cannot be used.
    """
    # fsspec comes with torch, and few need the slow import.
    import fsspec

    try:
        files, path = fsspec.url_to_fs(os.path.expanduser(url))
        folder = f"{path.rstrip('/')}/{_FOLDER}"
        if _is_local(files):
            _make_own(Path(folder))
        else:
            files.makedirs(folder, exist_ok=True)
    # File systems may raise anything.
    except Exception as error:
        raise ConfigError(
            f"cache.store cannot be used: {_without_credentials(described(error))}: name a folder "
            "that this process may write to, or a URL of fsspec"
        ) from error
    return files, folder


def _is_local(files: Any) -> bool:
    return "file" in (files.protocol if isinstance(files.protocol, tuple) else (files.protocol,))


def _make_own(folder: Path) -> None:
    """Make a folder that nobody else may read.

    Raises:
        OSError: it cannot be made, or belongs to another user.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of mode 0700 of this user")


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
            make_key(own)
        return read_key(own)
    # There is no home folder, or it cannot be written to.
    except (InputError, RuntimeError, OSError) as error:
        raise ConfigError(f"cache.store_key cannot be used: {described(error)}") from error


def make_key(file: Path) -> None:
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


def _time_of(details: Mapping[str, Any]) -> float:
    """Return the time of the last use of a file, or of its writing, if a listing tells it."""
    for name in ("mtime", "LastModified", "last_modified", "created"):
        told = details.get(name)
        if isinstance(told, datetime):
            return told.timestamp()
        if isinstance(told, (int, float)):
            return float(told)
    return 0.0


def _without_credentials(text: str) -> str:
    """Return a text without the names and passwords of URLs."""
    return _CREDENTIALS.sub("", text)


def _numbers(part: Tensor) -> Tensor:
    """Return the numbers of a part of a cache, or the scales of its codes."""
    if part.dtype not in LARGEST_CODES:
        return part
    return part[..., -SCALE_BYTES:].contiguous().view(torch.float32)


def _bytes_of_block(cache: Tensor) -> int:
    return cache[0].numel() * cache.element_size()
