"""The bridge for vLLM's plugins: its names against the wheel of vLLM 0.33, and its own wheel, built and installed."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from support.vllm_plugin import BRIDGE, install_acme
from support.vllm_source import INSTALLED, SITE, definition, needs_vllm, parameters

sys.path.insert(0, str(BRIDGE / "src"))
try:
    names = importlib.import_module("opgraft_vllm_bridge.names")
    config = importlib.import_module("opgraft_vllm_bridge.vllm_parts.config")
finally:
    sys.path.remove(str(BRIDGE / "src"))

TOOL = runpy.run_path(str(BRIDGE.parents[1] / "tools/vllm_plugins.py"))
ROWS = [
    (module, name, home)
    for module, found in names.NAMES.items()
    for name, home in found.items()
    if names.is_adapted(home)
]
SETTINGS = sorted(
    name for name in names.NAMES["vllm.config"] if is_dataclass(getattr(config, name, None))
)
OLDER = {
    "vllm.attention.Attention",
    "vllm.attention.layer.Attention",
    "vllm.entrypoints.openai.tool_parsers.ToolParserManager",
    "vllm.entrypoints.openai.tool_parsers.abstract_tool_parser.ToolParserManager",
    "vllm.utils.FlexibleArgumentParser",
    "vllm.utils.STR_DTYPE_TO_TORCH_DTYPE",
    "vllm.utils.direct_register_custom_op",
    "vllm.utils.get_dtype_size",
}
"""Names at which plugins for other versions find them."""


@pytest.fixture(autouse=True)
def _bridge_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests of the same process may have forgotten its modules.
    monkeypatch.syspath_prepend(str(BRIDGE / "src"))


def in_vllm(module: str, name: str) -> ast.stmt | None:
    found = definition(module, name)
    return found[1] if found else None


@needs_vllm
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}.{row[1]}")
def test_an_adapted_name_is_where_vllm_has_it(row: tuple[str, str, str]) -> None:
    """Each is in that module of vLLM, and a function takes the same parameters in the same order."""
    module, name, home = row
    found = definition(module, name)
    if f"{module}.{name}" in OLDER:
        assert found is None
        return
    path = SITE / module.replace(".", "/")
    file = next(each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file())
    if found is None:  # made when it is asked for
        assert name in file.read_text(encoding="utf-8")
        return
    ours = getattr(importlib.import_module(home), name)
    if inspect.isfunction(ours):
        assert list(inspect.signature(ours).parameters) == parameters(*found)


def members(node: ast.stmt | None) -> dict[str, list[str]]:
    """What a class of vLLM has, with the parameters of its methods."""
    assert isinstance(node, ast.ClassDef)
    found: dict[str, list[str]] = {}
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            found[each.name] = [argument.arg for argument in each.args.args][1:]
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found[each.target.id] = []
    return found


@needs_vllm
def test_a_platform_has_the_members_of_vllms() -> None:
    """Every member of the base of platforms is one of vLLM's, and its methods take the same parameters."""
    theirs = members(in_vllm("vllm.platforms.interface", "Platform"))
    ours: Any = importlib.import_module("opgraft_vllm_bridge.vllm_parts.platforms").Platform
    own = [name for name in (*vars(ours), *ours.__annotations__) if not name.startswith("__")]
    assert set(own) - theirs.keys() == set()
    for name in own:
        if callable(getattr(ours, name, None)):
            function = getattr(ours, name)
            taken = [each for each in inspect.signature(function).parameters if each != "self"]
            assert taken == theirs[name], name


@needs_vllm
@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name in vars(config)
        if name.endswith("Config") and name in names.NAMES["vllm.config"]
    ),
)
def test_settings_are_those_of_vllm(name: str) -> None:
    """Every setting is one of vLLM's, in the class of that name."""
    theirs = members(in_vllm("vllm.config", name))
    assert {each.name for each in fields(getattr(config, name))} - theirs.keys() == set()


@needs_vllm
def test_the_bridge_stands_aside_for_vllm(tmp_path: Path) -> None:
    """Where the wheel is on the path, imports of vLLM find it, and the finder has no answer."""
    code = (
        "import importlib.util, json; from opgraft_vllm_bridge.finder import VllmFinder\n"
        "VllmFinder('acme').install()\n"
        "print(json.dumps([importlib.util.find_spec('vllm').origin, VllmFinder('x').find_spec('vllm.logger', None)]))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BRIDGE / "src"), str(SITE)])}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == [str(INSTALLED[-1]), None]


@needs_vllm
def test_the_wheel_of_the_bridge_runs_a_plugin(
    built_plugin: Callable[[str], Path], site: Any, cli: Any
) -> None:
    """Built and installed by pip it detects the platform of a plugin, and doctor finds nothing wrong."""
    install_acme(site)
    path = str(built_plugin("opgraft-vllm-bridge"))
    detected = json.loads(cli("detect", "--json", PYTHONPATH=path).stdout)
    assert detected["decision"]["chosen"] == "acme"
    doctor = cli("plugins", "doctor", PYTHONPATH=path)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import os; os.kill(os.getpid(), 11)", "ends (signal 11)"),
        ("raise SystemExit('our own bug')", "ends (exit code 1)"),
        ("print('[')", "ends (exit code 0)"),
        ("import time; time.sleep(60)", "no answer in 2 s"),
    ],
)
def test_a_process_without_an_answer(code: str, outcome: str, capfd: Any) -> None:
    """The row of a plugin tells how its process has ended, and what the process has said is printed."""
    command = [sys.executable, "-c", f"import sys; print('last words', file=sys.stderr)\n{code}"]
    found = TOOL["outcome_of"]("acme", command, dict(os.environ), 2)
    assert found["general"] == {"(the process)": outcome}
    row = TOOL["_row"]("vllm-lens", found)
    assert row == f"| vllm-lens 1.3.0 |  | {outcome} |  |  |\n"
    said = capfd.readouterr().err
    assert f"acme {outcome}:\nlast words\n" in said


def test_a_page_without_the_head_of_the_table() -> None:
    """A page that lacks the table is refused, and not returned as it is."""
    with pytest.raises(SystemExit, match=r"README.md has 0 tables with this head"):
        TOOL["with_table"]("# A page\n", "| a row |\n")


@pytest.mark.slow
@needs_vllm
def test_public_plugins(built_plugin: Callable[[str], Path], cli: Any) -> None:
    """The README tells which entry points load, by running them; a platform that loads is chosen."""
    text = (BRIDGE / "README.md").read_text(encoding="utf-8")
    assert TOOL["page"](text) == text, "renew it by 'make vllm-plugins-table'"
    assert "| vllm-spyre-next 0.1.0 | loads |" in text
    folders = (built_plugin("opgraft-vllm-bridge"), TOOL["fetched"]("vllm-spyre-next", "0.1.0"))
    path = os.pathsep.join(map(str, folders))
    detected = json.loads(cli("detect", "--json", PYTHONPATH=path).stdout)
    assert detected["decision"]["chosen"] == "spyre_next"


@pytest.mark.slow
@needs_vllm
def test_conformance_judges_a_plugin(
    built_plugin: Callable[[str], Path], site: Any, cli: Any
) -> None:
    """The command puts the platform and the ops of a plugin before every check, and it passes."""
    install_acme(site)
    judged = cli("conformance", "acme-vllm", PYTHONPATH=str(built_plugin("opgraft-vllm-bridge")))
    assert judged.returncode == 0, judged.stdout + judged.stderr
    assert re.search(
        r"^acme-vllm 2.0 on acme \(Acme A1\): [67]\d passed, 0 failed", judged.stdout, re.M
    ), judged.stdout
