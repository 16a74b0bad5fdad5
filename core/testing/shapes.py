"""Records of shapes: the calls of functional forms that a model makes, with sizes and counts.

``opgraft trace-shapes`` writes such a record. The folder ``model_shapes`` has the records of the
families that people run most, a file for each family.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from opgraft.base.files import read_regular
from opgraft.errors import InputError, close_matches

SCHEMA = "opgraft.shapes/1"
TOKENS = "tokens"
"""The size in a record that is the number of tokens of a call."""

ALL = "all"
"""The name of all shipped records together."""

FOLDER = Path(__file__).with_name("model_shapes")
LARGEST = 1 << 24
"""Bytes of a file with a record."""

_NEXT = "give a file that 'opgraft trace-shapes' has written, or the name of a shipped record"

Size: TypeAlias = int | str
Setting: TypeAlias = bool | int | float | str | tuple[int, ...] | None


@dataclass(frozen=True)
class TensorShape:
    """A tensor among the arguments of a call.

    Attributes:
        dtype: the name, such as ``bfloat16``.
        shape: the sizes; ``TOKENS`` stands for the number of tokens.
    """

    dtype: str
    shape: tuple[Size, ...]

    def sizes(self, tokens: int) -> tuple[int, ...]:
        """Return the sizes for a number of tokens."""
        sizes = []
        for size in self.shape:
            sizes.append(tokens if isinstance(size, str) else size)
        return tuple(sizes)

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"{self.dtype}[{sizes}]"


Argument: TypeAlias = TensorShape | Setting


@dataclass(frozen=True)
class FormCall:
    """A call of a functional form.

    Attributes:
        form: the name of the form.
        arguments: pairs of a name and a tensor or a setting.
    """

    form: str
    arguments: tuple[tuple[str, Argument], ...]

    @property
    def tensors(self) -> dict[str, TensorShape]:
        """The tensors among the arguments, by name."""
        found = {}
        for name, value in self.arguments:
            if isinstance(value, TensorShape):
                found[name] = value
        return found

    @property
    def settings(self) -> dict[str, Setting]:
        """The other arguments, by name."""
        found = {}
        for name, value in self.arguments:
            if not isinstance(value, TensorShape):
                found[name] = value
        return found

    def at(self, tokens: int) -> FormCall:
        """Return the call for a number of tokens."""
        arguments: list[tuple[str, Argument]] = []
        for name, value in self.arguments:
            if isinstance(value, TensorShape):
                value = TensorShape(value.dtype, value.sizes(tokens))
            arguments.append((name, value))
        return FormCall(self.form, tuple(arguments))

    def __str__(self) -> str:
        words = []
        for name, value in self.arguments:
            words.append(f"{name}={value}")
        listed = ", ".join(words)
        return f"{self.form}({listed})"


@dataclass(frozen=True)
class ModelShapes:
    """The calls of one model.

    Attributes:
        model: the name.
        counts: by call, the number of such calls.
    """

    model: str
    counts: Mapping[FormCall, int]


@dataclass(frozen=True)
class ShapeRecord:
    """The calls of some models.

    Attributes:
        name: of the record, or the path of the file.
        models: the models.
    """

    name: str
    models: tuple[ModelShapes, ...]

    def calls(self, form: str) -> dict[FormCall, str]:
        """Return the distinct calls of a form, each with the name of the first model."""
        found: dict[FormCall, str] = {}
        for model in self.models:
            for call in model.counts:
                # Models of one family share many calls.
                if call.form == form and call not in found:
                    found[call] = model.model
        return found


def shipped() -> list[str]:
    """Return the names of the shipped records."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def find_record(name: str) -> ShapeRecord:
    """Return a shipped record by name, all of them for ``all``, or the record in a file.

    Raises:
        InputError: there is no such record, or the file holds something else.
    """
    names = shipped()
    if name == ALL:
        models: list[ModelShapes] = []
        for each in names:
            models += find_record(each).models
        return ShapeRecord(ALL, tuple(models))
    if name in names:
        return ShapeRecord(name, read(FOLDER / f"{name}.json"))
    path = Path(name)
    if not path.exists():
        matches = close_matches(name, [*names, ALL])
        raise InputError(
            f"there is neither a file nor a shipped record of shapes {name!r}: {matches}"
        )
    return ShapeRecord(name, read(path))


