"""Plugins that close the standard streams, and finders that raise when something is imported."""

from __future__ import annotations

import json

import pytest
from support.faults.planting import GOOD
from support.faults.process_rows import PLUGIN

CLOSES = {
    "sys.stdout.close()": "whether sys.stdout is closed from False to True",
    "sys.stdout.detach()": "whether sys.stdout is closed from False to True",
    "sys.stdout.buffer.close()": "whether sys.stdout is closed from False to True",
    "sys.stderr.close()": "whether sys.stderr is closed from False to True",
    "sys.stderr.detach()": "whether sys.stderr is closed from False to True",
    "sys.stdin.close()": "whether sys.stdin is closed from False to True",
}
"""What a plugin does, and what is said of it; each is set back."""

FINDER = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if {condition}: raise RuntimeError('the disk is gone')
sys.meta_path.{put}
"""

FINDERS = {
    "in front, for a command": FINDER.format(
        condition="name.startswith('opgraft.cli.detect')", put="insert(0, Finder())"
    ),
    "behind all others": FINDER.format(condition="True", put="append(Finder())"),
    "with other names": FINDER.replace("find_spec(self,", "find_spec(this,").format(
        condition="name.startswith('opgraft.cli.detect')", put="insert(0, Finder())"
    ),
    "a static method": FINDER.replace(
        "class Finder:\n    def find_spec(self, name",
        "class Finder:\n    @staticmethod\n    def find_spec(name",
    ).format(condition="name.startswith('opgraft.cli.detect')", put="insert(0, Finder())"),
}
"""Modules that Python imports when it starts, with a finder that raises at an import."""


@pytest.mark.parametrize("when", ["while it was loaded", "in its hook opgraft_veto"])
def test_streams_that_are_closed(cli, site, when: str) -> None:
    """The answer is printed, each plugin is named once, and nobody meets a closed stream."""
    site.plugin("brix", GOOD)
    names = {change: f"acme{number}" for number, change in enumerate(CLOSES)}
    for change, name in names.items():
        source = (change, "pass") if when == "while it was loaded" else ("", change)
        site.plugin(name, f"import sys\n{source[0]}{PLUGIN.format(source[1])}")
    ended = cli("ops", "explain", "RMSNorm")
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
    assert "BrixRMSNorm.forward_oot" in ended.stdout
    told = ended.stderr.splitlines()
    for change, name in names.items():
        said = f"plugin {name} of {name} 1.0 changed {CLOSES[change]} {when}: it was set back"
        assert len([line for line in told if line.startswith(said)]) == 1, ended.stderr
    assert len(told) == len(names), ended.stderr


def test_a_stream_that_is_closed_later(cli, site) -> None:
    """The answer is whole, whoever closes stdout while it is made."""
    replacement = "class Acme(RMSNorm):\n    def forward_oot(self, x, residual=None): pass\n"
    condition = "lambda platform: sys.stdout.close() or True"
    site.plugin(
        "acme",
        f"import sys\nfrom opgraft.ops import RMSNorm\nplatforms = 'any'\n{replacement}"
        f"RMSNorm.register_oot(Acme, when={condition})\n",
    )
    ended = cli("ops", "explain", "RMSNorm")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("op rms_norm: Acme.forward_oot")
    assert "plugins: acme (1 of 1 installed plugins active)" in ended.stdout


DESCRIPTORS = {
    "all but the standard ones": "os.closerange(3, 256)",
    "standard output too": "os.closerange(1, 2); os.closerange(3, 256)",
}


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_descriptors_that_are_closed(cli, site, name: str) -> None:
    """The answer is whole, although a plugin closes descriptors as a daemon does."""
    site.plugin("acme", f"import os\n{PLUGIN.format(DESCRIPTORS[name])}")
    ended = cli("ops", "explain", "RMSNorm", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["schema"] == "opgraft.ops.explain/2"


def test_every_descriptor_is_closed(cli, site) -> None:
    """A command whose answer has no file left ends with one message."""
    site.plugin("acme", f"import os\n{PLUGIN.format('os.closerange(3, 9999)')}")
    ended = cli("ops", "explain", "RMSNorm")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "error: the answer cannot be written to stdout: Bad file descriptor\n"


IMPORTS = {
    "builtins.__import__ = None": "builtins __import__",
    "builtins.isinstance = lambda *_: False": "builtins isinstance",
    "sys.meta_path = None": "the list sys.meta_path",
    "sys.path = None": "the list sys.path",
    "sys.meta_path.insert(0, 42)": "sys.meta_path 42",
    "sys.path_hooks.insert(0, 42); sys.path_importer_cache.clear()": "sys.path_hooks 42",
    "sys.path_importer_cache.update(dict.fromkeys(sys.path_importer_cache, 42))": "the finder for",
}
"""Ends of a plugin's module after which nothing can be imported, and what is said of each."""


@pytest.mark.parametrize("end", IMPORTS)
def test_imports_that_a_plugin_breaks(cold_cli, site, end: str) -> None:
    """The answer is whole, and the plugin that broke the imports is named."""
    site.plugin("acme", f"import builtins, sys\n{PLUGIN.format('pass')}{end}\n")
    site.plugin("brix", GOOD)
    ended = cold_cli("ops", "explain", "RMSNorm")
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
    assert ended.stdout.startswith("op rms_norm: BrixRMSNorm.forward_oot")
    told = [line for line in ended.stderr.splitlines() if f" changed {IMPORTS[end]}" in line]
    assert told, ended.stderr
    assert all(line.startswith("plugin acme of acme 1.0 changed") for line in told)


@pytest.mark.parametrize("name", FINDERS)
def test_finders_that_raise(cold_cli, site, name: str) -> None:
    """A command that cannot import what it needs names the finder and its place in one sentence."""
    (site.folder / "sitecustomize.py").write_text(FINDERS[name])
    ended = cold_cli("detect")
    line = 6 if "static" in name else 5
    assert (ended.returncode, ended.stdout) == (4, "")
    assert ended.stderr == (
        "error: the finder sitecustomize.Finder on sys.meta_path raised RuntimeError: the disk is gone at an import "
        f"({site.folder}/sitecustomize.py:{line}): uninstall the package that puts it there, or mend it\n"
    )


def test_a_finder_that_prints(cold_cli, site) -> None:
    """Standard output has the answer alone, though options of plugins are looked for before a command."""
    (site.folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, *given): return None\n"
        "    def find_distributions(self, context):\n"
        "        print('hello from a finder')\n"
        "        os.write(1, b'and from C')\n"
        "        return []\n"
        "sys.meta_path.append(Finder())\n"
    )
    ended = cold_cli("detect", "--json")
    assert json.loads(ended.stdout)
    assert "hello from a finder" in ended.stderr
    assert "and from C" in ended.stderr
