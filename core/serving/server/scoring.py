"""``/pooling``, ``/classify``, ``/score`` and ``/rerank``: vectors, labels and scores of texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from opgraft.errors import HTTPError
from opgraft.serving.embedding_engine import VectorRequest
from opgraft.serving.outputs import EmbeddingOutput
from opgraft.serving.server.embeddings import admitted, expect_texts
from opgraft.serving.server.faults import at
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.prompts import several
from opgraft.serving.server.protocol import (
    ClassifyRequest,
    Document,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from opgraft.serving.server.service import Service
from torch.nn.functional import cosine_similarity


class _Side(NamedTuple):
    """The texts of a field, each to be compared with a text of another field."""

    field: str
    texts: Sequence[str]

    @classmethod
    def of(cls, body: ScoreRequest | RerankRequest, field: str) -> _Side:
        """Return the texts of a field, which may be objects.

        Raises:
            HTTPError: there is no text.
        """
        given: Sequence[Any] = several(getattr(body, field), field)
        texts = [each.text if isinstance(each, Document) else str(each) for each in given]
        return cls(field, texts)


class Scoring:
    """A request for the vectors, labels or scores of texts.

    Args:
        service: answers the request.
        passing: the request over HTTP.
    """

    def __init__(self, service: Service, passing: Passing) -> None:
        self._service = service
        self._passing = passing
        self._tokens = 0

    async def pool(self, body: PoolingRequest) -> dict[str, Any]:
        """Return a vector for each text: the probabilities of labels, if the model has labels.

        Raises:
            HTTPError: the model is no encoder, or the request is not admitted or too large.
            RequestError: a text cannot be taken.
        """
        await self._begin(body)
        outputs = await self._pooled(body)
        rows = [
            {
                "index": index,
                "object": "pooling",
                "data": list(output.embedding),
            }
            for index, output in enumerate(outputs)
        ]
        return self._answer("pool", rows)

    async def classify(self, body: ClassifyRequest) -> dict[str, Any]:
        """Return the likeliest label of each text, and the probabilities of all labels.

        Raises:
            HTTPError: the model has no labels, or the request is not admitted or too large.
            RequestError: a text cannot be taken.
        """
        await self._begin(body)
        labels = self._labels()
        if not labels:
            message = f"{self._service.name} has no head for labels: ask a server of a classifier"
            raise HTTPError(400, message, field="model", code="unsupported_model")
        rows = []
        for index, output in enumerate(await self._pooled(body)):
            likeliest = max(range(len(labels)), key=output.embedding.__getitem__)
            told = {"label": labels[likeliest], "probs": list(output.embedding)}
            rows.append(
                {
                    "index": index,
                    **told,
                    "num_classes": len(labels),
                }
            )
        return self._answer("classify", rows)

    async def score(self, body: ScoreRequest) -> dict[str, Any]:
        """Return the score of each pair of texts.

        Raises:
            HTTPError: the numbers of texts differ, the model has no scores, or the request is not
                admitted or too large.
            RequestError: a text cannot be taken.
        """
        await self._begin(body)
        first, second = _sides(body)
        # One text is compared with each of the others.
        if len(first.texts) not in (1, len(second.texts)):
            counts = f"{first.field} has {len(first.texts)} texts, and {second.field} has "
            message = f"{counts}{len(second.texts)}: give one text and others, or texts in pairs"
            raise HTTPError(400, message, field=second.field, code="invalid_value")
        scores = await self._scores(body, first, second)
        rows = [
            {
                "index": index,
                "object": "score",
                "score": score,
            }
            for index, score in enumerate(scores)
        ]
        return self._answer("score", rows)

    async def rerank(self, body: RerankRequest) -> dict[str, Any]:
        """Return documents by their relevance for a query, the most relevant first.

        Raises:
            HTTPError: there is no document, the model has no scores, or the request is not admitted
                or too large.
            RequestError: a text cannot be taken.
        """
        await self._begin(body)
        documents = _Side.of(body, "documents")
        texts = documents.texts
        scores = await self._scores(body, _Side("query", [body.query]), documents)
        order = sorted(range(len(texts)), key=lambda index: -scores[index])
        # vLLM and Jina take 0 for all.
        most = max(0, body.top_n or 0) or len(order)
        results = []
        for index in order[:most]:
            row: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                row["document"] = {"text": texts[index]}
            results.append(row)
        return {**self._head("rerank"), "results": results}

    async def _begin(self, body: Any) -> None:
        self._service.expect_model(body.model)
        await self._service.check()

    def _labels(self) -> Sequence[str]:
        return self._service.encoder.encoder.labels

    async def _pooled(self, body: ClassifyRequest | PoolingRequest) -> Sequence[EmbeddingOutput]:
        """Return embeddings of texts, or the probabilities of labels if the model has labels."""
        texts = several(body.input, "input")
        most = expect_texts(texts, "input", self._service, body.truncate_prompt_tokens)
        encoder = self._service.encoder
        prepare: Callable[..., Any] = encoder.labelled if self._labels() else encoder.embedded
        with at("input"):
            requests = await prepare(texts, most=most)
        return await self._computed(requests)

    async def _scores(
        self, body: ScoreRequest | RerankRequest, first: _Side, second: _Side
    ) -> list[float]:
        """Return a score for each pair: of a cross-encoder, or the cosine of two embeddings."""
        labels = self._labels()
        if len(labels) > 1:
            message = (
                f"{self._service.name} tells {len(labels)} labels apart, and a score needs one: "
                "POST /classify gives the labels"
            )
            raise HTTPError(400, message, field="model", code="unsupported_model")
        most = None
        for side in (first, second):
            most = expect_texts(side.texts, side.field, self._service, body.truncate_prompt_tokens)
        encoder = self._service.encoder
        if labels:
            pairs = list(zip(_repeated(first, second), second.texts, strict=True))
            with at(second.field):
                requests = await encoder.labelled(pairs, most=most)
            return [output.embedding[0] for output in await self._computed(requests)]
        requests = []
        for side in (first, second):
            with at(side.field):
                requests += await encoder.embedded(side.texts, most=most)
        outputs = await self._computed(requests)
        return await self._service.prepare(_cosines, outputs, len(first.texts))

    async def _computed(self, requests: Sequence[VectorRequest]) -> Sequence[EmbeddingOutput]:
        outputs, self._tokens = await admitted(requests, self._service, self._passing)
        return outputs

    def _answer(self, kind: str, rows: Sequence[Any]) -> dict[str, Any]:
        return {
            **self._head(kind),
            "object": "list",
            "data": list(rows),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        usage = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        return {
            "id": f"{kind}-{self._passing.id}",
            "model": self._service.name,
            "created": int(time.time()),
            "usage": usage,
        }


def _sides(body: ScoreRequest) -> tuple[_Side, _Side]:
    """Return the first texts and the others, from the two fields that the request has.

    Raises:
        HTTPError: the request has no such fields, or more than two, or a field without a text.
    """
    names = {name for pair in body.pairs for name in pair}
    given = {name for name in names if getattr(body, name) is not None}
    pair = next((pair for pair in body.pairs if given == {*pair}), None)
    if pair is None:
        ways = ", or ".join(f"{first} and {second}" for first, second in body.pairs)
        told = "the texts to compare are missing, or given twice"
        field = min(given, default="text_1")
        raise HTTPError(400, f"{told}: give {ways}", field=field, code="invalid_value")
    first, second = pair
    return _Side.of(body, first), _Side.of(body, second)


def _repeated(first: _Side, second: _Side) -> Sequence[str]:
    """Return a first text for each second text."""
    return [*first.texts] * (len(second.texts) // len(first.texts))


def _cosines(outputs: Sequence[EmbeddingOutput], firsts: int) -> list[float]:
    """Return the cosines of the first embeddings with each of the others, or in pairs."""
    vectors = torch.tensor([output.embedding for output in outputs], dtype=torch.float64)
    found: list[float] = cosine_similarity(vectors[:firsts], vectors[firsts:]).tolist()
    return found
