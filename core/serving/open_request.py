"""``OpenRequest``: a request with its unfinished answers."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO

from opgraft.engine.request import Request
from opgraft.errors import RequestError
from opgraft.serving.detokenizer import Detokenizer
from opgraft.serving.outputs import GrowingOutput, RequestOutput


@dataclass
class Answer:
    """One of the answers of a request while it grows."""

    request: Request
    output: GrowingOutput
    detokenizer: Detokenizer | None

    @classmethod
    def of(cls, index: int, request: Request, detokenizer: Detokenizer | None) -> Answer:
        """Return an answer without tokens.

        Args:
            index: among the ``n`` answers.
            request: of the answer.
            detokenizer: makes the text; ``None`` to make none.
        """
        nothing = StringIO()

        def written() -> StringIO:
            return detokenizer.written if detokenizer else nothing

        return cls(request, GrowingOutput(index, written), detokenizer)


@dataclass
class OpenRequest:
    """A request with its unfinished answers, by the ids of the engine's requests.

    Attributes:
        output: of the request.
        growing: unfinished answers.
        moves: number of times that the request has moved to another engine.
    """

    output: RequestOutput
    growing: dict[str, Answer]
    moves: int = 0

    def end(self, child: str, reason: str) -> None:
        """End an answer. Its last text may complete a stop string, and change the reason."""
        answer = self.growing[child]
        output = answer.output
        if answer.detokenizer is not None:
            answer.detokenizer.finish()
            if answer.detokenizer.stop_reason is not None:
                output.stop_reason = answer.detokenizer.stop_reason
                reason = "stop"
        output.finish_reason = reason
        # A growing answer holds the detokenizer, which an ended one does not need.
        self.output.outputs[output.index] = output.snapshot()
        del self.growing[child]
        self.output.finished = not self.growing

    def fail(self, message: str) -> None:
        """End all answers with an error."""
        for child in list(self.growing):
            self.growing[child].output.error = message
            self.end(child, "error")

    def abort(self) -> None:
        """End a request before any engine has begun with it."""
        for child in list(self.growing):
            self.end(child, "abort")
        self.output.finished = True

    @property
    def is_answered(self) -> bool:
        """True if the request has ended, and not by an abort."""
        reasons = {answer.finish_reason for answer in self.output.outputs}
        return self.output.finished and "abort" not in reasons

    def outstanding(self, expected: int) -> int:
        """Return the number of tokens still to compute.

        The prompt counts until the first token of an answer. Each unfinished answer counts at least
        one token.

        Args:
            expected: tokens of an answer, unless its limit is lower.
        """
        # Copied in one go, because the engine's thread removes answers.
        answers = list(self.growing.values())
        outstanding = 0
        has_tokens = False
        for answer in answers:
            length = len(answer.output.token_ids)
            has_tokens = has_tokens or length > 0
            most = min(answer.request.params.most_tokens, expected)
            outstanding += max(most - length, 1)
        if not has_tokens:
            outstanding += len(self.output.prompt_token_ids)
        return outstanding


def none_open(request_id: str) -> RequestError:
    """Return the error for an abort of a request that does not exist."""
    return RequestError(
        f"request {request_id!r} cannot be aborted, as none of that id runs or waits: it has "
        "finished, or was never added; see that the id is the one that it was added by"
    )


def id_in_use(request_id: str) -> RequestError:
    """Return the error for a new request with the id of a running or waiting one."""
    return RequestError(
        f"request {request_id!r} is added, and one of that id runs: give each an id of its own"
    )
