"""Plugins that close the standard streams, and finders that raise when something is imported."""

from __future__ import annotations

import pytest
from faults.planting import GOOD
from faults.process_rows import PLUGIN

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


@pytest.mark.parametrize("name", FINDERS)
def test_finders_that_raise(cold_cli, site, name: str) -> None:
    """A command that cannot import what it needs names the finder and its place in one sentence."""
    (site.folder / "sitecustomize.py").write_text(FINDERS[name])
    ended = cold_cli("detect")
    assert (ended.returncode, ended.stdout) == (4, "")
    assert ended.stderr == (
        "error: the finder sitecustomize.Finder on sys.meta_path raised RuntimeError: the disk is gone at an import "
        f"({site.folder}/sitecustomize.py:5): uninstall the package that puts it there, or mend it\n"
    )
