"""``SharedFolder``: entries of the caches of several machines of one kind, in a folder that fsspec reaches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from opgraft.base.text import described
from opgraft.compilation.bundles import export_entries, import_entries, read_key
from opgraft.compilation.cache import KEY, CompilationCache
from opgraft.errors import CacheEntryError, ConfigError, InputError
from opgraft.logger import logger

_SUFFIX = ".bundle"


class SharedFolder:
    """A folder of bundles, each of one entry, all signed with the key of those who share it.

    Nothing about it stops a program: what cannot be read is compiled, and a warning says why.

    Args:
        url: of fsspec, such as ``s3://bucket/folder``; or a path.
        key: what signs each bundle.
    """

    @classmethod
    def of(cls, url: str, key: str | None) -> SharedFolder:
        """Return the folder that settings name, with the file of a key.

        Raises:
            ConfigError: they name no key, or one that cannot be used.
        """
        if key is None:
            raise ConfigError(
                "compilation_config.cache_remote is set, and compilation_config.cache_key is not: what is there is "
                "code, which is taken only if it is signed; name a file with the key of those who share the folder"
            )
        try:
            return cls(url, read_key(Path(key).expanduser()))
        except (InputError, RuntimeError) as error:
            raise ConfigError(
                f"compilation_config.cache_key cannot be used: {described(error)}"
            ) from error

    def __init__(self, url: str, key: bytes) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._fails = False

    def fetch(self, cache: CompilationCache, key: str) -> None:
        """Take an entry that a cache has not, if the folder has it."""
        if self._fails or key in cache:
            return
        try:
            import_entries(cache, self._file(key), key=self._key, only={key})
        except InputError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                self._tell(error)

    def share(self, cache: CompilationCache, keys: Iterable[str]) -> None:
        """Put entries of a cache there."""
        for key in keys:
            if self._fails:
                return
            try:
                export_entries(cache, self._file(key), self._key, only={key})
            except (InputError, CacheEntryError) as error:
                self._tell(error)

    def _file(self, key: str) -> str:
        return f"{self.url}/{key}{_SUFFIX}"

    def _tell(self, error: Exception) -> None:
        """Warn of a failure; after one that has a cause, as of the network, the folder is let be."""
        logger.warning("the folder of compiled code that caches share: %s", described(error))
        self._fails = error.__cause__ is not None


def count_entries(url: str) -> int:
    """Count the entries of a folder that caches share.

    Raises:
        InputError: it cannot be read.
    """
    import fsspec  # which comes with torch, and is imported by few others

    try:
        system, path = fsspec.url_to_fs(url)
        names = [name.rpartition("/")[2] for name in system.ls(path, detail=False)]
    except Exception as error:  # whatever file systems raise
        raise InputError(f"the folder {url} cannot be read: {described(error)}") from error
    return sum(
        name.endswith(_SUFFIX) and KEY.fullmatch(name.removesuffix(_SUFFIX)) is not None
        for name in names
    )
