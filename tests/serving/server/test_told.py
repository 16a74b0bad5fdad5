"""What operators and programs are told of a server: by its metrics, its documents and its guide."""

from __future__ import annotations

from pathlib import Path

from support.servers import Server

DOCS = Path(__file__).parents[3] / "docs"


def test_metrics_tell_what_they_leave_out(server: Server) -> None:
    """Tokens of prompts that were found in the cache are not among those computed, as the help of the metric says."""
    prompt = "a mat for the cat that sat " * 6

    def computed() -> tuple[float, int]:
        before = server.metric("prompt_tokens_total")
        told = server.complete(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens"]
        return server.metric("prompt_tokens_total") - before, told

    (first, told), (second, again) = computed(), computed()
    assert first == told == again > second
    assert "without those of the cache" in server.get("/metrics").text


def test_every_path_and_status_is_in_the_docs(server: Server) -> None:
    """What the OpenAPI document has is in the guide, with that document, and so is the status of those who left."""
    guide = (DOCS / "how-to" / "serve-a-model.md").read_text()
    for path in [*server.get("/openapi.json").json()["paths"], "/openapi.json"]:
        assert f"`{path}`" in guide
    assert "499" in guide
