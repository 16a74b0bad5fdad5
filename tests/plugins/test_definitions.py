"""Plugins that replace functions and methods of opgraft and torch, whoever is the first to import these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from conftest import Site
from opgraft.plugins.definitions import Definitions
from opgraft.plugins.function_code import changes_of_code, code_of

HOOK = """
import opgraft
platforms = "any"

@opgraft.hookimpl
def opgraft_register_ops():
"""

FORKING = """
import json, os, sys, traceback
import torch, opgraft
for line in sys.stdin:
    program = json.loads(line)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        os.environ.clear()
        os.environ.update(program["environ"])
        os.chdir(program["folder"])
        sys.path.insert(0, program["folder"])
        status = 1
        try:
            exec(program["source"], {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    os.close(writer)
    with open(reader) as printed:
        lines = printed.read().splitlines()
    _, status = os.waitpid(child, 0)
    print(json.dumps([status, lines]), flush=True)
"""

Program = Callable[[Site, str], list[str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Program]:
    """Run a program in a process that has imported torch and no op; returns the printed lines."""
    command = [sys.executable, "-c", FORKING]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, told = process.stdin, process.stdout

        def run_program(site: Site, source: str) -> list[str]:
            environ = {**os.environ, "OPGRAFT_LOG": "error"}
            program = {"folder": str(site.folder), "source": source, "environ": environ}
            print(json.dumps(program), file=asked, flush=True)
            status, lines = json.loads(told.readline())
            assert status == 0, lines
            return [str(line) for line in lines]

        yield run_program
        asked.close()


FIRST_IMPORTS = {
    "a_method": (
        "from opgraft.ops import RMSNorm; RMSNorm.forward_native = lambda self, x: x * 0",
        "opgraft's RMSNorm.forward_native",
    ),
    "b_class_method": (
        "from opgraft.models.decoder import DecoderForCausalLM as D; D.register_oot = classmethod(print)",
        "opgraft's DecoderForCausalLM.register_oot (new)",
    ),
    "c_function": (
        "import opgraft.grafting as g; g.graft = print",
        "opgraft.grafting.graft",
    ),
    "d_removed": (
        "from opgraft.quantization.awq import AWQConfig as C; del C.get_name",
        "opgraft's AWQConfig, taking get_name away",
    ),
    "e_by_attribute": (
        "import opgraft; type.__setattr__(opgraft.Compiled, '__call__', print)",
        "opgraft's Compiled.__call__",
    ),
    "f_form": (
        "import opgraft; opgraft.functional.silu_and_mul.native = lambda x: x",
        "opgraft's silu_and_mul.native",
    ),
    "g_native": (
        "import opgraft; opgraft.NATIVE.gelu_and_mul = print",
        "opgraft's native definitions.gelu_and_mul",
    ),
    "h_layer": (
        "import torch; torch.nn.Linear.reset_parameters = lambda self: None",
        "torch's Linear.reset_parameters",
    ),
    "i_initialisation": (
        "import torch; torch.nn.init.normal_ = print",
        "torch.nn.init.normal_",
    ),
    "j_inherited": (
        "import torch; torch.nn.GELU.__call__ = print",
        "torch's GELU.__call__ (new)",
    ),
    "k_code": (
        "from opgraft.ops import RMSNorm as R, SiluAndMul as S; "
        "R.forward_native.__code__ = S.forward_native.__code__",
        "opgraft.ops.layernorm.modules.RMSNorm.forward_native.__code__",
    ),
    "l_defaults": (
        "from opgraft.ops import RMSNorm as R; R.__init__.__defaults__ = (1.0,)",
        "opgraft.ops.layernorm.modules.RMSNorm.__init__.__defaults__",
    ),
    "m_keyword": (
        "import opgraft.grafting as g; g.graft.__kwdefaults__['dry_run'] = True",
        "opgraft.grafting.replace.graft.__kwdefaults__",
    ),
    "n_class_method": (
        "from opgraft import CustomOp as C; C.enabled.__func__.__code__ = (lambda cls: 0).__code__",
        "opgraft.binding.custom_op.CustomOp.enabled.__code__",
    ),
    "o_property": (
        "from opgraft import CustomOp as C; C.binding.fget.__code__ = (lambda self: 0).__code__",
        "opgraft.binding.custom_op.CustomOp.binding.__code__",
    ),
    "p_of_torch": (
        "import torch; torch.nn.functional.silu.__defaults__ = (1,)",
        "torch.nn.functional.silu.__defaults__",
    ),
}
"""By plugin: what it does, as the first to import the module, and what the finding names."""

ALL_MODULES = """
    import importlib, pkgutil
    for found in pkgutil.walk_packages(opgraft.__path__, "opgraft."):
        if ".template" in found.name or "__main__" in found.name:
            continue
        try:
            importlib.import_module(found.name)
        except ImportError:  # of a package that is not installed
            pass
"""

PROGRAM = """
import sys, torch, opgraft
assert not any(name.startswith(("opgraft.ops", "opgraft.models")) for name in sys.modules)
opgraft.load_plugins()
from opgraft.registry.state import host_state
for name, record in host_state().plugins.items():
    assert record.status.value == "activated", record
    for finding in record.findings:
        print(name, finding.message.partition(" changed ")[2], sep=": ")
"""


def test_a_patch_is_found_whoever_imports_first(site: Site, run: Program) -> None:
    """The definitions as their import left them are put back. To import all of opgraft is no change."""
    for name, (statement, _) in FIRST_IMPORTS.items():
        site.plugin(name, f"{HOOK}    {statement}\n")
    site.plugin("z_all", HOOK + ALL_MODULES)
    found = run(site, PROGRAM)
    where = "in its hook opgraft_register_ops: it was set back"
    assert found == [f"{name}: {words} {where}" for name, (_, words) in FIRST_IMPORTS.items()]


def test_a_platform_is_looked_at_as_it_imports(site: Site, run: Program) -> None:
    """What its module patches is put back, if it is left out and if it stays."""
    patches = (
        "from opgraft.ops import RMSNorm\nfrom opgraft.platforms.cuda.platform import CudaPlatform\n"
        "from opgraft.platforms.cpu.platform import CpuPlatform\n"
        "RMSNorm.forward_native = lambda self, x, residual=None: x * 0\n"
        "CpuPlatform.memory = CudaPlatform.memory = print\n"
        "class Device(CpuPlatform):\n    name = 'acme'\n    CHAIN\n"
    )
    site.platform("acme", probe="return Evidence(True, 'here')", platform=patches)
    program = (
        "import torch, opgraft\n"
        "platform = opgraft.current_platform()\n"
        "from opgraft.ops import RMSNorm\n"
        "from opgraft.platforms.cuda.platform import CudaPlatform\n"
        "print(platform.name, round(RMSNorm(4)(torch.ones(4)).sum().item()), CudaPlatform.memory.__name__)\n"
        "print(platform.memory().total > 0)\n"
    )
    module = site.folder / "acme_platform.py"
    for chain, name in (("pass", "acme"), ("dispatch_chain = ('acme',)", "cpu")):
        module.write_text(patches.replace("CHAIN", chain))
        assert run(site, program) == [f"{name} 4 memory", "True"]


AT_WORK = {
    "a_when": """
@SiluAndMul.register_oot(when=lambda platform: setattr(RMSNorm, "forward_native", print) or True)
class Silu(SiluAndMul):
    def forward_oot(self, x): return self.forward_native(x)
""",
    "b_enabled": """
@GeluAndMul.register_oot
class Gelu(GeluAndMul):
    @classmethod
    def enabled(cls):
        RMSNorm.__init__.__defaults__ = (1.0,)
        return True
    def forward_oot(self, x): return self.forward_native(x)
""",
    "c_init": """
@MulAndSilu.register_oot
class Mul(MulAndSilu):
    def __init__(self):
        super().__init__()
        RMSNorm.forward_native.__code__ = (lambda self, x, residual=None: x * 0).__code__
    def forward_oot(self, x): return self.forward_native(x)
""",
}
"""By plugin: a condition, a switch and a constructor that patch opgraft."""

WORKING = """
import torch, opgraft
from opgraft.ops import GeluAndMul, MulAndSilu, RMSNorm, SiluAndMul
from opgraft.registry.state import host_state
for op in (SiluAndMul, GeluAndMul, MulAndSilu):
    op(), op()
    print(RMSNorm(4)(torch.ones(4)).sum().round().item(), RMSNorm.__init__.__defaults__[0])
for name, record in host_state().plugins.items():
    for finding in record.findings:
        print(name, finding.message, finding.location.rpartition("/")[2], sep=": ")
"""


def test_a_patch_by_a_condition_a_switch_and_a_constructor(site: Site, run: Program) -> None:
    """Each is put back at once, and the plugin's finding names the code that did it."""
    imports = "from opgraft.ops import GeluAndMul, MulAndSilu, RMSNorm, SiluAndMul\n"
    for name, code in AT_WORK.items():
        site.plugin(name, f"{imports}platforms = 'any'\n{code}")
    norm = "opgraft.ops.layernorm.modules.RMSNorm"
    told = (
        ("a_when", "the when= condition of Silu", "opgraft's RMSNorm.forward_native", 4),
        ("b_enabled", "Gelu.enabled()", f"{norm}.__init__.__defaults__", 5),
        ("c_init", "Mul.__init__", f"{norm}.forward_native.__code__", 6),
    )
    findings = []
    for name, code, what, line in told:
        words = f"{code} of {name} 1.0 changed {what}: it was set back"
        findings.append(f"{name}: {words}: {name}.py:{line}")
    assert run(site, WORKING) == ["4.0 1e-06"] * 3 + findings


def test_an_import_by_another_thread_during_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules may be added while their names are looked through."""

    def is_looked_at(name: str) -> bool:
        monkeypatch.setitem(sys.modules, "imported_meanwhile", threading)
        return name == "threading"

    assert Definitions(lambda: (threading,), is_looked_at).read().now
    assert "imported_meanwhile" in sys.modules


def test_two_threads_look_at_the_same_time() -> None:
    """The second thread finds all definitions before the first one has finished."""
    seen = []

    def things() -> tuple[object, ...]:
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=lambda: seen.append(definitions.read()))
            other.start()
            other.join(30)
        return (threading,)

    definitions = Definitions(things, "threading".__eq__)
    assert definitions.read().now.keys() == seen[0].now.keys() == {id(threading)}


def test_functions_that_wrap_each_other() -> None:
    """A circle of wrapped functions is read to its end, and a change of one is found."""

    def first(x=1): ...

    def second(x=1): ...

    first.__wrapped__, second.__wrapped__ = second, first
    code = code_of([{"first": property(first), "method": staticmethod(second)}])
    second.__defaults__ = (2,)
    ((_, change),) = changes_of_code(code)
    assert set(code) == {first, second}
    assert change.what.endswith("second.__defaults__")
