"""A plugin whose kernel fails and whose schemas take long while files in a folder say so, in whichever process.

``fail`` has SiLU fail. ``slow`` has a grammar with that word wait, once in each process, which says that it waits by a
file of its number, until that is gone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import llguidance
import torch
from opgraft.ops import SiluAndMul

platforms = "any"
FOLDER = Path(os.environ["TROUBLE"])
compiled = llguidance.LLMatcher


@SiluAndMul.register_oot
class TroubledSiluAndMul(SiluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        if (FOLDER / "fail").exists():
            raise RuntimeError("kernel trouble in /secret/place.so")
        return self.forward_native(x)


class WaitingMatchers:
    """The library's class of compiled grammars, a call of which waits first."""

    def __call__(self, tokens: Any, source: str, **limits: Any) -> Any:
        mark = FOLDER / str(os.getpid())
        if "slow" in source:
            mark.touch()
            while mark.exists():
                time.sleep(0.01)
        return compiled(tokens, source, **limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(compiled, name)


llguidance.LLMatcher = WaitingMatchers()
