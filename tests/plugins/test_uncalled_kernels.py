"""What the doctor says of methods that nothing calls, and of classes that no model constructs."""

from __future__ import annotations

import sys
from pathlib import Path

import opgraft
import pytest
from conftest import Site
from opgraft.registry.finding import Finding
from opgraft.testing import diagnosis

METHOD = "_".join(["forward", "zpu"])
"""Stands for ``forward_npu``: these tests, which have that name in texts, are loaded in the process as well."""

HEAD = """
import functools, opgraft
from opgraft.ops import GELU
platforms = "any"
"""
CLASS = """
class Acme(GELU):
    def forward_oot(self, x):
        {call}
        return x
    {mark}
    def forward_npu(self, x):
        return x
@opgraft.hookimpl
def opgraft_register_ops():
    GELU.register_oot(Acme)
"""


def plugin(call: str = "pass", mark: str = "", above: str = "", below: str = "") -> str:
    return HEAD + above + CLASS.format(call=call, mark=mark) + below


REGISTRY = "TABLE = {}\ndef kept(method):\n    TABLE[method.__name__] = method\n    return method\n"

CALLED = {
    "a lambda": plugin("(lambda: self.forward_npu(x))()"),
    "a nested function": plugin(
        "def run():\n            return self.forward_npu(x)\n        return run()"
    ),
    "a comprehension": plugin("[self.forward_npu(each) for each in [x]]"),
    "another class": plugin(
        below="class Runner:\n    def run(self, op, x):\n        return op.forward_npu(x)\n"
    ),
    "a function of the module": plugin("run(self, x)", above="def run(op, x): op.forward_npu(x)\n"),
    "another module": plugin("__import__('acme_runner').run(self, x)"),
    "a property": plugin(
        "self.chosen(x)",
        mark="@property\n    def chosen(self):\n        return self.forward_npu\n",
    ),
    "a decorated method": plugin(
        mark="@functools.cache\n    def warm(self):\n        return self.forward_npu(1)\n"
    ),
    "a decorator that keeps the method": plugin(mark="@kept", above=REGISTRY),
    "a decorator that wraps the method": plugin(mark="@functools.cache"),
    "a decorator of the class": plugin().replace("class Acme", "@kept\nclass Acme")
    .replace("\nplatforms", f"\n{REGISTRY}platforms"),
    "another name in the class": plugin(below="Acme.forward_oot = Acme.forward_npu\n"),
    "a name as text": plugin("getattr(self, 'forward_npu')(x)"),
    "a composed name": plugin("getattr(self, f'forward_{self.kind}', print)(x)"),
    "a formatted name": plugin("getattr(self, 'forward_%s' % 'npu')(x)"),
    "a joined name": plugin("getattr(self, '_'.join(['forward', 'npu']))(x)"),
    "a partial function": plugin("functools.partial(self.forward_npu, x)()"),
    "a list of the class": plugin(
        "[getattr(self, 'forward_oot') for each in dir(self) if each[-3:] == 'npu']"
    ),
    "the variables of the class": plugin("[each for key, each in vars(Acme).items() if 'npu' in key]"),
    "the variables of the class in the module": plugin(
        "[each for key, each in vars(acme.Acme).items() if 'npu' in key]", above="import acme\n"
    ),
    "a name that another function composes": plugin(
        "getattr(self, f'{self.stem}_npu')(x)", mark="stem = 'for' + 'ward'"
    ),
    "a renamed lookup": plugin("find(self.kind)(self)", above="from operator import attrgetter as find\n"),
    "a wrapper of itself": plugin(mark="pass").replace(
        "        return x\n@opgraft", "        return x\n    forward_npu.__wrapped__ = forward_npu\n@opgraft"
    ),
    "a base that looks at its subclasses": plugin(
        above="class Looking:\n    def __init_subclass__(cls):\n        cls.methods = dir(cls)\n"
    ).replace("Acme(GELU)", "Acme(GELU, Looking)"),
}  # fmt: skip

UNCALLED = {
    "nothing": plugin(),
    "its documentation": plugin("'''Runs as forward_npu does.'''"),
    "a comment": plugin("pass  # forward_npu"),
    "a mark of opgraft": plugin(mark="@opgraft.inference_only"),
    "another method": plugin("self.forward_cuda"),
    "a static method": plugin(mark="@staticmethod"),
    "a look into modules of others": plugin(
        "[getattr(torch.ops, key, None) for key in vars(np)]",
        above="import torch, math as np\n",
    ),
}


def findings(site: Site, source: str) -> list[Finding]:
    site.plugin("acme", source.replace("forward_npu", METHOD).replace("npu", "zpu"))
    opgraft.load_plugins()
    return [*diagnosis.uncalled_kernels(), *diagnosis.unconstructed_targets()]


@pytest.mark.parametrize("caller", CALLED)
def test_a_method_that_something_calls(site: Site, caller: str) -> None:
    """Nothing is found, however the call is written."""
    (site.folder / "acme_runner.py").write_text(f"def run(op, x): return op.{METHOD}(x)\n")
    source = CALLED[caller]
    if caller == "another module":
        source += "import acme_runner\n"
    assert findings(site, source) == []


