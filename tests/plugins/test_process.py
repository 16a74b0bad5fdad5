"""Changes that plugins make to the process: found, set back where they would meet others, and told by the doctor."""

from __future__ import annotations

import builtins
import importlib
import json
import logging
import os
import random
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft import load_plugins
from opgraft.ops import RMSNorm
from opgraft.plugins.changes import thorough
from opgraft.plugins.definitions import DEFINITIONS
from opgraft.plugins.outcomes import findings_of
from opgraft.plugins.process import LISTS, OF_IMPORTS, changes_between, look
from opgraft.registry.decision import Provider
from opgraft.registry.state import PluginRecord, PluginStatus, host_state
from support.faults.process_rows import IMPORTS, PLUGIN, REBOUND, SET_BACK, comparing
from support.source_trees import REPOSITORY

POINTS = {"opgraft.plugins": ["acme = acme"]}


@pytest.fixture(autouse=True)
def a_variable_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKEN", "as it was")


@pytest.mark.parametrize("where", ["while it was loaded", "in its hook opgraft_veto"])
@pytest.mark.parametrize("change", SET_BACK)
def test_a_change_that_meets_others_is_set_back(site, caplog, change: str, where: str) -> None:
    """It is a finding and a warning of the plugin that made it, which stays, and nobody else sees it."""
    at_import = where == "while it was loaded"
    site.plugin(
        "acme",
        IMPORTS + (change if at_import else "") + PLUGIN.format("pass" if at_import else change),
    )
    site.plugin("brix", PLUGIN.format("pass"))
    words = SET_BACK[change].removesuffix("while")
    json_module = sys.modules["json"]
    with comparing(change):
        before = look()
        load_plugins()
        assert [each.what for each in changes_between(before, look())] == []
    assert sys.modules["json"] is json_module
    assert not logging.getLogger("asyncio").disabled
    acme, brix = host_state().plugins["acme"], host_state().plugins["brix"]
    assert [record.status.value for record in (acme, brix)] == ["activated", "activated"]
    (finding,) = acme.findings
    assert finding.message.startswith(f"plugin acme of acme 1.0 changed {words}")
    assert finding.message.endswith(f"{where}: it was set back")
    line = (
        1
        if at_import
        else (site.folder / "acme.py").read_text().partition("def opgraft_veto")[0].count("\n") + 1
    )
    assert finding.location == f"{site.folder / 'acme.py'}:{line}"
    assert (brix.findings, brix.notes, acme.notes) == ((), (), ())
    assert str(finding) in caplog.messages


@pytest.mark.parametrize(
    "drawn", ["random.random()", "random.gauss(0, 1)", "random.shuffle([*range(3000)])"]
)
def test_random_numbers_that_were_drawn_come_anew(site, drawn: str) -> None:
    """It is no finding, as libraries draw some when they are imported, such as that of the progress bars."""
    site.plugin("acme", IMPORTS + drawn + PLUGIN.format(drawn))
    before = random.getstate()
    load_plugins()
    assert random.getstate() == before
    assert host_state().plugins["acme"].findings == ()


ODD = "class Odd:\n    def __eq__(self, other): raise ValueError('do not compare me')\n"
UNCOMPARABLE = {
    "a finder": "sys.meta_path.append(Odd())",
    "a stream": "sys.stdout = Odd()",
    "a handler of a signal": "Odd.__call__ = print; signal.signal(signal.SIGTERM, Odd())",
    "a hook": "sys.excepthook = Odd()",
    "a filter": "warnings.filters.insert(0, ('ignore', None, Odd(), None, 0))",
    "a handler of logs": "logging.getLogger().handlers.append(Odd())",
}


@pytest.mark.parametrize("kind", UNCOMPARABLE)
def test_what_cannot_be_compared_is_set_back_too(site, kind: str) -> None:
    """Looking asks nothing of what a plugin has put there: other changes are set back, and other plugins loaded."""
    site.plugin(
        "acme",
        f"{IMPORTS}{ODD}{UNCOMPARABLE[kind]}\nos.environ['TAKEN'] = 'changed'"
        + PLUGIN.format("1 / 0"),
    )
    site.plugin("brix", PLUGIN.format("pass"))
    before, filters, handlers = (
        sys.stdout,
        list(warnings.filters),
        list(logging.getLogger().handlers),
    )
    try:
        with thorough():
            load_plugins()
        assert os.environ["TAKEN"] == "as it was"
        assert (sys.stdout is before, sys.excepthook.__name__ != "Odd") == (True, True)
        assert not any(type(each).__name__ == "Odd" for each in sys.meta_path)
        assert host_state().plugins["brix"].status.value == "activated"
        assert "ZeroDivisionError" in host_state().plugins["acme"].reason
    finally:
        warnings.filters[:], logging.getLogger().handlers[:] = filters, handlers


