"""Notices what code asks of tensors besides computing with them, and might take another way by the answer.

One trace shows one way. So a forward that is recognised by its trace may pass the sizes of a tensor on, to ``view``
say, but not look at them, and ask nothing else than its dtype and its number of dimensions, of which few exist: those
are traced one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opgraft.grafting.expressions import NotExpressible
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SIZES = (Tensor.shape.__get__, Tensor.size)  # type: ignore[attr-defined]
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_RANK = (Tensor.ndim.__get__, Tensor.dim)  # type: ignore[attr-defined]


class NoQuestions(TorchFunctionMode):
    """Refuses questions to tensors while it is entered, but for those in the module's docstring.

    The last dimension is free: it follows from the parameters of a module. torch's own functions may ask anything.

    Attributes:
        dtype_asked: code has asked for a dtype.

    Raises:
        NotExpressible: code asked; on leaving, if the code has caught that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype_asked = False
        self._asked = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _SIZES:
            return self._sizes(args[0].dim(), found, *args[1:], **(kwargs or {}))
        self.dtype_asked = self.dtype_asked or func == _DTYPE
        if func == _DTYPE or func in _RANK or _only_tensors(found):
            return found
        raise self._refusal(f"asks {getattr(func, '__name__', func)} of a tensor")

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]
        if self._asked and exc_type is None:
            raise NotExpressible(self._asked)

    def _sizes(self, rank: int, found: Any, dim: int | None = None) -> Any:
        if dim is not None:
            return found if dim in (-1, rank - 1) else _Unknown(self, found)
        return (*(_Unknown(self, size) for size in found[:-1]), *found[-1:])

    def _refusal(self, what: str) -> NotExpressible:
        self._asked = f"it {what}"
        return NotExpressible(self._asked)


def _only_tensors(found: Any) -> bool:
    return isinstance(found, Tensor) or (
        isinstance(found, (tuple, list)) and all(isinstance(t, Tensor) for t in found)
    )


def _refused(size: Any, *args: Any) -> Any:
    raise size.questions._refusal("looks at a size of its input")


def _passed_on(name: str) -> Callable[..., Any]:
    compute = getattr(int, name)

    def passed_on(self: Any, *args: Any) -> Any:
        found = compute(self, *args)
        return found if found is NotImplemented else _Unknown(self.questions, found)

    return passed_on


def _made(cls: type[int], questions: NoQuestions, size: int) -> Any:
    made: Any = int.__new__(cls, size)
    made.questions = questions
    return made


_ARITHMETIC = {
    f"__{side}{name}__" for name in ("add", "sub", "mul", "floordiv", "mod") for side in ("", "r")
}
_KEPT = {"__getattribute__", "__doc__", "__sizeof__"}
_ASKING = {name for name, value in vars(int).items() if callable(value)} - _ARITHMETIC - _KEPT
_Unknown: Any = type(
    "_Unknown",
    (int,),
    {
        "__doc__": "A size that torch can read, and Python code only compute with.",
        **dict.fromkeys(_ASKING, _refused),
        **{name: _passed_on(name) for name in _ARITHMETIC},
        "__new__": _made,
    },
)
