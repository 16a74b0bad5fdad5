"""Forwards that act by builtins, or by what they import when they run, are left alone."""

from __future__ import annotations

import builtins
import logging
import os

import pytest
import torch
from opgraft import graft
from support import graft_counting
from torch import nn

CALLS: list[int] = []


class Norm(nn.Module):
    """An RMS norm without side effects."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class SetsByName(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        setattr(type(self), "total", 1)  # noqa: B010  # by name, as is tested
        return self._norm(x)


class DeletesByName(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delattr(type(self), "total")  # by name, as is tested
        return self._norm(x)


class Executes(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exec("CALLS.append(1)", globals())  # noqa: S102
        return self._norm(x)


class Evaluates(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        builtins.eval("CALLS.append(1)")  # noqa: S307
        return self._norm(x)


class SetsInEnvironment(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.environ.__setitem__("SEEN_BY_A_TEST", "1")
        return self._norm(x)


class SetsItemOfClass(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).__annotations__.__setitem__("seen", 1)
        return self._norm(x)


class ImportsInBody(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import os

        os.environ.update({"SEEN_BY_A_TEST": "1"})
        return self._norm(x)


class ImportsNames(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from support.graft_counting import count

        count()
        return self._norm(x)


class Logs(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("norms").info("called")
        return self._norm(x)


class LogsByImport(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import logging

        logging.getLogger("norms").info("called")
        return self._norm(x)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (SetsByName, "uses setattr"),
        (DeletesByName, "uses delattr"),
        (Executes, "uses exec"),
        (Evaluates, "uses eval"),
        (SetsInEnvironment, "uses environ"),
        (SetsItemOfClass, "changes __annotations__"),
        (ImportsInBody, "imports os when it runs"),
        (ImportsNames, "imports support.graft_counting when it runs"),
        (Logs, "uses "),
        (LogsByImport, "imports logging when it runs"),
    ],
)
def test_a_forward_that_acts_by_builtins_or_imports_stays(cls: type[Norm], reason: str) -> None:
    """What sets by name, runs text, or fetches something when it runs may do anything, so its module stays."""
    before = repr((CALLS, os.environ.get("SEEN_BY_A_TEST"), graft_counting.SEEN))
    (left,) = graft(nn.Sequential(cls())).left_alone
    assert f"its forward {reason}" in left.reason
    assert repr((CALLS, os.environ.get("SEEN_BY_A_TEST"), graft_counting.SEEN)) == before