NOT_SET_BACK = {
    "a class of its own": "class Acme(RMSNorm): pass\nAcme.forward_oot = RMSNorm.forward_native\n",
    "a name of its own in a class of torch": "torch.Tensor.acme = torch.Tensor.cpu\n",
    "a name of its own in a module of torch": "torch.acme = torch.relu\n",
    "what Python notes in a class": "__import__('copy').copy(RMSNorm(4)); RMSNorm.__annotations__\n",
    "ops that are bound": "SiluAndMul()\n",
}


@pytest.mark.parametrize("change", NOT_SET_BACK)
def test_definitions_that_meet_nobody_else(site, change: str) -> None:
    """They are no finding."""
    site.plugin("acme", IMPORTS + NOT_SET_BACK[change] + PLUGIN.format("pass"))
    try:
        load_plugins()
        record = host_state().plugins["acme"]
        assert (record.findings, record.status.value) == ((), "activated")
    finally:
        for owner in (torch, torch.Tensor):
            if hasattr(owner, "acme"):
                del owner.acme


@pytest.mark.parametrize(
    ("change", "is_told"), [("alder.start()", False), ("alder.LATER = print", True)]
)
def test_a_call_that_a_module_keeps(site, change: str, is_told: bool) -> None:
    """A module may make it and forget it, whoever asks; another function in its place is a finding."""
    kept = (
        "import functools\nLATER = functools.partial(int, 7)\n"
        "def start():\n    global LATER\n    LATER = None\n"
    )
    site.plugin("alder", IMPORTS + kept + PLUGIN.format("pass"))
    site.plugin("brix", "import alder\n" + IMPORTS + PLUGIN.format(change))
    load_plugins()
    messages = [finding.message for finding in host_state().plugins["brix"].findings]
    assert [message.partition(" changed ")[2].partition(" ")[0] for message in messages] == (
        ["alder.LATER"] if is_told else []
    )


@pytest.mark.parametrize("verdict", ["pass", "1 / 0"])
def test_an_op_that_was_bound_meanwhile(site, verdict: str) -> None:
    """Others get the definition that was set back, whatever became of the plugin that used its own."""
    change = (
        "RMSNorm.forward_native = lambda self, x, residual=None: x * 0\nRMSNorm(8)(torch.ones(8))\n"
    )
    site.plugin("acme", IMPORTS + change + PLUGIN.format(verdict))
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(RMSNorm(8, eps=1e-6).double()(x), expected)


@pytest.mark.faults
def test_what_torch_wraps_itself(cold_cli, site) -> None:
    """Its compiler takes the place of functions when it is imported first, which is no change by the plugin."""
    compiles = "import torch\ntorch.compile(torch.nn.ReLU(), backend='eager')(torch.ones(2))\n"
    site.plugin("acme", compiles + PLUGIN.format("pass"))
    result = cold_cli("plugins", "doctor", "--json")
    assert [
        each for each in json.loads(result.stdout)["findings"] if "changed" in each["message"]
    ] == []


TRACES = """
import threading
import torch
from opgraft.ops import RMSNorm
platforms = "any"
READY, GO_ON = threading.Event(), threading.Event()
class Slow(torch.nn.Module):
    def forward(self, x):
        READY.set()
        assert GO_ON.wait(60)
        return x
THREAD = threading.Thread(target=lambda: torch.fx.symbolic_trace(Slow()))
def ends_while_asked(platform):
    GO_ON.set()
    THREAD.join()
    return True
class Acme(RMSNorm):
    def forward_oot(self, x, residual=None): return x
RMSNorm.register_oot(Acme, when=ends_while_asked)
"""


