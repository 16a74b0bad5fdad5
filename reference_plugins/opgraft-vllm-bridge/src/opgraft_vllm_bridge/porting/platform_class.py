"""A platform class of vLLM, given the members that opgraft asks for, made of those that it has."""

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
"""Members that opgraft asks for, by name, in terms of those that vLLM asks for."""


def is_platform(name: str | None) -> bool:
    """Tell whether a qualified name is that of vLLM's base of platforms."""
    return name in _BASES


class PlatformMembers:
    """The members that a class gets, and those that nobody calls any more."""

    def __init__(self, name: str, cls: cst.ClassDef) -> None:
        self._name = name
        self._methods = {
            one.name.value: one for one in _statements(cls) if isinstance(one, cst.FunctionDef)
        }
        self._attributes = set(_attributes(cls))

    def uncalled(self) -> list[cst.FunctionDef]:
        """List the methods that opgraft has no use for, in their order; what begins with an underscore is its own."""
        return [
            method
            for name, method in self._methods.items()
            if name not in _READ and name not in _MEMBERS and not name.startswith("_")
        ]

    def added_to(self, cls: cst.ClassDef) -> cst.ClassDef:
        """Return the class with the members at its end; those that it has already stay its own."""
        body = cst.ensure_type(cls.body, cst.IndentedBlock)
        kept = [one for one in body.body if not _is_enum(one)]
        return cls.with_changes(body=body.with_changes(body=[*kept, *self._made()]))

    def _made(self) -> Iterator[cst.BaseStatement]:
        lines = [f"name = {self._name!r}"]
        lines += [
            f"{ours} = {theirs}" for theirs, ours in _RENAMED.items() if theirs in self._attributes
        ]
        dtypes = "(torch.float32, torch.bfloat16, torch.float16)"
        values = {
            "name": "self.get_device_name(index)"
            if "get_device_name" in self._methods
            else "self.name",
            "dtypes": "tuple(self.supported_dtypes)"
            if "supported_dtypes" in self._methods
            else dtypes,
            "seed": "self.manual_seed_all(seed)"
            if "manual_seed_all" in self._methods
            else "torch.manual_seed(seed)",
        }
        own = {*self._methods, *self._attributes}
        wanted = {name: text for name, text in _MEMBERS.items() if name not in own}
        if "get_device_total_memory" not in own:
            wanted.pop("memory", None)  # abstract: making the platform says what is missing
        lines += [textwrap.dedent(text).strip("\n").format(**values) for text in wanted.values()]
        first, *rest = cst.parse_module("\n".join(lines)).body
        above = [
            cst.EmptyLine(indent=False),
            cst.EmptyLine(comment=cst.Comment("# opgraft: what it asks for")),
        ]
        yield first.with_changes(leading_lines=above)
        for each in rest:
            spaced = isinstance(each, cst.FunctionDef)
            yield each.with_changes(leading_lines=[cst.EmptyLine(indent=False)]) if spaced else each


def _statements(cls: cst.ClassDef) -> Iterator[cst.BaseStatement | cst.BaseSmallStatement]:
    for statement in cls.body.body:
        if isinstance(statement, cst.SimpleStatementLine):
            yield from statement.body
        else:
            yield statement


def _attributes(cls: cst.ClassDef) -> Iterator[str]:
    for statement in _statements(cls):
        if isinstance(statement, cst.Assign):
            yield from filter(
                None, (get_full_name_for_node(each.target) for each in statement.targets)
            )
        elif isinstance(statement, cst.AnnAssign):
            yield from filter(None, [get_full_name_for_node(statement.target)])


def _is_enum(statement: cst.CSTNode) -> bool:
    """Tell whether a line sets the kind of vLLM's platforms, which opgraft's have not."""
    first = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    return (
        isinstance(first, cst.Assign) and get_full_name_for_node(first.targets[0].target) == "_enum"
    )
