"""Notice questions of code to tensors, as the code might take another way for another answer.

One trace shows one way. So a forward that is recognised by a trace may pass the sizes of a tensor
on, to ``view`` for example, and may not look at the sizes. A forward may ask for the dtype and for
the number of dimensions. Few of each exist, and a trace is made for each.
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
    """Refuses questions to tensors inside the block, except those in the module's docstring.

    The last dimension is free, as the parameters of a module fix the last dimension. torch's own
    functions may ask anything.

    Attributes:
        dtype_asked: True if code has asked for a dtype.

    Raises:
        NotExpressible: code asked; at the end of the block if the code caught the error.
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
        answer = func(*args, **(kwargs or {}))
        # Code may pass a size on, but not look at it, so it gets an integer that refuses to tell.
        if func in _SIZES:
            return self._sizes(args[0].dim(), answer, *args[1:], **(kwargs or {}))
        if func == _DTYPE:
            self.dtype_asked = True
            return answer
        if func in _RANK or _only_tensors(answer):
            return answer
        raise self.refusal(f"asks {getattr(func, '__name__', func)} of a tensor")

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]
        # Code may have caught the error and gone another way.
        if self._asked and exc_type is None:
            raise NotExpressible(self._asked)

    def _sizes(self, rank: int, answer: Any, dim: int | None = None) -> Any:
        """Hide every size except the last one."""
        if dim is None:
            return (*(_Size(self, size) for size in answer[:-1]), *answer[-1:])
        return answer if dim in (-1, rank - 1) else _Size(self, answer)

    def refusal(self, question: str) -> NotExpressible:
        """Return the error for a question, and raise the error again at the end of the block."""
        self._asked = f"it {question}"
        return NotExpressible(self._asked)


def _only_tensors(answer: Any) -> bool:
    if isinstance(answer, tuple | list):
        return all(isinstance(each, Tensor) for each in answer)
    return isinstance(answer, Tensor)


def _refuse(size: Any, *args: Any) -> Any:
    raise size.questions.refusal("looks at a size of its input")


def _hidden(name: str) -> Callable[..., Any]:
    """Make a method of ``int`` that returns a hidden size."""
    compute = getattr(int, name)

    def method(self: Any, *args: Any) -> Any:
        result = compute(self, *args)
        return result if result is NotImplemented else _Size(self.questions, result)

    return method


def _new_size(cls: type[int], questions: NoQuestions, size: int) -> Any:
    # An integer, as functions of torch take no other sizes.
    made: Any = int.__new__(cls, size)
    made.questions = questions
    return made


_ARITHMETIC = {
    f"__{side}{name}__" for name in ("add", "sub", "mul", "floordiv", "mod") for side in ("", "r")
}
_KEPT = {"__getattribute__", "__doc__", "__sizeof__"}
_ASKING = {name for name, value in vars(int).items() if callable(value)} - _ARITHMETIC - _KEPT
_Size: Any = type(
    "_Size",
    (int,),
    {
        "__doc__": "A size for torch to read. Python code may only compute with a size.",
        **dict.fromkeys(_ASKING, _refuse),
        **{name: _hidden(name) for name in _ARITHMETIC},
        "__new__": _new_size,
    },
)