def test_a_trace_by_another_thread_that_ends(site, caplog) -> None:
    """While torch traces, it replaces methods of all modules. What it puts back itself stays so."""
    former = torch.nn.Module.__call__
    site.plugin("acme", TRACES)
    load_plugins()
    module = sys.modules["acme"]
    module.THREAD.start()
    try:
        assert module.READY.wait(60)
        assert torch.nn.Module.__call__ is not former
        RMSNorm(8)
    finally:
        module.GO_ON.set()
        module.THREAD.join()
    assert torch.nn.Module.__call__ is former
    assert "changed" not in caplog.text


ADDED = {
    "os.environ['ACME'] = '1'": (
        "the environment variable ACME (new)",
        lambda: "ACME" in os.environ,
    ),
    "builtins.acme = 1": ("builtins acme (new)", lambda: hasattr(builtins, "acme")),
    "sys.path.append('/acme')": ("sys.path /acme (new)", lambda: "/acme" in sys.path),
    "sys.meta_path.append(type('Finder', (), {'find_distributions': None}))": (
        "sys.meta_path <class 'acme.Finder'> (new)",
        lambda: "acme.Finder" in str(sys.meta_path),
    ),
}

VERDICTS = {
    "activated": PLUGIN.format("pass"),
    "failed": PLUGIN.format("1 / 0"),
    "vetoed": PLUGIN.format("return 'an old driver'"),
    "rejected": PLUGIN.format("pass").replace("'any'", "('cuda',)"),
}


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("addition", ADDED)
def test_what_a_plugin_adds_stays_as_long_as_it_does(
    site, caplog, addition: str, verdict: str
) -> None:
    """It is a note, no finding; a plugin that is not used after all leaves nothing of it."""
    site.plugin("acme", IMPORTS + addition + VERDICTS[verdict])
    words, there = ADDED[addition]
    path, finders = list(sys.path), list(sys.meta_path)
    try:
        with thorough():
            load_plugins()
        record = host_state().plugins["acme"]
        assert record.notes == (
            f"changed {words} while it was loaded: it stays as long as the plugin does",
        )
        assert (record.findings, record.status.value) == ((), verdict)
        assert there() is (verdict == "activated")
        assert not [line for line in caplog.messages if "changed" in line]
    finally:
        os.environ.pop("ACME", None)
        vars(builtins).pop("acme", None)
        sys.path[:], sys.meta_path[:] = path, finders


def test_what_a_veto_changes_itself(site) -> None:
    """It goes with the plugin, too."""
    site.plugin("acme", IMPORTS + PLUGIN.format("os.environ['ACME'] = '1'; return 'an old driver'"))
    try:
        load_plugins()
        record = host_state().plugins["acme"]
        assert (record.findings, record.status.value, record.reason) == (
            (),
            "vetoed",
            "an old driver",
        )
        assert "ACME" not in os.environ
    finally:
        os.environ.pop("ACME", None)


def test_what_is_no_change_of_others(site) -> None:
    """For certain warnings, for its own loggers: nothing is said."""
    own = (
        "class AcmeWarning(UserWarning): pass\n"
        "warnings.filterwarnings('ignore', message='acme is slow')\nwarnings.simplefilter('always', AcmeWarning)\n"
        "logging.getLogger('acme').setLevel(10)\n"
    )
    site.plugin("acme", IMPORTS + own + PLUGIN.format("pass"))
    load_plugins()
    record = host_state().plugins["acme"]
    assert (record.findings, record.notes, record.status.value) == ((), (), "activated")


def test_what_a_plugin_puts_in_front_goes_behind(site) -> None:
    """It is found there as before, and takes nobody's place."""
    site.plugin("acme", IMPORTS + "sys.path.insert(0, '/acme')" + PLUGIN.format("pass"))
    path = list(sys.path)
    try:
        load_plugins()
        assert sys.path == [*path, "/acme"]
        (finding,) = host_state().plugins["acme"].findings
        assert (
            "changed the order of sys.path while it was loaded: it was set back" in finding.message
        )
    finally:
        sys.path[:] = path


