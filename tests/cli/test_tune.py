"""``opgraft tune`` on the command line; its JSON is tested with the schemas."""

from __future__ import annotations

import json
from pathlib import Path

PLUGIN = """
import signal
from opgraft.ops import ReLUSquaredActivation, SiLU
platforms = "any"
@ReLUSquaredActivation.register_oot
class AcmeReLU(ReLUSquaredActivation):
    def forward_oot(self, x):
        return self.forward_native(x)
@SiLU.register_oot
class AcmeSiLU(SiLU):
    def forward_oot(self, input):
        signal.raise_signal(signal.SIGINT)
"""


def test_an_interrupted_run_keeps_what_it_has(cli, site, tmp_path: Path) -> None:
    """What Ctrl-C leaves is a file with the ops that were done."""
    site.plugin("acme", PLUGIN)
    names = ("silu", "relu2")
    answer = cli("tune", *names, "--seconds", "1e-4", XDG_STATE_HOME=str(tmp_path))
    assert (answer.returncode, answer.stderr.split()) == (1, ["aborted"])
    (machine,) = json.loads((tmp_path / "opgraft" / "tuning.json").read_text())["machines"]
    assert [*machine["ops"]] == ["relu2"]
