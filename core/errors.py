"""Every error that opgraft raises on purpose.

Each message says what failed, which thing was concerned, why, and the next step or the setting that changes it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence

from opgraft.base.text import printable

MOST_LISTED = 20
"""Problems that an error names one by one."""

_FARTHER = 0.05
"""A name is mentioned if its distance exceeds the least distance by at most this share of letters."""

_MOST_KNOWN = 40
"""Names that an error lists of those which are known."""


class OpgraftError(Exception):
    """Base of all errors of opgraft. ``exit_code`` is what the command line ends with.

    Messages quote plugins, packages and files, so they are printed as one harmless line.
    """

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(OpgraftError, ValueError):
    """A setting has a value that cannot be used; the message names the setting and where it was set."""

    exit_code = 2


class InputError(OpgraftError, ValueError):
    """Something handed in by the user, such as a file, a folder or an argument, cannot be used."""

    exit_code = 2


class CheckpointError(InputError):
    """The files of a checkpoint are damaged or refused, or hold other weights than the model has."""

    @classmethod
    def listing(cls, subject: str, problems: Sequence[str], next_step: str) -> CheckpointError:
        """Make the error that lists ``problems``, all of them counted and the first ``MOST_LISTED`` named."""
        shown = "; ".join(problems[:MOST_LISTED])
        more = f"; and {len(problems) - MOST_LISTED} more" if len(problems) > MOST_LISTED else ""
        count = f"{len(problems)} problems: " if len(problems) > 1 else ""
        return cls(f"{subject}: {count}{shown}{more}. Next: {next_step}.")


class VocabularyError(CheckpointError):
    """The vocabulary is of an unread kind. Token ids need none."""


class RequestError(InputError):
    """A request cannot be served as it was made, or there is none of that id. Others go on.

    Attributes:
        message: without ``source``.
        field: the setting of the request that is at fault, where it is one.
        code: a word that programs tell the error by.
    """

    def __init__(
        self,
        message: str,
        field: str | None = None,
        *,
        source: str | None = None,
        code: str = "invalid_value",
    ) -> None:
        super().__init__(message if source is None else f"{source}: {message}")
        self.message = message
        self.field = field
        self.code = code


class HTTPError(OpgraftError):
    """A request over HTTP is answered with an error in OpenAI's shape.

    Attributes:
        status: of the answer.
        field: of the request that is at fault, the ``param`` of the answer; None where it is none.
        code: a word that programs tell the error by.
        headers: of the answer, besides the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code
        self.headers = dict(headers or {})


class EngineError(OpgraftError):
    """An engine has stopped, and neither goes on with its requests nor takes new ones."""

    exit_code = 5


class RegistrationError(OpgraftError, TypeError):
    """An op class or a replacement was rejected when it was registered."""


class UnknownTargetError(RegistrationError):
    """A replacement names a target that no registered op answers to."""


class ConflictError(OpgraftError):
    """Two providers claim the same op, platform or name, and no setting chooses between them."""


class MissingKernelError(OpgraftError, NotImplementedError):
    """An op was asked for a kernel that neither its class nor the rest of the dispatch chain defines."""


class GraftError(OpgraftError):
    """A model cannot be grafted, or put back to what it was, as it stands."""


class ConstructionError(OpgraftError):
    """A model cannot be constructed as it is written."""


class PackError(OpgraftError):
    """Weights cannot be packed, or a call needs plain weights that were dropped."""


class CompilationError(OpgraftError):
    """A model cannot be compiled, a pass over its graph failed, or compiled code was called with other inputs."""


class CacheEntryError(OpgraftError):
    """An entry of the cache of compiled code cannot be used, or none can be made of what was compiled."""


class RecompilationError(OpgraftError):
    """A program was compiled where none may be, because a shape or a value differs from those compiled for."""


class DistributedError(OpgraftError):
    """The ranks of a job cannot be put in groups, or a group does not exist."""


class StageError(DistributedError):
    """An earlier stage of a pipeline has failed in a step; its error is the message."""


