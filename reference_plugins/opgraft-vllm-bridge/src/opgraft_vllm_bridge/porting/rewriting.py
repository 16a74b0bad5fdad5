"""A file of Python, rewritten: imports of vLLM's names become those of their counterparts, the rest is marked.

What has no counterpart stays where it is, below a comment; an import of it becomes a comment, so that the others of the
file can be tried. Only text is read and written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)
from opgraft.plugins.bridges import Uncovered

from opgraft_vllm_bridge.counterparts import PLATFORM, hint, home_of
from opgraft_vllm_bridge.porting.platform_class import PlatformMembers, is_platform

_PATH = re.compile(r"vllm(\.\w+)+|vllm::\w+")
_CURRENT = "vllm.platforms.current_platform"


@dataclass
class RewrittenFile:
    """The new text of a file, and what of it has no counterpart."""

    code: str
    uncovered: list[Uncovered]


def rewrite(
    tree: cst.Module, file: str, platform: str, moved: Collection[str] = ()
) -> RewrittenFile:
    """Rewrite a file; ``platform`` is the name that a platform class gets, ``moved`` are texts that others replace."""
    wrapper = MetadataWrapper(tree)
    rewriter = _Rewriter(file, platform, moved)
    module = wrapper.visit(rewriter)
    needed: list[tuple[str, str | None]] = (
        [("__future__", "annotations")] if rewriter.postponed else []
    )
    if rewriter.members:
        needed += [("torch", None), ("opgraft", "DeviceCapability"), ("opgraft", "DeviceMemory")]
    context = CodemodContext()
    for home, name in needed:
        AddImportsVisitor.add_needed_import(context, home, name)
    module = AddImportsVisitor(context).transform_module(module) if needed else module
    return RewrittenFile(module.code, sorted(rewriter.uncovered, key=lambda one: one.line))


class _Rewriter(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self, file: str, platform: str, moved: Collection[str]) -> None:
        super().__init__()
        self.file, self.platform, self.moved = file, platform, moved
        self.uncovered: list[Uncovered] = []
        self.postponed = False
        """True where an annotation has a name that nothing defines any more: none may be evaluated then."""
        self._marked_before: list[int] = []
        self._statements: list[cst.CSTNode] = []
        self._marks: dict[cst.CSTNode, list[str]] = {}
        self.members: dict[cst.CSTNode, PlatformMembers] = {}
        self._elifs: set[cst.CSTNode | None] = set()
        self._pending: list[list[cst.EmptyLine]] = []
        """For each block that is open, comments in the place of imports, for the statement that comes next."""

    # Marks of statements.

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Module, cst.IndentedBlock)):
            self._pending.append([])
        elif isinstance(node, cst.BaseStatement):
            self._statements.append(node)
        return super().on_visit(node)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        left = super().on_leave(original_node, updated_node)
        if isinstance(original_node, (cst.Module, cst.IndentedBlock)):
            return _with_rest(left, self._pending.pop())
        if not isinstance(original_node, cst.BaseStatement):
            return left
        self._statements.pop()
        marks = [_comment(text) for text in self._marks.pop(original_node, ())]
        if left is cst.RemovalSentinel.REMOVE:
            self._pending[-1] += marks
            return left
        first, *others = left if isinstance(left, cst.FlattenSentinel) else [left]
        pending = [] if original_node in self._elifs else self._pending[-1]
        first = first.with_changes(leading_lines=[*pending, *first.leading_lines, *marks])
        pending.clear()
        return cst.FlattenSentinel([first, *others]) if others else first

    def visit_If(self, node: cst.If) -> None:
        self._elifs.add(node.orelse)

    def _mark(self, node: cst.CSTNode, name: str, text: str = "", told: str = "") -> None:
        """List what has no counterpart, and write its name, or a text, above the statement that is open."""
        line = self.get_metadata(PositionProvider, node).start.line
        self.uncovered.append(Uncovered(self.file, line, name, hint(name) or told))
        marks = self._marks.setdefault(self._statements[-1], [])
        if (text or name) not in marks:
            marks.append(text or name)

    # Imports.

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: Any
    ) -> Any:
        kept = self._kept(original_node, updated_node)
        if not kept:
            self._pending[-1] += updated_node.leading_lines
            return cst.RemovalSentinel.REMOVE
        if kept == list(updated_node.body):
            return updated_node
        others = [cst.SimpleStatementLine([small]) for small in kept[1:]]
        return cst.FlattenSentinel([updated_node.with_changes(body=kept[:1]), *others])

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: Any
    ) -> Any:
        return updated_node.with_changes(
            body=self._kept(original_node, updated_node) or [cst.Pass()]
        )

    def _kept(self, original: Any, updated: Any) -> list[cst.BaseSmallStatement]:
        """Return the statements that a line becomes."""
        pairs = [
            (small, self._imported(before))
            for before, small in zip(original.body, updated.body, strict=True)
        ]
        if all(imported is None for _, imported in pairs):
            return list(updated.body)
        kept = [
            each
            for small, imported in pairs
            for each in ([small] if imported is None else imported)
        ]
        return [small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for small in kept]

    def _imported(self, small: cst.BaseSmallStatement) -> list[cst.BaseSmallStatement] | None:
        """Return what an import of vLLM becomes, ``None`` for any other statement."""
        if isinstance(small, cst.Import):
            return self._import(small)
        module = (
            get_full_name_for_node(small.module)
            if isinstance(small, cst.ImportFrom) and small.module
            else None
        )
        if (
            not isinstance(small, cst.ImportFrom)
            or small.relative
            or not module
            or not _of_vllm(module)
        ):
            return None
        if isinstance(small.names, cst.ImportStar):
            self._mark(small, f"{module}.*", f"from {module} import *")
            return []
        homes: dict[str, list[cst.ImportAlias]] = {}
        for alias in small.names:
            name = str(alias.evaluated_name)
            home = home_of(module, name)
            if home is None:
                self._mark(alias, f"{module}.{name}", f"from {module} import {_spelled(alias)}")
            else:
                homes.setdefault(home, []).append(
                    alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)
                )
        return [
            cst.ImportFrom(module=cst.parse_expression(home), names=names)  # type: ignore[arg-type]  # a dotted name
            for home, names in homes.items()
        ]

    def _import(self, small: cst.Import) -> list[cst.BaseSmallStatement] | None:
        of_vllm = [alias for alias in small.names if _of_vllm(str(alias.evaluated_name))]
        if not of_vllm:
            return None
        for alias in of_vllm:
            self._mark(alias, str(alias.evaluated_name), f"import {_spelled(alias)}")
        others = [
            a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in small.names if a not in of_vllm
        ]
        return [small.with_changes(names=others)] if others else []

    # Uses.

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return not self._used(node)

    def visit_Name(self, node: cst.Name) -> None:
        self._used(node)

    def _used(self, node: cst.Attribute | cst.Name) -> bool:
        """Mark a use of what has no counterpart; tell whether there is nothing more to see in it."""
        name = self._qualified(node)
        if name is None:
            return False
        module, _, last = name.rpartition(".")
        if home_of(module, last):
            return isinstance(node, cst.Name)
        inner = isinstance(node, cst.Attribute) and self._qualified(node.value)
        if inner and home_of(*_split(inner)):
            if inner == _CURRENT and last not in PLATFORM:
                self._mark(node, name)
            return False
        self._mark(node, name)
        return True

    def _qualified(self, node: cst.CSTNode) -> str | None:
        found = self.get_metadata(QualifiedNameProvider, node, frozenset()) or frozenset()
        names = [
            one.name
            for one in found
            if one.source is QualifiedNameSource.IMPORT and _of_vllm(one.name)
        ]
        return min(names, default=None)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        if get_full_name_for_node(original_node) == "torch.ops.vllm":
            return updated_node.with_changes(attr=cst.Name("opgraft"))
        if (
            self._qualified(original_node.value) == _CURRENT
            and original_node.attr.value in PLATFORM
        ):
            return updated_node.with_changes(attr=cst.Name(PLATFORM[original_node.attr.value]))
        return updated_node

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        return (
            cst.Call(updated_node) if self._qualified(original_node) == _CURRENT else updated_node
        )

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        if (
            original_node.keyword is not None
            and original_node.keyword.value == "_decorated_layer_cls"
        ):
            return updated_node.with_changes(keyword=cst.Name("_decorated_op_cls"))
        return updated_node

    def visit_Annotation(self, node: cst.Annotation) -> None:
        self._marked_before.append(len(self.uncovered))

    def leave_Annotation(
        self, original_node: cst.Annotation, updated_node: cst.Annotation
    ) -> cst.Annotation:
        if len(self.uncovered) > self._marked_before.pop():
            self.postponed = True
        return updated_node

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        text = node.evaluated_value
        if isinstance(text, str) and _PATH.fullmatch(text) and text not in self.moved:
            self._mark(node, text)

    # Platforms.

    def visit_Assign(self, node: cst.Assign) -> bool:
        return get_full_name_for_node(node.targets[0].target) != "_enum"

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        if not any(is_platform(self._qualified(base.value)) for base in node.bases):
            return
        self.members[node] = PlatformMembers(self.platform, node)
        for method in self.members[node].uncalled():
            self._statements.append(method)
            name = f"vllm.platforms.Platform.{method.name.value}"
            self._mark(method.name, name, told="opgraft does not call it")
            self._statements.pop()

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        members = self.members.get(original_node)
        return members.added_to(updated_node) if members else updated_node


def _with_rest(block: Any, rest: Sequence[cst.EmptyLine]) -> Any:
    """Put comments that no statement comes after at the end of a block, which cannot be empty."""
    if isinstance(block, cst.IndentedBlock) and not block.body:
        return block.with_changes(body=[cst.SimpleStatementLine([cst.Pass()], leading_lines=rest)])
    return block.with_changes(footer=[*rest, *block.footer]) if rest else block


def _comment(text: str) -> cst.EmptyLine:
    return cst.EmptyLine(comment=cst.Comment(f"# opgraft: no counterpart: {text}"))


def _of_vllm(name: str) -> bool:
    return name.partition(".")[0] == "vllm"


def _split(name: str) -> tuple[str, str]:
    module, _, last = name.rpartition(".")
    return module, last


def _spelled(alias: cst.ImportAlias) -> str:
    name = str(alias.evaluated_name)
    return f"{name} as {alias.evaluated_alias}" if alias.evaluated_alias else name
