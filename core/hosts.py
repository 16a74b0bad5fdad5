"""Parts for bridges to other plugin hosts, such as ``opgraft_vllm_bridge``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Uncovered:
    """A use of a name that opgraft has no counterpart of.

    Attributes:
        file: a path below the plugin's folder.
        line: of the file as it was read.
        name: in the other host.
        hint: the next step; empty if none is known.
    """

    file: str
    line: int
    name: str
    hint: str

    def __str__(self) -> str:
        hint = f": {self.hint}" if self.hint else ""
        return f"{self.file}:{self.line}: {self.name}{hint}"


@dataclass
class Ported:
    """A plugin of another host, rewritten for opgraft.

    Attributes:
        name: of the plugin.
        guide: the file that says what is left to do.
        files: contents by path.
        uncovered: the uses that have no counterpart.
    """

    name: str
    guide: str
    files: dict[str, bytes] = field(default_factory=dict)
    uncovered: list[Uncovered] = field(default_factory=list)
