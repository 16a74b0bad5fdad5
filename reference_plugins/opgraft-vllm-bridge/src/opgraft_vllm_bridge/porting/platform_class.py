"""Add the members of opgraft's platforms to a platform class of vLLM."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import libcst as cst
from libcst.helpers import get_full_name_for_node

_BASES = frozenset({"vllm.platforms.Platform", "vllm.platforms.interface.Platform"})
_READ = frozenset(
    {"get_device_name", "get_device_total_memory", "manual_seed_all", "supported_dtypes"}
)
"""Methods of vLLM's ``Platform`` that the new members call."""

_RENAMED = {
    "dist_backend": "distributed_backend",
    "simple_compile_backend": "compile_backend",
    "device_control_env_var": "visibility_variable",
}
"""Attribute of vLLM's ``Platform`` → attribute of opgraft's."""

_MEMBERS = {
    "dispatch_chain": 'dispatch_chain = ("native",)',
    "device_count": """
        def device_count(self):
            return torch.get_device_module(self.device_type).device_count()
        """,
    "capability": """
        def capability(self, index=0):
            return DeviceCapability({name}, {dtypes})
        """,
    "memory": """
        def memory(self, index=0):
            total = self.get_device_total_memory(index)
            return DeviceMemory(total, total)  # as far as vLLM's platforms tell, all is free
        """,
    "synchronize": """
        def synchronize(self, index=0):
            torch.get_device_module(self.device_type).synchronize(index)
        """,
    "manual_seed": """
        def manual_seed(self, seed):
            {seed}
        """,
}
"""Member of opgraft's ``Platform`` → source that defines it by members of vLLM's."""


def is_platform(name: str | None) -> bool:
    """Return True for the qualified name of vLLM's ``Platform``."""
    return name in _BASES


class PlatformMembers:
    """The new members of a platform class, and its methods without a use in opgraft.

    Args:
        name: the name of the platform.
        cls: the class.
    """

    def __init__(self, name: str, cls: cst.ClassDef) -> None:
        self._name = name
        self._methods: dict[str, cst.FunctionDef] = {}
        for statement in _statements(cls):
            if isinstance(statement, cst.FunctionDef):
                self._methods[statement.name.value] = statement
        self._attributes = set(_attributes(cls))

    def uncalled(self) -> list[cst.FunctionDef]:
        """Return the public methods that opgraft does not call, in the order of the class."""
        return [
            method
            for name, method in self._methods.items()
            if name not in _READ and name not in _MEMBERS and not name.startswith("_")
        ]

    def added_to(self, cls: cst.ClassDef) -> cst.ClassDef:
        """Return the class with the members at its end. Members that the class defines stay."""
        body = cst.ensure_type(cls.body, cst.IndentedBlock)
        kept = [one for one in body.body if not _is_enum(one)]
        return cls.with_changes(body=body.with_changes(body=[*kept, *self._made()]))

    def _made(self) -> Iterator[cst.BaseStatement]:
        """Yield the new members, below a comment."""
        lines = [f"name = {self._name!r}"]
        for theirs, ours in _RENAMED.items():
            if theirs in self._attributes:
                lines.append(f"{ours} = {theirs}")
        values = self._expressions()
        for name in self._wanted():
            text = textwrap.dedent(_MEMBERS[name]).strip("\n")
            lines.append(text.format(**values))
        first, *rest = cst.parse_module("\n".join(lines)).body
        blank = cst.EmptyLine(indent=False)
        title = cst.EmptyLine(comment=cst.Comment("# opgraft: what it asks for"))
        yield first.with_changes(leading_lines=[blank, title])
        for statement in rest:
            if isinstance(statement, cst.FunctionDef):
                yield statement.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
            else:
                yield statement

    def _wanted(self) -> list[str]:
        """Return the names of the members that the class lacks."""
        own = {*self._methods, *self._attributes}
        wanted = [name for name in _MEMBERS if name not in own]
        # Without the total, memory stays abstract: the error of the constructor names it.
        if "get_device_total_memory" not in own and "memory" in wanted:
            wanted.remove("memory")
        return wanted

    def _expressions(self) -> dict[str, str]:
        """Return the expressions for _MEMBERS, by vLLM's methods if the class has them."""
        choices = {
            "name": ("get_device_name", "self.get_device_name(index)", "self.name"),
            "dtypes": (
                "supported_dtypes",
                "tuple(self.supported_dtypes)",
                "(torch.float32, torch.bfloat16, torch.float16)",
            ),
            "seed": ("manual_seed_all", "self.manual_seed_all(seed)", "torch.manual_seed(seed)"),
        }
        return {
            key: theirs if method in self._methods else default
            for key, (method, theirs, default) in choices.items()
        }


def _statements(cls: cst.ClassDef) -> Iterator[cst.BaseStatement | cst.BaseSmallStatement]:
    """Yield the statements of a class, each of those in one line by itself."""
    for statement in cls.body.body:
        if isinstance(statement, cst.SimpleStatementLine):
            yield from statement.body
        else:
            yield statement


def _attributes(cls: cst.ClassDef) -> Iterator[str]:
    """Yield the names that a class assigns."""
    for statement in _statements(cls):
        targets: list[cst.CSTNode] = []
        if isinstance(statement, cst.Assign):
            targets = [each.target for each in statement.targets]
        elif isinstance(statement, cst.AnnAssign):
            targets = [statement.target]
        yield from filter(None, map(get_full_name_for_node, targets))


def _is_enum(statement: cst.CSTNode) -> bool:
    """Return True for ``_enum = …``, the kind of a vLLM platform. opgraft has no kinds."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    first = statement.body[0]
    if not isinstance(first, cst.Assign):
        return False
    return get_full_name_for_node(first.targets[0].target) == "_enum"
