"""Packages: the code of graphs in the cache, by what the graphs compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgraft.compat.ahead_of_time import write_package
from opgraft.compilation.cache import CompilationCache
from opgraft.compilation.key import digest
from opgraft.compilation.nodes import layout_of
from opgraft.errors import CacheEntryError
from opgraft.text import described
from torch import fx

_CODE = "code.pt2"


@dataclass(frozen=True)
class Packages:
    """The second level of the cache: a package for each graph.

    Attributes:
        cache: where they are.
        environment: what the code depends on besides the graph.
    """

    cache: CompilationCache
    environment: Any

    def key_of(self, graph: fx.GraphModule, sizes: range) -> str:
        """Return the key of a lowered graph for some sizes of the batch, making its package where there is none.

        Raises:
            CacheEntryError: it has no package.
        """
        key = digest([self.environment, [sizes.start, sizes.stop], *nodes_of(graph)])
        with self.cache.locked(key):
            if self._usable(key):
                return key
            example = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
            try:
                with self.cache.written(key) as (folder, _):
                    write_package(graph, example, folder / _CODE)
            except Exception as error:  # whatever compilers raise, and a full disk
                raise CacheEntryError(f"the code cannot be written: {described(error)}") from error
        return key

    def file_of(self, key: str) -> Path:
        """Return the file of a package.

        Raises:
            CacheEntryError: it is damaged or gone.
        """
        found = self.cache.read(key)
        if found is None:
            raise CacheEntryError("its code is gone")
        return found[0] / _CODE

    def _usable(self, key: str) -> bool:
        try:
            return self.cache.read(key) is not None
        except CacheEntryError:
            return False


def nodes_of(graph: fx.GraphModule) -> Iterator[list[str]]:
    """Yield the nodes of a graph and of those inside it, as the branches of ``torch.cond``, with what they compute."""
    for name, part in graph.named_modules(remove_duplicate=False):
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                yield [name, str(node.format_node()), str(layout_of(node.meta.get("val")))]
