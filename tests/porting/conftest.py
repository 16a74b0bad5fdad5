"""The bridge, which ports plugins of vLLM: functions of it that tests call."""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import libcst as cst
import pytest
from opgraft.plugins.bridges import Ported
from support.vllm_plugin import BRIDGE

_PACKAGE = "opgraft_vllm_bridge"


@pytest.fixture
def bridge_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The source of the bridge is on ``sys.path``. Its modules are forgotten after the test."""
    monkeypatch.syspath_prepend(str(BRIDGE / "src"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[name]


@pytest.fixture
def port(bridge_path: None) -> Callable[[Path], Ported]:
    """The function that the bridge's entry point names."""
    function: Callable[[Path], Ported] = importlib.import_module(f"{_PACKAGE}.offers").port_folder
    return function


@pytest.fixture
def rewritten(bridge_path: None) -> Callable[[str], Any]:
    """A function that rewrites the source of a module and checks that the result can be parsed."""
    rewriting = importlib.import_module(f"{_PACKAGE}.porting.rewriting")

    def rewrite(source: str) -> Any:
        made = rewriting.rewrite(cst.parse_module(textwrap.dedent(source)), "file.py", "acme")
        ast.parse(made.code)
        return made

    return rewrite
