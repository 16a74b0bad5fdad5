"""``OpenRequest``: a request with its answers that have not ended."""

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
        nothing = StringIO()
        return cls(
            request,
            GrowingOutput(index, lambda: detokenizer.written if detokenizer else nothing),
            detokenizer,
        )


@dataclass
class OpenRequest:
    """A request with its answers that have not ended, by the ids that the engine knows them by.

    Attributes:
        moves: how often it has gone on in another engine.
    """

    output: RequestOutput
    growing: dict[str, Answer]
    moves: int = 0

    def end(self, child: str, reason: str) -> None:
        """End an answer; the text that was held back may show that it came to a stop string."""
        answer = self.growing[child]
        output = answer.output
        if answer.detokenizer is not None:
            answer.detokenizer.finish()
            if answer.detokenizer.stop_reason is not None:
                output.stop_reason, reason = answer.detokenizer.stop_reason, "stop"
        output.finish_reason = reason
        self.output.outputs[output.index] = output.snapshot()
        del self.growing[child]
        self.output.finished = not self.growing

    def fail(self, message: str) -> None:
        """End all answers by an error."""
        for child in list(self.growing):
            self.growing[child].output.error = message
            self.end(child, "error")

    def abort(self) -> None:
        """End a request that no engine has begun with."""
        for child in list(self.growing):
            self.end(child, "abort")
        self.output.finished = True

    @property
    def is_answered(self) -> bool:
        """True if the request has ended, and not by an abort."""
        reasons = {answer.finish_reason for answer in self.output.outputs}
        return self.output.finished and "abort" not in reasons

    def outstanding(self, expected: int) -> int:
        """Return the tokens that are to be computed: the prompt until something came of it, and of the answers.

        Args:
            expected: tokens that an answer has unless it is limited to fewer; at least one is
                outstanding of each.
        """
        answers = list(self.growing.values())  # in one go, as the engine's thread takes some out
        lengths = [
            (answer.request.params.most_tokens, len(answer.output.token_ids)) for answer in answers
        ]
        prompt = 0 if any(length for _, length in lengths) else len(self.output.prompt_token_ids)
        return prompt + sum(max(min(most, expected) - length, 1) for most, length in lengths)


def none_open(request_id: str) -> RequestError:
    """Return the error for an abort of a request that does not exist."""
    return RequestError(
        f"request {request_id!r} cannot be aborted, as none of that id runs or waits: it has finished, or was never "
        "added; see that the id is the one that it was added by"
    )


def id_in_use(request_id: str) -> RequestError:
    """Return the error for a new request with the id of one that runs or waits."""
    return RequestError(
        f"request {request_id!r} is added, and one of that id runs: give each an id of its own"
    )
