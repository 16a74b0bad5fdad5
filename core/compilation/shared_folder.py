"""``SharedFolder``: a folder of fsspec with cache entries for several machines of one kind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.compilation.bundles import export_entries, import_entries, read_key
from opgraft.compilation.cache import KEY, CompilationCache
from opgraft.errors import CacheEntryError, ConfigError, InputError

_SUFFIX = ".bundle"


class SharedFolder:
    """A folder of bundles with one entry each. One key signs all bundles.

    A failure of the folder stops no program: the model is compiled, and a warning says why.

    Args:
        url: a URL of fsspec, such as ``s3://bucket/folder``; or a path.
        key: the key of the signatures.
    """

    @classmethod
    def of(cls, url: str, key: str | None) -> SharedFolder:
        """Return the folder of the settings ``cache_remote`` and ``cache_key``.

        Raises:
            ConfigError: there is no key, or the file of the key cannot be used.
        """
        if key is None:
            raise ConfigError(
                "compilation_config.cache_remote is set, and compilation_config.cache_key is not: "
                "what is there is code, which is taken only if it is signed; name a file with the "
                "key of those who share the folder"
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
        """Take an entry from the folder, if the cache has none."""
        if self._fails or key in cache:
            return
        try:
            import_entries(cache, self._file(key), key=self._key, only={key})
        except InputError as error:
            # Nobody has shared the entry yet.
            if not isinstance(error.__cause__, FileNotFoundError):
                self._tell(error)

    def share(self, cache: CompilationCache, keys: Iterable[str]) -> None:
        """Put entries of a cache into the folder."""
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
        """Warn of a failure. After a failure of the network, the folder is not used again."""
        logger.warning("the folder of compiled code that caches share: %s", described(error))
        self._fails = error.__cause__ is not None


def count_entries(url: str) -> int:
    """Count the entries of a shared folder.

    Raises:
        InputError: the folder cannot be read.
    """
    # fsspec comes with torch, and few need the slow import.
    import fsspec

    try:
        system, path = fsspec.url_to_fs(url)
        names = [name.rpartition("/")[2] for name in system.ls(path, detail=False)]
    # File systems may raise anything.
    except Exception as error:
        raise InputError(f"the folder {url} cannot be read: {described(error)}") from error
    bundles = [name for name in names if name.endswith(_SUFFIX)]
    keys = [KEY.fullmatch(name.removesuffix(_SUFFIX)) for name in bundles]
    return len([key for key in keys if key])
