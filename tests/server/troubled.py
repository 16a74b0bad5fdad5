"""A plugin whose kernel fails and whose schemas take long while files in a folder say so, in whichever process.

``fail`` has SiLU fail. ``slow`` has a grammar with that word wait, once in each process, which says that it waits by a
file of its number, until that is gone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from opgraft.engine.sampling import Grammar
from opgraft.ops import SiluAndMul

platforms = "any"
FOLDER = Path(os.environ["TROUBLE"])
compiled = Grammar.__init__


@SiluAndMul.register_oot
class TroubledSiluAndMul(SiluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        if (FOLDER / "fail").exists():
            raise RuntimeError("kernel trouble in /secret/place.so")
        return self.forward_native(x)


def waiting(grammar: Grammar, spec: Any, tokens: Any) -> None:
    mark = FOLDER / str(os.getpid())
    if "slow" in str(spec):
        mark.touch()
        while mark.exists():
            time.sleep(0.01)
    compiled(grammar, spec, tokens)


Grammar.__init__ = waiting  # type: ignore[method-assign]