@pytest.fixture
def kept_lists() -> Iterator[None]:
    """Put the lists that imports search back at the end of a test."""
    lists = {name: getattr(sys, name) for name in ("path", "meta_path", "path_hooks")}
    items = {name: list(former) for name, former in lists.items()}
    yield
    for name, former in lists.items():
        former[:] = items[name]
        setattr(sys, name, former)


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("change", REBOUND)
def test_another_list_in_the_place_of_one(site, kept_lists, change: str, verdict: str) -> None:
    """The former list comes back; its new items go behind, are judged, and go with the plugin."""
    name = change.split(" ", 1)[0].removeprefix("sys.")
    former = getattr(sys, name)
    items = list(former)
    site.plugin("acme", IMPORTS + change + VERDICTS[verdict])
    load_plugins()
    record = host_state().plugins["acme"]
    told = [finding.message for finding in record.findings] + list(record.notes)
    assert len(told) == 2
    for words, message in zip(REBOUND[change], told, strict=True):
        assert words in message
    stays = name == "path" and verdict == "activated"
    assert getattr(sys, name) is former
    assert former == ([*items, "/acme"] if stays else items)


def test_a_list_that_the_program_has_put_in_a_place(site, kept_lists) -> None:
    """The list of the program counts, and no former one: what a plugin adds to it is seen."""
    own = [*sys.path, "/own"]
    sys.path = own
    site.plugin("acme", IMPORTS + "sys.path.insert(0, '/acme')" + PLUGIN.format("pass"))
    site.plugin("brix", IMPORTS + "sys.path = ['/brix']" + PLUGIN.format("pass"))
    expected = [*own, "/acme", "/brix"]
    load_plugins()
    assert sys.path is own
    assert own == expected
    assert "the order of sys.path" in host_state().plugins["acme"].findings[0].message


def test_rows_of_imports_in_the_docs() -> None:
    """The table of the rows that every load compares has all that imports depend on, and the other table none."""
    names = {row.name.split()[-1] for row in (*LISTS, *OF_IMPORTS)}
    names = names - {"for"} | {"sys.path_importer_cache"}
    page = (REPOSITORY / "docs/how-to/operate-plugins.md").read_text("utf-8")
    _, _, compared = page.partition("Every load compares these rows:")
    at_every_load, _, others = compared.partition("conformance kit compare more rows")
    tables = [re.findall(r"^\| (.+?) \|", text, re.MULTILINE) for text in (at_every_load, others)]
    cells = [set(", ".join(table).replace("`", "").split(", ")) for table in tables]
    assert len(names) == 5
    assert names <= cells[0]
    assert names.isdisjoint(cells[1])


def test_readers_of_imports_one_in_another(kept_lists) -> None:
    """A missing module is missing; none of the readers stays, not even in another list."""
    with DEFINITIONS.imports_read():
        sys.meta_path = [*sys.meta_path]
        with DEFINITIONS.imports_read(), pytest.raises(ModuleNotFoundError):
            importlib.import_module("opgraft.nothing_of_that_name")
    assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_Reader"]


HOOK = "sys.path_hooks.append(lambda path: sys.path_hooks[-2](path))"
RENEWED = {
    "a hook": f"{HOOK}; sys.path_importer_cache.clear(); import acme_lib",
    "nothing": "sys.path_importer_cache.clear()",
    "the caches": "importlib.invalidate_caches()",
}


@pytest.mark.parametrize("kind", RENEWED)
def test_finders_of_folders_that_are_made_anew(site, kept_lists, kind: str) -> None:
    """It is no finding: Python advises to clear them for a new hook, and makes equal ones."""
    # As of a folder that was not there.
    sys.path_importer_cache["/opgraft-nothing"] = None
    source = f"{IMPORTS}{RENEWED[kind]}{PLUGIN.format('pass')}"
    site.install("acme", {"acme.py": source, "acme_lib.py": ""}, POINTS)
    load_plugins()
    record = host_state().plugins["acme"]
    assert (record.findings, record.status.value) == ((), "activated")


def test_what_a_plugin_brings_is_what_the_next_one_finds(site) -> None:
    """A module that one has imported, and another replaces, is put back; who did it is named, and nobody else."""
    site.install(
        "acme", {"acme.py": "import acme_lib" + PLUGIN.format("pass"), "acme_lib.py": ""}, POINTS
    )
    site.plugin("brix", IMPORTS + "sys.modules['acme_lib'] = sys" + PLUGIN.format("pass"))
    site.plugin("cedar", PLUGIN.format("1 / 0"))
    load_plugins()
    assert sys.modules["acme_lib"].__name__ == "acme_lib"
    findings = {
        name: [each.message for each in record.findings]
        for name, record in host_state().plugins.items()
    }
    words = (
        "plugin brix of brix 1.0 changed the module acme_lib while it was loaded: it was set back"
    )
    assert findings == {"acme": [], "brix": [words], "cedar": []}


