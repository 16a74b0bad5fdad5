"""All errors of opgraft.

A message names the failure, the thing, the reason, and the next step or the setting to change.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence

from opgraft.base.text import printable

MOST_LISTED = 20
"""Problems that an error names one by one."""

_FARTHER = 0.05
"""A match is told if its similarity is at most this much below the best similarity."""

_MOST_KNOWN = 40
"""Known names that an error lists."""


class OpgraftError(Exception):
    """Base of all errors of opgraft. The command line ends with ``exit_code``.

    Messages quote plugins, packages and files. So a message is printed as one harmless line.
    """

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(OpgraftError, ValueError):
    """A setting has an unusable value. The message names the setting and the place of the value."""

    exit_code = 2


class InputError(OpgraftError, ValueError):
    """A file, a folder or an argument of the user cannot be used."""

    exit_code = 2


class CheckpointError(InputError):
    """The files of a checkpoint are damaged or refused, or hold other weights than the model."""

    @classmethod
    def listing(cls, subject: str, problems: Sequence[str], next_step: str) -> CheckpointError:
        """Return the error with the number of ``problems`` and the first ``MOST_LISTED``."""
        listed = list(problems[:MOST_LISTED])
        count = len(problems)
        if count > MOST_LISTED:
            listed.append(f"and {count - MOST_LISTED} more")
        shown = "; ".join(listed)
        if count > 1:
            shown = f"{count} problems: {shown}"
        return cls(f"{subject}: {shown}. Next: {next_step}.")


class VocabularyError(CheckpointError):
    """opgraft cannot read a vocabulary of this kind. Prompts of token ids need no vocabulary."""


class RequestError(InputError):
    """A request cannot be served, or no request has the id. Other requests go on.

    Attributes:
        message: without ``source``.
        field: the setting of the request at fault, or ``None``.
        code: a word for programs.
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
    """The answer to an HTTP request is an error in OpenAI's form.

    Attributes:
        status: of the answer.
        field: the field of the request at fault, or ``None``. The answer has it as ``param``.
        code: a word for programs.
        headers: more headers of the answer.
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
    """An engine has stopped. Its requests end, and it takes no new ones."""

    exit_code = 5


class RegistrationError(OpgraftError, TypeError):
    """The registration of an op class or a replacement was rejected."""


class UnknownTargetError(RegistrationError):
    """A replacement names a target, but no registered op has the name."""


class ConflictError(OpgraftError):
    """Two providers claim the same op, platform or name, and no setting chooses between them."""


class MissingKernelError(OpgraftError, NotImplementedError):
    """An op lacks a kernel: no class defines one for the rest of the dispatch chain."""


class GraftError(OpgraftError):
    """A model cannot be grafted, or cannot be put back to the state before."""


class ConstructionError(OpgraftError):
    """The constructor of a model does not fit opgraft."""


class PackError(OpgraftError):
    """Weights cannot be packed, or a call needs plain weights after they were dropped."""


class CompilationError(OpgraftError):
    """A model cannot be compiled, a pass failed, or compiled code was called with other inputs."""


class CacheEntryError(OpgraftError):
    """An entry of the cache of compiled code cannot be used, or cannot be made."""


class RecompilationError(OpgraftError):
    """A new shape or value needs new code, but this process may not compile any more."""


class DistributedError(OpgraftError):
    """The ranks of a job cannot be put in groups, or a group does not exist."""


class StageError(DistributedError):
    """An earlier stage of a pipeline has failed in a step. The message tells the fault there."""


class LayerError(OpgraftError, ValueError):
    """A layer does not fit these sizes or this number of ranks, or cannot compute a batch."""


class WeightError(OpgraftError, ValueError):
    """A loaded weight does not fit its parameter.

    ``fault`` is the message without the reason. A list of faults gives the reason once.
    """

    def __init__(self, fault: str, reason: str = "") -> None:
        super().__init__(f"{fault}: {reason}" if reason else fault)
        self.fault = printable(fault)

    @classmethod
    def of_shape(cls, what: str, found: Sequence[int], expected: object) -> WeightError:
        """Return the error about a weight with a wrong shape. ``what`` names the layer."""
        return cls(
            f"{what}: the weight that is loaded has shape {tuple(found)}, expected {expected}",
            "the model's config and its checkpoint do not belong together",
        )


class QuantizationError(OpgraftError, NotImplementedError):
    """A weight method lacks an ability that a layer needs."""

    exit_code = 2


class QuantizationSettingError(QuantizationError, ConfigError):
    """A setting of quantization names unknown methods or layers, or contradicts the checkpoint."""


class ModelError(OpgraftError, ValueError):
    """The config of a model cannot be followed, or no model is registered for the architecture."""

    exit_code = 2


class PlatformError(OpgraftError):
    """The platform of this process could not be decided, or is another one than requested.

    ``location`` is ``file:line`` of a fault in the class of a platform, if known.
    """

    exit_code = 3

    def __init__(self, message: str, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location


class PlatformConflictError(PlatformError, ConflictError):
    """Two out-of-tree platforms can be used here, and no setting chooses between them."""


class AgreementError(OpgraftError):
    """A worker process does not follow the decisions that its parent process has shared."""


class ChildError(OpgraftError):
    """A child process gave no usable answer."""


class LostChildError(ChildError):
    """The code in a child process held the process up or took the process down."""


class PluginError(OpgraftError):
    """A plugin was not discovered, selected, loaded or activated, or its platform failed.

    ``location`` is ``file:line`` of a fault in the plugin, if no traceback leads there.
    ``provenance`` is the record of ``opgraft.explain_exception`` if the message has its words.
    """

    exit_code = 4

    def __init__(
        self, message: str, location: str | None = None, provenance: object = None
    ) -> None:
        super().__init__(message)
        self.location = location
        self.provenance = provenance


def near_matches(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return up to three ``known`` names about as close to a misspelt ``name`` as the nearest."""
    # Only a failing command needs the module.
    import difflib

    # Sorted, as a message must not depend on the order of a set.
    found = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=cutoff)
    near: list[str] = []
    least = 0.0
    for match in found:
        similarity = difflib.SequenceMatcher(None, match, name).ratio()
        if not near:
            least = similarity - _FARTHER
        if similarity >= least:
            near.append(match)
    return near


def close_matches(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown ``name``: near names, or all known names."""
    names = sorted(set(known))
    near = near_matches(name, names)
    # A list of all names would hide the likely one.
    if near:
        return "did you mean " + " or ".join(repr(match) for match in near) + "?"
    listed = names[:_MOST_KNOWN] or ["none"]
    left_out = len(names) - _MOST_KNOWN
    if left_out > 0:
        listed.append(f"and {left_out} more")
    return f"known: {', '.join(listed)}."


def raised_at(error: BaseException) -> str:
    """Return ``file:line`` of the code that raised a caught ``error``, for messages."""
    # The frames of a failed import are frozen.
    places = [place for _, place in _places_of_frames(error) if not place.startswith("<frozen ")]
    return places[-1] if places else "an unknown place"


def raised_in(package: str, error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost code of a ``package`` below a caught ``error``.

    For a file without valid Python, return the place of the parser. Return ``None`` if no code of
    the package ran.
    """
    # A file without valid Python has no frame.
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    for module, place in reversed(_places_of_frames(error)):
        top_level, _, _ = module.partition(".")
        if top_level == package:
            return place
    return None


def _places_of_frames(error: BaseException) -> list[tuple[str, str]]:
    """Return the module and ``file:line`` of each frame of a traceback, the outermost first."""
    places = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        places.append((module, f"{frame.f_code.co_filename}:{line}"))
    return places
