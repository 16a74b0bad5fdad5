"""Packages: the code of graphs in the cache. Equal graphs share a package."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgraft.base.text import described
from opgraft.compat.ahead_of_time import Package, write_package
from opgraft.compilation.backends import Runner
from opgraft.compilation.cache import CompilationCache
from opgraft.compilation.key import digest
from opgraft.compilation.nodes import attribute_of, layout_of
from opgraft.errors import CacheEntryError
from torch import Tensor, fx

if TYPE_CHECKING:
    # Few share a folder, and the import is slow.
    from opgraft.compilation.shared_folder import SharedFolder

_CODE = "code.pt2"


@contextlib.contextmanager
def temporary() -> Iterator[Packages | None]:
    """Yield packages in a temporary folder, or ``None`` if no folder can be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="opgraft-", ignore_cleanup_errors=True)
    except OSError:
        yield None
        return
    with folder as name:
        yield Packages(CompilationCache(Path(name), sys.maxsize), "")


class Packages:
    """The second level of the cache: a package for each graph.

    Attributes:
        made: the keys of entries and packages that were written here.

    Args:
        cache: the cache with the packages.
        environment: data that the code depends on besides the graph.
        remote: a folder with entries of other caches.
    """

    def __init__(
        self, cache: CompilationCache, environment: Any, remote: SharedFolder | None = None
    ) -> None:
        self.cache = cache
        self.environment = environment
        self.remote = remote
        self.made: list[str] = []

    def fetch(self, key: str) -> None:
        """Take an entry from the shared folder, if the cache has none.

        The caller does not hold the lock of the entry.
        """
        if self.remote is not None:
            self.remote.fetch(self.cache, key)

    def share(self) -> None:
        """Put the entries written here into the shared folder."""
        if self.remote is not None:
            self.remote.share(self.cache, self.made)

    def key_of(self, graph: fx.GraphModule, sizes: range) -> str:
        """Return the key of a lowered graph for some sizes of the batch; make a missing package.

        Raises:
            CacheEntryError: no package can be made.
        """
        _expect_tensors(graph)
        key = digest([self.environment, [sizes.start, sizes.stop], *nodes_of(graph)])
        self.fetch(key)
        with self.cache.locked(key):
            if self._usable(key):
                return key
            example = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
            try:
                with self.cache.written(key) as (folder, _):
                    write_package(graph, example, folder / _CODE)
            # Compilers may raise anything, and the disk may be full.
            except Exception as error:
                raise CacheEntryError(f"the code cannot be written: {described(error)}") from error
            self.made.append(key)
        return key

    def file_of(self, key: str) -> Path:
        """Return the file of a package.

        Raises:
            CacheEntryError: the package is damaged or gone.
        """
        self.fetch(key)
        found = self.cache.read(key)
        if found is None:
            raise CacheEntryError("its code is gone")
        return found[0] / _CODE

    def runner_of(self, key: str, graph: fx.GraphModule) -> Runner:
        """Return the function that runs a lowered graph, from a package.

        Raises:
            CacheEntryError: the package cannot be loaded.
        """
        tensors = {}
        for node in graph.graph.nodes:
            if node.op != "get_attr":
                continue
            value = attribute_of(graph, node)
            if isinstance(value, Tensor):
                tensors[str(node.target)] = value
        return loaded(self.file_of(key), tensors)

    def _usable(self, key: str) -> bool:
        try:
            return self.cache.read(key) is not None
        except CacheEntryError:
            return False


def _expect_tensors(graph: fx.GraphModule) -> None:
    """Check the results of a graph: a package would return constants and sizes as tensors.

    Raises:
        CacheEntryError: a result is no tensor.
    """
    (end,) = (node for node in graph.graph.nodes if node.op == "output")
    for each in end.args[0]:
        if not isinstance(each, fx.Node) or not isinstance(each.meta.get("val"), Tensor):
            raise CacheEntryError(
                "the model returns something besides tensors, which its code would not"
            )


def nodes_of(graph: fx.GraphModule) -> Iterator[list[str]]:
    """Yield the texts of a graph's nodes: the graph's name, the call, and the result's layout.

    The branches of ``torch.cond`` are graphs inside a graph, and follow.
    """
    for name, part in graph.named_modules(remove_duplicate=False):
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                yield [name, str(node.format_node()), str(layout_of(node.meta.get("val")))]


def loaded(file: Path, tensors: Mapping[str, Tensor]) -> Runner:
    """Load a package for the tensors of a model.

    Raises:
        CacheEntryError: the package cannot be loaded.
    """
    try:
        return Package(file, tensors)
    # torch may raise anything for a damaged file.
    except Exception as error:
        raise CacheEntryError(f"the code cannot be loaded: {described(error)}") from error
