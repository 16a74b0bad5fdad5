"""The names of vLLM that have counterparts, compared with a vLLM that is installed, whose source is only read.

'make bench-engine' makes an environment that has one.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
from pathlib import Path

import pytest
from opgraft.porting.counterparts import COUNTERPARTS, HINTS, PLATFORM

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
INSTALLED = sorted((CACHE / "opgraft/envs").glob("vllm-*/lib/python3*/site-packages/vllm/__init__.py"))
SITE = INSTALLED[-1].parents[1] if INSTALLED else Path()
ROWS = [(module, name, home) for module, names in COUNTERPARTS.items() for name, home in names.items()]

needs_vllm = pytest.mark.skipif(not INSTALLED, reason="no vLLM is installed here; make bench-engine installs one")

OTHER_VERSIONS = {
    "vllm.model_executor.layers.fused_moe.FusedMoE",
    "vllm.model_executor.layers.fused_moe.layer.FusedMoE",
    "vllm.model_executor.layers.fused_moe.layer.UnquantizedFusedMoEMethod",
    "vllm.utils.direct_register_custom_op",
}
"""Names at which plugins for other versions find them."""

ATTENTION = {
    *("alibi_slopes", "use_alibi_sqrt", "cache_config", "quant_config", "per_layer_sliding_window", "attn_type"),
    *("kv_sharing_target_layer_name", "mm_prefix_clamp_sliding_window", "attn_backend", "head_size_v"),
}
LATENT = {
    *("dcp_q_replicate", "attn_backend", "use_sparse", "indexer", "topk_indices_buffer", "index_group_builder"),
    *("non_causal_multi_token_decode", "sliding_window", "prefill_backend_cls"),
}
DIFFERENT = {
    "Attention": ATTENTION,
    "LinearBase": {"bias", "tp_rank", "tp_size"},
    "MLAAttention": LATENT,
    "MultiHeadLatentAttentionWrapper": {"fuse_qkv_rmsnorm"},
    "VocabParallelEmbedding": {"reduce_results", "quant_method", "parallel_group"},
    "maybe_get_oot_by_class": {"class_type"},  # given by position
    "set_weight_attrs": {"weight_attrs"},  # likewise
}
"""Parameters that a counterpart does not take by these names."""


@functools.cache
def statements(module: str) -> tuple[dict[str, ast.stmt], list[ast.ImportFrom]]:
    """What a module defines, by name, and what it imports."""
    path = SITE / module.replace(".", "/")
    file = next((each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()), None)
    defined: dict[str, ast.stmt] = {}
    imports: list[ast.ImportFrom] = []
    waiting = list(ast.parse(file.read_text(encoding="utf-8")).body) if file else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined.update({target.id: node for target in targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.If | ast.Try):
            waiting += [*node.body, *node.orelse]
    return defined, imports


@functools.cache
def definition(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """The module and the statement that define a name, where an import leads to one."""
    defined, imports = statements(module)
    if name in defined:
        return module, defined[name]
    for node in imports:
        for alias in node.names:
            if name in (alias.asname, alias.name) or alias.name == "*":
                found = definition(imported_from(module, node), name if alias.name == "*" else alias.name)
                if found:
                    return found
    return None


def imported_from(module: str, node: ast.ImportFrom) -> str:
    """The module that a statement imports from, where it stands in another."""
    package = (SITE / module.replace(".", "/")).is_dir()
    base = module.split(".")[: len(module.split(".")) - node.level + package] if node.level else []
    return ".".join([*base, *filter(None, [node.module])])


def constructor(module: str, cls: ast.ClassDef) -> ast.FunctionDef | None:
    """The ``__init__`` of a class or of the first base that has one."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return node
    for base in cls.bases:
        found = definition(module, base.id) if isinstance(base, ast.Name) else None
        if found and isinstance(found[1], ast.ClassDef) and (init := constructor(found[0], found[1])):
            return init
    return None


def parameters(module: str, node: ast.stmt) -> list[str]:
    """The parameters of a function or of a class, but for catch-alls."""
    function = constructor(module, node) if isinstance(node, ast.ClassDef) else node
    if not isinstance(function, ast.FunctionDef):
        return []
    arguments = function.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if each.arg != "self"]


@needs_vllm
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}.{row[1]}")
def test_a_counterpart_takes_what_the_name_takes(row: tuple[str, str, str]) -> None:
    """Each name is where the table says, and its counterpart takes its parameters, but for those listed here."""
    module, name, home = row
    found = definition(module, name)
    if f"{module}.{name}" in OTHER_VERSIONS:
        assert found is None
        return
    assert found is not None
    ours = getattr(importlib.import_module(home), name)
    taken = inspect.signature(ours).parameters if callable(ours) else {}
    if callable(ours) and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        assert set(parameters(*found)) - taken.keys() == DIFFERENT.get(name, set())


@needs_vllm
@pytest.mark.parametrize("name", PLATFORM)
def test_attributes_of_platforms(name: str) -> None:
    """vLLM's platforms have them."""
    found = definition("vllm.platforms.interface", "Platform")
    assert found is not None
    assert isinstance(found[1], ast.ClassDef)
    names = {node.target.id for node in found[1].body if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")}
    assert name in names | {node.name for node in found[1].body if isinstance(node, ast.FunctionDef)}


def test_counterparts_are_there() -> None:
    """Every name of the table is one of opgraft, and no hint speaks of a name that has a counterpart."""
    for module, name, home in ROWS:
        assert hasattr(importlib.import_module(home), name), (module, name)
    assert not {f"{module}.{name}" for module, name, _ in ROWS} & HINTS.keys()
