"""The sampler. It finds the likeliest tokens in one reading of the logits, in their own dtype."""

from __future__ import annotations

from collections.abc import Callable

from opgraft.kernels.engine import Sampler as Base
from torch import Tensor

from opgraft_cpu_kernels.kernels import DTYPES, op


class Sampler(Base):
    """A sampler that finds the likeliest tokens by a kernel of the library."""

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the greatest logit of each row, and the first token with that logit.

        Args:
            logits: ``[rows, tokens]``.

        Returns:
            float32 and int64 tensors, both ``[rows]``.
        """
        if logits.is_cpu and logits.dtype in DTYPES and logits.shape[1]:
            return _greatest(logits)
        return super().likeliest(logits)


_greatest: Callable[..., tuple[Tensor, Tensor]] = op("greatest")
