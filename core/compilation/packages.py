"""Packages: the code of graphs in the cache, by what the graphs compute."""

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
    from opgraft.compilation.shared_folder import SharedFolder  # which few have

_CODE = "code.pt2"


@contextlib.contextmanager
def temporary() -> Iterator[Packages | None]:
    """Give packages that nobody else has, and that go once they are loaded; ``None`` where no file can be made."""
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
        made: keys of packages, and of what is made of them, that were written here.

    Args:
        cache: where they are.
        environment: what the code depends on besides the graph.
        remote: the folder that other caches share with this one.
    """

    def __init__(
        self, cache: CompilationCache, environment: Any, remote: SharedFolder | None = None
    ) -> None:
        self.cache, self.environment, self.remote = cache, environment, remote
        self.made: list[str] = []

    def fetch(self, key: str) -> None:
        """Take an entry that the cache has not, if others have shared it; not while its lock is held."""
        if self.remote is not None:
            self.remote.fetch(self.cache, key)

    def share(self) -> None:
        """Share with others what was written here."""
        if self.remote is not None:
            self.remote.share(self.cache, self.made)

    def key_of(self, graph: fx.GraphModule, sizes: range) -> str:
        """Return the key of a lowered graph for some sizes of the batch, making its package where there is none.

        Raises:
            CacheEntryError: it has no package.
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
            except Exception as error:  # whatever compilers raise, and a full disk
                raise CacheEntryError(f"the code cannot be written: {described(error)}") from error
            self.made.append(key)
        return key

    def file_of(self, key: str) -> Path:
        """Return the file of a package.

        Raises:
            CacheEntryError: it is damaged or gone.
        """
        self.fetch(key)
        found = self.cache.read(key)
        if found is None:
            raise CacheEntryError("its code is gone")
        return found[0] / _CODE

    def runner_of(self, key: str, graph: fx.GraphModule) -> Runner:
        """Return what runs a lowered graph, from its package.

        Raises:
            CacheEntryError: it cannot be loaded.
        """
        held = {
            str(node.target): attribute_of(graph, node)
            for node in graph.graph.nodes
            if node.op == "get_attr"
        }
        return loaded(
            self.file_of(key),
            {name: value for name, value in held.items() if isinstance(value, Tensor)},
        )

    def _usable(self, key: str) -> bool:
        try:
            return self.cache.read(key) is not None
        except CacheEntryError:
            return False


def _expect_tensors(graph: fx.GraphModule) -> None:
    """Refuse results that are constants or sizes, which code in a package would return as tensors."""
    (end,) = (node for node in graph.graph.nodes if node.op == "output")
    if not all(
        isinstance(each, fx.Node) and isinstance(each.meta.get("val"), Tensor)
        for each in end.args[0]
    ):
        raise CacheEntryError(
            "the model returns something besides tensors, which its code would not"
        )


def nodes_of(graph: fx.GraphModule) -> Iterator[list[str]]:
    """Yield the nodes of a graph and of those inside it, as the branches of ``torch.cond``, with what they compute."""
    for name, part in graph.named_modules(remove_duplicate=False):
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                yield [name, str(node.format_node()), str(layout_of(node.meta.get("val")))]


def loaded(file: Path, tensors: Mapping[str, Tensor]) -> Runner:
    """Load a package for the tensors of a model.

    Raises:
        CacheEntryError: it cannot be loaded.
    """
    try:
        return Package(file, tensors)
    except Exception as error:  # whatever torch raises
        raise CacheEntryError(f"the code cannot be loaded: {described(error)}") from error