def test_a_method_that_another_plugin_calls(site: Site) -> None:
    """Callers of other distributions count, too."""
    site.plugin("brix", f"platforms = 'any'\ndef run(op, x): return op.{METHOD}(x)\n")
    assert findings(site, plugin()) == []


@pytest.mark.parametrize("mention", UNCALLED)
def test_a_method_that_nothing_calls(site: Site, mention: str) -> None:
    """What does not call the method does not count."""
    (finding,) = findings(site, UNCALLED[mention])
    assert f"Acme.{METHOD} is never called: 'zpu' is no dispatch key" in finding.message
    assert finding.location is not None
    assert finding.location.partition(":")[0].endswith("acme.py")


TARGET = """
import opgraft
from {module} import {target}
platforms = "any"
class Acme({target}):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
@opgraft.hookimpl
def opgraft_register_ops():
    opgraft.CustomOp.register_oot(Acme, name="{target}")
"""

CONSTRUCTED = [
    ("opgraft.ops", "FusedMoE"),
    ("opgraft.ops.linear", "ColumnParallelLinear"),
    ("opgraft.ops.rotary", "RotaryEmbedding"),
    ("opgraft.models", "TransformersModel"),
    ("opgraft.models.deepseek", "DeepseekV2ForCausalLM"),
]


@pytest.mark.parametrize(("module", "target"), CONSTRUCTED)
def test_a_target_that_models_construct(site: Site, module: str, target: str) -> None:
    """A class of which others are derived is no fault if models construct the class, too."""
    assert findings(site, TARGET.format(module=module, target=target)) == []


BASE = "RotaryEmbeddingBase"
"""Modules of tests and reference plugins name this class, so they must not count here as modules of plugins."""


def without_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = Path(__file__).parents[1]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_of_tests = file and Path(file).is_relative_to(tests)
        if is_of_tests or name.startswith("opgraft_"):
            monkeypatch.delitem(sys.modules, name)


def test_a_target_that_models_derive_from(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class is named with the derived classes that models construct, unless the plugin constructs the class."""
    without_tests(monkeypatch)
    source = TARGET.format(module="opgraft.ops.rotary", target=BASE)
    (finding,) = findings(site, source)
    assert "Acme replaces RotaryEmbeddingBase, which no model constructs" in finding.message
    assert "replace RotaryEmbedding or Phi3LongRoPEScaledRotaryEmbedding or" in finding.message
    assert "Llama4VisionRotaryEmbedding" not in finding.message


ARGUMENTS = "(8, 8, 64, 1e4, True, None)"

CONSTRUCTIONS = {
    "a call": f"def rope():\n    return {BASE}{ARGUMENTS}\n",
    "another name": f"from opgraft.ops.rotary import {BASE} as R\ndef rope():\n    return R{ARGUMENTS}\n",
    "a table": f"TABLE = {{'plain': {BASE}}}\ndef rope(key):\n    return TABLE[key]{ARGUMENTS}\n",
    "a partial function": f"import functools\nrope = functools.partial({BASE}, 8, 8)\n",
    "an attribute of a class": f"class Model:\n    rope_class = {BASE}\n",
    "a name as text": f"import opgraft.ops.rotary as r\ndef rope():\n    return getattr(r, '{BASE}'){ARGUMENTS}\n",
    "a default": f"def rope(cls={BASE}):\n    return cls{ARGUMENTS}\n",
    "a choice": f"def rope(cls=None):\n    return (cls or {BASE}){ARGUMENTS}\n",
}


@pytest.mark.parametrize("form", CONSTRUCTIONS)
def test_a_target_that_the_plugin_constructs(
    site: Site, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A model of the plugin may construct a class that opgraft's own models do not, in any form."""
    without_tests(monkeypatch)
    source = TARGET.format(module="opgraft.ops.rotary", target=BASE)
    assert findings(site, source + CONSTRUCTIONS[form]) == []


def test_a_target_that_a_module_constructs_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the plugin's package counts before it is imported."""
    without_tests(monkeypatch)
    source = TARGET.format(module="opgraft.ops.rotary", target=BASE)
    package = site.folder / "acme_kernels"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    (package / "models.py").write_text(CONSTRUCTIONS["another name"])
    assert findings(site, "from acme_kernels import *\n") == []


OWN = """
import opgraft
from opgraft.ops import {base}
platforms = "any"
@opgraft.CustomOp.register("acme_base")
class AcmeBase({base}):
    pass
@opgraft.CustomOp.register("acme_special")
class AcmeSpecial(AcmeBase):
    pass
class Acme(AcmeBase):
    def forward_oot(self, x):
        return x
@opgraft.hookimpl
def opgraft_register_ops():
    opgraft.CustomOp.register_oot(Acme, name="AcmeBase")
"""


def test_a_target_of_the_plugin_that_is_named_base(site: Site) -> None:
    """A name that ends in "Base" is no reason: nobody has recorded what constructs the class."""
    assert findings(site, OWN.format(base="GELU")) == []
