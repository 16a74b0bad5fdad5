"""``/v1/embeddings``: the vectors of texts, by an encoder."""

from __future__ import annotations

import array
import base64
import sys
from collections.abc import Sequence
from typing import Any

from opgraft.errors import HTTPError
from opgraft.serving.server.faults import at
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.prompts import several
from opgraft.serving.server.protocol import EmbeddingRequest
from opgraft.serving.server.service import Service


async def embed(service: Service, body: EmbeddingRequest, passing: Passing) -> dict[str, Any]:
    """Answer a request for the vectors of texts.

    Raises:
        HTTPError: the model is no encoder, or the request is not admitted or too large.
        RequestError: a text cannot be taken.
    """
    service.expect_model(body.model)
    await service.check()
    texts = several(body.input, "input")
    most = service.settings.max_inputs
    if len(texts) > most:
        message = f"input has {len(texts)} texts, and this server takes {most}"
        raise HTTPError(400, message, field="input", code="limit_exceeded")
    for text in texts:
        service.expect_characters(text if isinstance(text, str) else "", "input")
    with at("input"):
        ids = await service.encoder.encode(texts)
    tokens = sum(map(len, ids))
    passing.record["prompt_tokens"] = tokens
    service.admission.take(passing.slot, len(ids), tokens)
    outputs = await service.encoder.embed(ids)
    written = _base64 if body.encoding_format == "base64" else list
    rows = [
        {"object": "embedding", "index": index, "embedding": written(output.embedding)}
        for index, output in enumerate(outputs)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": rows, "model": service.name, "usage": usage}


def _base64(vector: Sequence[float]) -> str:
    """Return a vector as little-endian float32 in base64, as OpenAI does."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