def test_a_plugin_that_fails_is_set_back_too(site) -> None:
    """What it changed before it raised does not outlive it."""
    site.plugin(
        "acme", f"{IMPORTS}torch.set_default_dtype(torch.float64)\nraise OSError('no driver')\n"
    )
    load_plugins()
    assert torch.get_default_dtype() is torch.float32
    assert host_state().plugins["acme"].status.value == "failed"
    assert len(host_state().plugins["acme"].findings) == 1


def test_a_mode_that_a_plugin_does_not_leave(site) -> None:
    """Others record gradients as before, and what they compute is no tensor of that mode."""
    source = f"{IMPORTS}mode = torch.inference_mode()\nmode.__enter__()\n"
    site.plugin("acme", source + PLUGIN.format("pass"))
    with torch.enable_grad():
        load_plugins()
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)
        assert (torch.ones(2, requires_grad=True) * 2).requires_grad
    told = [finding.message for finding in host_state().plugins["acme"].findings]
    assert any("changed the inference mode from False to True" in message for message in told)
    assert all(message.endswith("it was set back") for message in told)


MODES = {
    "of a device": ("torch.device('meta').__enter__()", "DeviceContext"),
    "of operators": ("FlopCounterMode().__enter__()", "_FlopCounterMode"),
}


@pytest.mark.parametrize("kind", MODES)
def test_modes_that_look_at_each_call(site, kind: str) -> None:
    """They are left, whichever of torch's two stacks they lie on, and those that others have entered are not."""
    enter, name = MODES[kind]
    source = f"{IMPORTS}from torch.utils.flop_counter import FlopCounterMode\n{enter}"
    site.plugin("acme", source + PLUGIN.format("pass"))
    with torch.device("cpu"):
        load_plugins()
        assert torch.ones(2).device.type == "cpu"
        told = [finding.message for finding in host_state().plugins["acme"].findings]
    words = f"plugin acme of acme 1.0 changed the modes of torch from DeviceContext to DeviceContext, {name} while"
    assert any(message.startswith(words) for message in told)
    assert all(message.endswith("it was set back") for message in told)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_kernels_of_operators_of_torch(site) -> None:
    """Kernels for this device or for every device are removed. A kernel for another device meets nobody."""
    keys = {"special_i0e": "CPU", "special_i1e": "CompositeExplicitAutograd", "i0": "PrivateUse1"}
    rows = [f"library.impl({name!r}, abs, {key!r})\n" for name, key in keys.items()]
    source = f"library = torch.library.Library('aten', 'IMPL')\n{''.join(rows)}"
    site.plugin("acme", IMPORTS + source + PLUGIN.format("pass"))
    x = torch.tensor([-1.0, 2.0])
    before = [torch.special.i0e(x), torch.special.i1e(x)]
    load_plugins()
    found = sorted(finding.message for finding in host_state().plugins["acme"].findings)
    assert [message.partition(" operator ")[2] for message in found] == [
        "special_i0e for CPU while it was loaded: it was set back",
        "special_i1e for CompositeExplicitAutograd while it was loaded: it was set back",
    ]
    assert torch.equal(torch.special.i0e(x), before[0])
    assert torch.equal(torch.special.i1e(x), before[1])


ON_THE_CLASS_OF_AN_OP = {
    "a kernel": "type(op).forward = lambda self, x, residual=None: x * 0",
    "a call": "type(op).__call__ = lambda self, x, residual=None: x * 0",
}


