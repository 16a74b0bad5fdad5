"""Rewrite one file of a plugin.

An import from vLLM becomes an import of opgraft's counterpart. If a name has no counterpart, the
code that uses the name stays, below a comment. An import of such a name becomes a comment, so that
the other code of the file can be tried. The file is never executed.
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
    """The new text of a file, and the names in it without a counterpart."""

    code: str
    uncovered: list[Uncovered]


def rewrite(
    tree: cst.Module, file: str, platform: str, moved: Collection[str] = ()
) -> RewrittenFile:
    """Return a file with opgraft's names.

    Args:
        tree: the file.
        file: the path of the file, for messages.
        platform: the name of the platform, for a platform class.
        moved: texts that are no names of vLLM here, because the port replaces them elsewhere.
    """
    wrapper = MetadataWrapper(tree)
    rewriter = _Rewriter(file, platform, moved)
    module = wrapper.visit(rewriter)
    needed: list[tuple[str, str | None]] = []
    if rewriter.postponed:
        needed.append(("__future__", "annotations"))
    if rewriter.members:
        needed += [("torch", None), ("opgraft", "DeviceCapability"), ("opgraft", "DeviceMemory")]
    if needed:
        context = CodemodContext()
        for home, name in needed:
            AddImportsVisitor.add_needed_import(context, home, name)
        module = AddImportsVisitor(context).transform_module(module)
    return RewrittenFile(module.code, sorted(rewriter.uncovered, key=lambda one: one.line))


class _Rewriter(cst.CSTTransformer):
    """Rewrites the syntax tree of one file.

    Attributes:
        uncovered: the names without a counterpart.
        postponed: whether an annotation has such a name. Then no annotation may be evaluated.
        members: platform class → the members that the class gets.
    """

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self, file: str, platform: str, moved: Collection[str]) -> None:
        super().__init__()
        self.file = file
        self.platform = platform
        self.moved = moved
        self.uncovered: list[Uncovered] = []
        self.postponed = False
        self.members: dict[cst.CSTNode, PlatformMembers] = {}
        self._marked_before: list[int] = []
        """For each open annotation, the number of uncovered names before."""
        self._statements: list[cst.CSTNode] = []
        """The open statements, the innermost last."""
        self._marks: dict[cst.CSTNode, list[str]] = {}
        """Statement → the comments to write above."""
        self._elifs: set[cst.CSTNode | None] = set()
        self._pending: list[list[cst.EmptyLine]] = []
        """For each open block, the comments for the next statement, in place of imports."""

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
        # Comments that wait belong above the whole statement, not above its elif.
        pending = [] if original_node in self._elifs else self._pending[-1]
        first = first.with_changes(leading_lines=[*pending, *first.leading_lines, *marks])
        pending.clear()
        if others:
            return cst.FlattenSentinel([first, *others])
        return first

    def visit_If(self, node: cst.If) -> None:
        self._elifs.add(node.orelse)

    def _mark(self, node: cst.CSTNode, name: str, text: str = "", advice: str = "") -> None:
        """Note a name without a counterpart, and write a comment above the open statement.

        Args:
            node: the place of the name.
            name: the qualified name.
            text: the text of the comment, if it is not the name.
            advice: the next step, if no hint is known.
        """
        line = self.get_metadata(PositionProvider, node).start.line
        self.uncovered.append(Uncovered(self.file, line, name, hint(name) or advice))
        marks = self._marks.setdefault(self._statements[-1], [])
        comment = text or name
        if comment not in marks:
            marks.append(comment)

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
            # The comments of a removed line stay.
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
        """Return the statements that replace those of a line."""
        kept: list[cst.BaseSmallStatement] = []
        has_changed = False
        for before, small in zip(original.body, updated.body, strict=True):
            replacement = self._replacement(before)
            has_changed |= replacement is not None
            kept += [small] if replacement is None else replacement
        if not has_changed:
            return list(updated.body)
        return [small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for small in kept]

    def _replacement(self, small: cst.BaseSmallStatement) -> list[cst.BaseSmallStatement] | None:
        """Return the imports that replace an import of vLLM, or None for another statement."""
        if isinstance(small, cst.Import):
            return self._without_vllm(small)
        if not isinstance(small, cst.ImportFrom) or small.relative or not small.module:
            return None
        module = get_full_name_for_node(small.module)
        if not module or not _of_vllm(module):
            return None
        if isinstance(small.names, cst.ImportStar):
            self._mark(small, f"{module}.*", f"from {module} import *")
            return []
        return self._from_counterparts(module, small.names)

    def _from_counterparts(
        self, module: str, names: Sequence[cst.ImportAlias]
    ) -> list[cst.BaseSmallStatement]:
        """Return imports of these names from opgraft, and mark names without a counterpart."""
        homes: dict[str, list[cst.ImportAlias]] = {}
        for alias in names:
            name = str(alias.evaluated_name)
            home = home_of(module, name)
            if home is None:
                self._mark(alias, f"{module}.{name}", f"from {module} import {_spelled(alias)}")
                continue
            alone = alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)
            homes.setdefault(home, []).append(alone)
        imports: list[cst.BaseSmallStatement] = []
        for home, aliases in homes.items():
            dotted: Any = cst.parse_expression(home)
            imports.append(cst.ImportFrom(module=dotted, names=aliases))
        return imports

    def _without_vllm(self, small: cst.Import) -> list[cst.BaseSmallStatement] | None:
        """Return an import without modules of vLLM, or None if it has none."""
        of_vllm = [alias for alias in small.names if _of_vllm(str(alias.evaluated_name))]
        if not of_vllm:
            return None
        for alias in of_vllm:
            self._mark(alias, str(alias.evaluated_name), f"import {_spelled(alias)}")
        others = []
        for alias in small.names:
            if alias not in of_vllm:
                others.append(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        return [small.with_changes(names=others)] if others else []

    # Uses.

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return not self._used(node)

    def visit_Name(self, node: cst.Name) -> None:
        self._used(node)

    def _used(self, node: cst.Attribute | cst.Name) -> bool:
        """Mark a use of a name without a counterpart. Return False to visit the node's children."""
        name = self._qualified(node)
        if name is None:
            return False
        module, last = _split(name)
        if home_of(module, last):
            return isinstance(node, cst.Name)
        owner = self._qualified(node.value) if isinstance(node, cst.Attribute) else None
        # An attribute of a counterpart is the counterpart's own, save on the current platform.
        if owner and home_of(*_split(owner)):
            if owner == _CURRENT and last not in PLATFORM:
                self._mark(node, name)
            return False
        self._mark(node, name)
        return True

    def _qualified(self, node: cst.CSTNode) -> str | None:
        """Return the qualified name of an imported name of vLLM, or None for another node."""
        found = self.get_metadata(QualifiedNameProvider, node, frozenset()) or frozenset()
        imported = [one.name for one in found if one.source is QualifiedNameSource.IMPORT]
        # Two branches may import a name from two modules: take the same one in every run.
        return min(filter(_of_vllm, imported), default=None)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Rename ``torch.ops.vllm``, and attributes of the current platform."""
        if get_full_name_for_node(original_node) == "torch.ops.vllm":
            return updated_node.with_changes(attr=cst.Name("opgraft"))
        ours = PLATFORM.get(original_node.attr.value)
        if ours and self._qualified(original_node.value) == _CURRENT:
            return updated_node.with_changes(attr=cst.Name(ours))
        return updated_node

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        """Call ``current_platform``: an object in vLLM is a function in opgraft."""
        if self._qualified(original_node) == _CURRENT:
            return cst.Call(updated_node)
        return updated_node

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        """Rename the argument of ``register_oot``."""
        keyword = original_node.keyword
        if keyword is not None and keyword.value == "_decorated_layer_cls":
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
        """Mark the methods of a platform class that opgraft does not call."""
        if not any(is_platform(self._qualified(base.value)) for base in node.bases):
            return
        members = PlatformMembers(self.platform, node)
        self.members[node] = members
        for method in members.uncalled():
            # The comment belongs above the method, not above the class.
            self._statements.append(method)
            name = f"vllm.platforms.Platform.{method.name.value}"
            self._mark(method.name, name, advice="opgraft does not call it")
            self._statements.pop()

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        members = self.members.get(original_node)
        if members is None:
            return updated_node
        return members.added_to(updated_node)


def _with_rest(block: Any, rest: Sequence[cst.EmptyLine]) -> Any:
    """Return a block with comments at its end. An empty block gets a ``pass``."""
    if isinstance(block, cst.IndentedBlock) and not block.body:
        statement = cst.SimpleStatementLine([cst.Pass()], leading_lines=rest)
        return block.with_changes(body=[statement])
    if not rest:
        return block
    return block.with_changes(footer=[*rest, *block.footer])


def _comment(text: str) -> cst.EmptyLine:
    return cst.EmptyLine(comment=cst.Comment(f"# opgraft: no counterpart: {text}"))


def _of_vllm(name: str) -> bool:
    return name.partition(".")[0] == "vllm"


def _split(name: str) -> tuple[str, str]:
    module, _, last = name.rpartition(".")
    return module, last


def _spelled(alias: cst.ImportAlias) -> str:
    """Return the source of an imported name, such as ``RMSNorm as Norm``."""
    name = str(alias.evaluated_name)
    if alias.evaluated_alias:
        return f"{name} as {alias.evaluated_alias}"
    return name