def read(path: Path) -> tuple[ModelShapes, ...]:
    """Return the models of a file.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    try:
        return _models_of(json.loads(read_regular(path, LARGEST)))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}: {_NEXT}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} holds no record of shapes: {error}: {_NEXT}") from error


def written(models: Sequence[ModelShapes]) -> str:
    """Return the text of a file, with a line for each call."""
    listed = ",\n".join(map(_text_of, models))
    schema = json.dumps(SCHEMA)
    return f'{{\n "schema": {schema},\n "models": [\n{listed}\n ]\n}}\n'


def _text_of(model: ModelShapes) -> str:
    rows = []
    for call, count in model.counts.items():
        arguments = {name: _plain(value) for name, value in call.arguments}
        row = {"form": call.form, "count": count, "arguments": arguments}
        # A line for each call, so that a diff shows the calls that changed.
        rows.append(f"   {json.dumps(row)}")
    lines = ",\n".join(rows)
    name = json.dumps(model.model)
    return f'  {{"model": {name}, "calls": [\n{lines}\n  ]}}'


def _plain(value: Argument) -> Any:
    if isinstance(value, TensorShape):
        return {"dtype": value.dtype, "shape": list(value.shape)}
    if isinstance(value, tuple):
        return list(value)
    return value


def _models_of(data: Any) -> tuple[ModelShapes, ...]:
    """Return the models in plain data.

    Raises:
        ValueError: the data are of another schema, or have wrong values.
    """
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"its schema is {schema!r:.80}, expected {SCHEMA!r}")
    rows = _typed(data, "models", list, "the record")
    return tuple(map(_model_of, rows))


def _model_of(row: Any) -> ModelShapes:
    name = _typed(row, "model", str, "a model")
    counts: dict[FormCall, int] = {}
    # A name of others may be long.
    model = f"the model {name!r:.80}"
    for number, each in enumerate(_typed(row, "calls", list, model)):
        where = f"call {number} of {model}"
        form = _typed(each, "form", str, where)
        call = FormCall(form, tuple(_arguments_of(each, where)))
        count = _typed(each, "count", int, where)
        if count < 1:
            raise ValueError(f"{where} has the count {count}, expected at least 1")
        # A file that was merged by hand may have a call twice.
        counts[call] = counts.get(call, 0) + count
    return ModelShapes(name, counts)


def _arguments_of(row: Any, where: str) -> Iterator[tuple[str, Argument]]:
    for name, value in _typed(row, "arguments", dict, where).items():
        place = f"the argument {name!r:.80} of {where}"
        if isinstance(value, dict):
            yield name, _tensor_of(value, place)
        elif isinstance(value, list):
            if not all(map(_is_size, value)):
                raise ValueError(f"{place} is {value!r:.80}, expected integers")
            yield name, tuple(value)
        else:
            yield name, value


def _tensor_of(row: Any, place: str) -> TensorShape:
    dtype = _typed(row, "dtype", str, place)
    sizes = _typed(row, "shape", list, place)
    for size in sizes:
        if size != TOKENS and not _is_size(size):
            raise ValueError(f"{place} has the shape {sizes!r:.80}, expected sizes")
    return TensorShape(dtype, tuple(sizes))


def _is_size(value: Any) -> bool:
    # True is an integer for Python.
    is_integer = type(value) is int
    return is_integer and value >= 0


def _typed(row: Any, key: str, kind: Callable[..., Any], where: str) -> Any:
    """Return a value of plain data, of a type.

    Raises:
        ValueError: the value is missing, or has another type.
    """
    value = None
    if isinstance(row, dict):
        value = row.get(key)
    # Not isinstance(): True is an integer for Python.
    if type(value) is not kind:
        raise ValueError(f"{where} has {key} {value!r:.80}, expected {kind.__name__}")
    return value
