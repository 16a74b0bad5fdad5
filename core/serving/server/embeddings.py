"""``/v1/embeddings``: the vectors of texts, by an encoder."""

from __future__ import annotations

import array
import base64
import math
import sys
from collections.abc import Sequence
from typing import Any

from opgraft.errors import HTTPError
from opgraft.serving.arguments import placed
from opgraft.serving.embedding_engine import VectorRequest
from opgraft.serving.outputs import EmbeddingOutput
from opgraft.serving.prompts import Prompt, expect_unicode
from opgraft.serving.server import protocol
from opgraft.serving.server.conventions import note_request
from opgraft.serving.server.faults import at
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.prompts import several
from opgraft.serving.server.sampling import expect_kept
from opgraft.serving.server.service import Service


async def embed(
    service: Service, body: protocol.EmbeddingRequest, passing: Passing
) -> dict[str, Any]:
    """Answer a request for the vectors of texts.

    Raises:
        HTTPError: the model is no encoder, or the request is not admitted or too large.
        RequestError: a text cannot be taken.
    """
    service.expect_model(body.model)
    await service.check()
    texts = several(body.input, "input")
    most = expect_texts(texts, "input", service, body.truncate_prompt_tokens)
    with at("input"):
        requests = await service.encoder.embedded(texts, most=most)
    outputs, tokens = await admitted(requests, service, passing)
    written = _base64 if body.encoding_format == "base64" else list
    rows = []
    for index, output in enumerate(outputs):
        vector = written(_cut(output.embedding, body.dimensions))
        rows.append(
            {
                "object": "embedding",
                "index": index,
                "embedding": vector,
            }
        )
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {
        "object": "list",
        "data": rows,
        "model": service.name,
        "usage": usage,
    }


def expect_texts(
    texts: Sequence[Prompt], field: str, service: Service, most: int | None
) -> int | None:
    """Check the number and the characters of texts, and return the most tokens of a text.

    Args:
        texts: of a field.
        field: for errors.
        service: has the limits.
        most: tokens of a text, as the request says. -1 stands for as many as the model takes.

    Raises:
        HTTPError: there are too many, or one is too long, or ``most`` is no such number.
        RequestError: a text has half of a surrogate pair.
    """
    limit = service.settings.max_inputs
    if len(texts) > limit:
        message = f"{field} has {len(texts)} texts, and this server takes {limit}"
        raise HTTPError(400, message, field=field, code="limit_exceeded")
    for place, text in enumerate(texts):
        if isinstance(text, str):
            service.expect_characters(text, field)
            with at(field):
                expect_unicode(text, placed("text", place, len(texts)))
    longest = service.max_model_len
    most = expect_kept(longest if most == -1 else most)
    return None if most is None else min(most, longest)


async def admitted(
    requests: Sequence[VectorRequest], service: Service, passing: Passing
) -> tuple[Sequence[EmbeddingOutput], int]:
    """Return the vectors of prepared texts, and the number of their tokens.

    Raises:
        HTTPError: there is no room for so many texts.
    """
    tokens = sum(len(request.ids) for request in requests)
    passing.record["prompt_tokens"] = tokens
    operation = passing.record["path"].rpartition("/")[2]
    note_request(operation, service.name, tokens)
    service.admission.take(passing.slot, len(requests), tokens)
    return await service.encoder.computed(requests), tokens


def _cut(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """Return the first numbers of a vector, with the length 1 if the whole vector has it.

    Raises:
        HTTPError: the vector has fewer numbers.
    """
    if dimensions is None:
        return vector
    if not 1 <= dimensions <= len(vector):
        message = f"dimensions is {dimensions}, and vectors have {len(vector)}: use 1 to as many"
        raise HTTPError(400, message, field="dimensions", code="invalid_value")
    part = vector[:dimensions]
    # Clients compare such vectors by products, which need the length 1.
    length = math.hypot(*part)
    is_normal = math.isclose(math.hypot(*vector), 1, rel_tol=1e-3)
    if not (is_normal and length):
        return part
    return [number / length for number in part]


def _base64(vector: Sequence[float]) -> str:
    """Return a vector as little-endian float32 in base64, as OpenAI does."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