class LayerError(OpgraftError, ValueError):
    """A layer cannot be made with these sizes or for this number of ranks, or cannot compute a batch."""


class WeightError(OpgraftError, ValueError):
    """A weight that is loaded does not fit the parameter that it is for.

    ``fault`` is the message without the reason, which a list of several faults gives once.
    """

    def __init__(self, fault: str, reason: str = "") -> None:
        super().__init__(f"{fault}: {reason}" if reason else fault)
        self.fault = printable(fault)

    @classmethod
    def of_shape(cls, what: str, found: Sequence[int], expected: object) -> WeightError:
        """Make the error about a weight of another shape than ``expected``; ``what`` names its layer."""
        return cls(
            f"{what}: the weight that is loaded has shape {tuple(found)}, expected {expected}",
            "the model's config and its checkpoint do not belong together",
        )


class QuantizationError(OpgraftError, NotImplementedError):
    """A weight method cannot do what a layer needs of it."""

    exit_code = 2


class QuantizationSettingError(QuantizationError, ConfigError):
    """A setting of quantization names a method or layers that there are none of, or contradicts the checkpoint."""


class ModelError(OpgraftError, ValueError):
    """A model cannot be made as its config describes it, or nothing is registered for its architecture."""

    exit_code = 2


class PlatformError(OpgraftError):
    """The platform of this process could not be decided, or is not the one that was asked for."""

    exit_code = 3


class PlatformConflictError(PlatformError, ConflictError):
    """Two out-of-tree platforms can be used here, and no setting chooses between them."""


class AgreementError(OpgraftError):
    """A worker process decides otherwise than the process that started it and shared its decisions."""


class ChildError(OpgraftError):
    """A child process that was asked something gave no usable answer."""


class LostChildError(ChildError):
    """The code in a child process that was asked something held it up or took it down."""


class PluginError(OpgraftError):
    """A plugin could not be discovered, selected, loaded or activated, or a method of its platform failed.

    ``location`` is ``file:line`` of the fault, where it lies in the plugin and no traceback leads to it.
    """

    exit_code = 4

    def __init__(self, message: str, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location


def near_matches(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return up to three of the ``known`` names that ``name`` may be a misspelling of, the nearest first.

    Names that are much farther than the nearest are left out.
    """
    import difflib  # which no command needs that goes well

    found = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=cutoff)
    ratios = [difflib.SequenceMatcher(None, match, name).ratio() for match in found]
    return [
        match for match, ratio in zip(found, ratios, strict=True) if ratio >= ratios[0] - _FARTHER
    ]


def close_matches(name: str, known: Iterable[str]) -> str:
    """Give words for an error about an unknown ``name``: the nearest known names, or the first where none is near."""
    names = sorted(set(known))
    near = near_matches(name, names)
    if near:
        return "did you mean " + " or ".join(repr(match) for match in near) + "?"
    more = f", and {len(names) - _MOST_KNOWN} more" if len(names) > _MOST_KNOWN else ""
    return f"known: {', '.join(names[:_MOST_KNOWN]) or 'none'}{more}."


def raised_at(error: BaseException) -> str:
    """Give ``file:line`` of the code that raised a caught ``error``, for messages about other people's code."""
    # As of an import that fails.
    places = [place for _, place in _places(error) if not place.startswith("<frozen ")]
    return places[-1] if places else "an unknown place"


def raised_in(package: str, error: BaseException) -> str | None:
    """Give ``file:line`` of the innermost code of a top-level ``package`` that a caught ``error`` passed through.

    For a file that is no Python it is the place that the parser names. ``None`` where no code of the package ran.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    return next(
        (
            place
            for module, place in reversed(_places(error))
            if module.partition(".")[0] == package
        ),
        None,
    )


def _places(error: BaseException) -> list[tuple[str, str]]:
    """List the module and ``file:line`` of each frame of a traceback, the outermost first."""
    frames = traceback.walk_tb(error.__traceback__)
    return [
        (str(frame.f_globals.get("__name__")), f"{frame.f_code.co_filename}:{line}")
        for frame, line in frames
    ]