@pytest.mark.parametrize("kind", ON_THE_CLASS_OF_AN_OP)
def test_a_method_of_the_class_of_an_op(site, caplog, kind: str) -> None:
    """Ops that others construct do without the method, and a finding names the plugin with file and line."""
    source = f"{IMPORTS}op = RMSNorm(4)\n{ON_THE_CLASS_OF_AN_OP[kind]}\n"
    site.plugin("acme", source + PLUGIN.format("pass"))
    x = torch.linspace(-2, 2, 8).reshape(2, 4)
    for _ in range(2):
        op = RMSNorm(4)
        torch.testing.assert_close(op(x), op.forward_native(x))
    (finding,) = host_state().plugins["acme"].findings
    assert finding.message.startswith("acme 1.0 assigned to ")
    assert finding.location == f"{site.folder / 'acme.py'}:{source.count(chr(10))}"
    assert caplog.messages.count(str(finding)) == 1
    type(op).note = "no code of anybody runs"
    opgraft.reset()
    assert type(RMSNorm(4)) is type(op)


def test_a_handler_of_others_that_is_turned_down(site, caplog) -> None:
    """It has its level again."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        site.plugin(
            "acme",
            f"{IMPORTS}logging.getLogger().handlers[-1].setLevel(50)\n" + PLUGIN.format("pass"),
        )
        load_plugins()
        assert handler.level == logging.WARNING
    finally:
        logging.getLogger().removeHandler(handler)
    (finding,) = host_state().plugins["acme"].findings
    assert "the root logger: handlers from " in finding.message
    assert "StreamHandler at WARNING to " in finding.message
    assert "StreamHandler at CRITICAL while it was loaded: it was set back" in finding.message


def test_what_cannot_be_set_back_is_named(
    site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's reason is told."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    site.plugin("acme", f"{IMPORTS}os.chdir('/'); os.rmdir({str(gone)!r})" + PLUGIN.format("pass"))
    load_plugins()
    (finding,) = host_state().plugins["acme"].findings
    assert (
        f"from {gone} to / while it was loaded: it cannot be set back: FileNotFoundError"
        in finding.message
    )
    monkeypatch.chdir(tmp_path)


def test_the_doctor_tells(cli, site) -> None:
    """A finding for what was set back, with exit code 1, and a note for what stays; the seconds of each import."""
    site.plugin("acme", IMPORTS + "torch.set_default_dtype(torch.float64)" + PLUGIN.format("pass"))
    site.plugin("brix", IMPORTS + "os.environ['BRIX'] = '1'" + PLUGIN.format("pass"))
    result = cli("plugins", "doctor", "--json")
    answer = json.loads(result.stdout)
    assert result.returncode == 1
    (finding,) = answer["findings"]
    said = "plugin acme of acme 1.0 changed the default dtype from torch.float32 to torch.float64 while it was loaded"
    assert finding["message"] == f"{said}: it was set back"
    (note,) = answer["notes"]
    assert note["reason"].startswith(
        "plugin brix changed the environment variable BRIX (new) while it was loaded"
    )
    assert all(0 <= row["seconds"] < 60 for row in answer["plugins"])


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")
@pytest.mark.parametrize(
    ("compiles", "limit", "is_a_change"),
    [(True, None, False), (True, 2000, False), (True, 3000, True), (False, 2000, True)],
)
def test_the_recursion_limit_of_inductor(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    compiles: bool,
    limit: int | None,
    is_a_change: bool,
) -> None:
    """Inductor raises the limit to 2000 when it compiles: any other change is one of the plugin."""
    # A graph from a former run would not be compiled.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    former = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    try:
        before = look()
        if compiles:
            torch.compile(lambda x: x + 1)(torch.ones(3))
            assert sys.getrecursionlimit() == 2000
        if limit is not None:
            sys.setrecursionlimit(limit)
        found = [each for each in changes_between(before, look()) if "recursion limit" in each.what]
        words = [f"the recursion limit from 1000 to {limit}"] if is_a_change else []
        assert [each.what for each in found] == words
        for each in found:
            each.set_back()
            assert sys.getrecursionlimit() == 1000
    finally:
        sys.setrecursionlimit(former)
        torch.compiler.reset()


def test_a_slow_import_is_a_finding() -> None:
    """From five seconds on, whatever became of the plugin."""
    record = PluginRecord(
        "acme", "acme", Provider("acme", "1.0"), PluginStatus.ACTIVATED, seconds=5.04
    )
    assert [finding.message for finding in findings_of(record)] == [
        "plugin acme of acme 1.0 took 5.0 s to import, and each process that constructs an op waits for it"
    ]
    record.seconds = 4.9
    assert list(findings_of(record)) == []
