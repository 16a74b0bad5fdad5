"""The page in a real browser: headless Chromium, driven by Playwright."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.servers import Server, expect_idle, serving

pytest.importorskip("fastapi")

PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 800}
HOSTILE = "<img src=x onerror=document.title='hit'><script>document.title='hit'</script><b>bold</b>"
SEVERAL = re.compile(r"about \d+ tokens")
REFUSED = "Failed to load resource: the server responded with a status of 401"
"""Chromium's own line about an answer that asks for a key."""


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open the page of a server; nothing may be written to its console but what ``allowed`` has.

    A page asks its server again and again: a test closes the page before its server ends.
    """
    contexts, lines = [], []

    def visit(server: Server, allowed: str | None = None, **options: Any) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console",
            lambda line: (
                lines.append(line.text) if not allowed or allowed not in line.text else None
            ),
        )
        page.on("pageerror", lambda error: lines.append(str(error)))
        page.goto(server.url)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not lines


@pytest.fixture(scope="module")
def smollm2(browser: Any) -> Iterator[Server]:
    """A server of the real model, which nobody starts without a browser."""
    with serving("smollm2", "--cache.num_blocks", "64", "--model.max_model_len", "1024") as running:
        yield running


def ask(page: Any, prompt: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.keyboard.press("Enter")


def answer_of(page: Any) -> str:
    """Return the text of the last answer, once it has ended."""
    turn = page.locator(".turn[aria-busy=false]").last
    turn.wait_for()
    return str(turn.locator(".text").text_content())


def streamed(*events: dict[str, Any], end: str = "data: [DONE]\n\n") -> Callable[[Any], None]:
    """Return what answers a chat by events that no model of ours would write."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end
    return lambda route: route.fulfill(body=body, content_type="text/event-stream")


def without_end(route: Any) -> None:
    """Have the server go on as long as the context lasts, so that the answer comes for as long as it is looked at."""
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def test_it_chats_with_the_real_model(smollm2: Server, visit: Callable[..., Any]) -> None:
    """The page shows an answer, tells its speed, sends the chat so far with the next prompt, and plots the load."""
    page = visit(smollm2)
    page.get_by_text("Options").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("12")
    ask(page, "What is the capital of France?")
    assert "Paris" in answer_of(page)
    figures = page.locator(".turn .figures").text_content()
    assert "12 tokens" in figures or "8 tokens" in figures, figures
    assert "tokens/s" in figures
    assert "first after" in figures
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "And of Italy?")
    roles = [message["role"] for message in asked.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]
    answer_of(page)
    page.get_by_role("img", name="Time to first token: now").wait_for()


def test_stop_stops(smollm2: Server, visit: Callable[..., Any]) -> None:
    """An answer is shown while it comes; the button ends it in the server too, and keeps what has come."""
    page = visit(smollm2)
    page.route("**/v1/chat/completions", without_end)
    ask(page, "Count from one to a thousand, in words.")
    page.locator(".turn[aria-busy=true] .figures", has_text=SEVERAL).wait_for()
    assert smollm2.metric("num_requests_running") == 1
    page.get_by_role("button", name="Stop").click()
    assert "stopped" in page.locator(".turn[aria-busy=false] .figures").text_content()
    assert answer_of(page)
    expect_idle(smollm2)
    page.get_by_role("button", name="Send").wait_for()
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_what_ran_is_told(server: Server, visit: Callable[..., Any]) -> None:
    """The panel has the platform with its reason, and each op with its kernel, provider, count and reason."""
    page = visit(server)
    page.locator("#ops li").first.wait_for()
    told = server.get("/v1/decisions").json()
    panel = page.locator("#engine").text_content()
    for text in (
        told["platform"],
        told["decision"]["reason"],
        *(op["kernel"] for op in told["ops"] if op["runs"]),
    ):
        assert text in panel
    op = page.locator("#ops li", has_text="rms_norm").first
    count = sum(each["op"] == "rms_norm" for each in told["ops"])
    assert f"\N{MULTIPLICATION SIGN} {count}" in op.text_content()
    op.get_by_text("Why").click()
    assert op.get_by_text(
        next(each["reason"] for each in told["ops"] if each["op"] == "rms_norm")
    ).is_visible()


def test_an_encoder_compares_texts(visit: Callable[..., Any]) -> None:
    """The page of an encoder is no chat: it ranks texts by their likeness to the first, and tells what is refused."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with serving("minilm", "--server.max_inputs", "4") as encoder:
        page = visit(encoder, allowed="400 (Bad Request)")
        texts = page.get_by_label("Texts, one a line")
        texts.fill("A cat sleeps.\nBonds fell today.\n\n<b>A kitten</b> is asleep.")
        page.keyboard.press("Enter")
        page.locator(".turn[aria-busy=false] .alike").wait_for()
        rows = [row.text_content() for row in page.locator(".alike li").all()]
        assert [row[5:] for row in rows] == ["<b>A kitten</b> is asleep.", "Bonds fell today."]
        assert float(rows[0][:5]) > 0.4 > float(rows[1][:5])
        assert "384 numbers a text" in page.locator(".turn .figures").last.text_content()
        texts.fill("alone")
        page.keyboard.press("Enter")
        page.locator(".turn[aria-busy=false]", has_text=", …").wait_for()
        texts.fill("a\n" * 5)
        page.get_by_role("button", name="Send").click()
        page.locator(".problem", has_text="5 texts, and this server takes 4").wait_for()
        found = axe.Axe().run(page)
        assert not found.violations_count, found.generate_report()
        page.get_by_role("button", name="Clear").click()
        assert page.locator(".turn").count() == 0
        assert page.get_by_text("Options").is_hidden()
        page.close()


@pytest.mark.parametrize(("scheme", "size"), [
    ("light", DESK),
    ("dark", PHONE),
    pytest.param("dark", DESK, marks=pytest.mark.slow),
    pytest.param("light", PHONE, marks=pytest.mark.slow),
], ids=["light-desk", "dark-phone", "dark-desk", "light-phone"])  # fmt: skip
def test_it_is_accessible(
    server: Server, visit: Callable[..., Any], scheme: str, size: dict[str, int]
) -> None:
    """Light and dark, wide and narrow, axe finds no fault, contrast included, and nothing is wider than the window."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(server, color_scheme=scheme, viewport=size)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(252, 251, 248)") == (scheme == "light")
    ask(page, "a" * 300)
    answer_of(page)
    page.get_by_text("Options").click()
    for _ in range(2):  # on a phone the engine takes the place of the chat
        found = axe.Axe().run(page)
        assert not found.violations_count, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        page.get_by_role("button", name="Engine").click()


def test_the_theme_can_be_chosen(server: Server, visit: Callable[..., Any]) -> None:
    """The button turns the page dark, and it is still dark when it is opened again."""
    page = visit(server, color_scheme="light")
    page.get_by_role("button", name="Dark colours").click()
    for _ in range(2):
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 21)"
        page.reload()


def test_keys_are_enough(smollm2: Server, visit: Callable[..., Any]) -> None:
    """Shift+Enter starts a line, Enter sends, Escape stops, and Tab reaches each button with a visible focus."""
    page = visit(smollm2)
    page.route("**/v1/chat/completions", without_end)
    page.locator("#state[data-state=ready]").wait_for()
    page.keyboard.type("Count from one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("to a thousand, in words.")
    page.keyboard.press("Enter")
    page.locator(".turn[aria-busy=true] .figures", has_text=SEVERAL).wait_for()
    assert (
        page.locator(".turn .text").first.text_content()
        == "Count from one\nto a thousand, in words."
    )
    page.keyboard.press("Escape")
    assert "stopped" in page.locator(".turn[aria-busy=false] .figures").text_content()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):  # behind the last
            continue
        name, outline = page.evaluate(
            "[document.activeElement.id || document.activeElement.innerText,"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.add(name)
        assert outline == "solid", name
    assert {
        "new",
        "show-engine",
        "theme",
        "talk",
        "prompt",
        "send",
        "Options",
        "engine",
        "Why",
    } <= reached


def test_hostile_text_is_shown_as_text(checkpoint: Path, visit: Callable[..., Any]) -> None:
    """Markup in a prompt, in the name of a model, in an answer and in an error is text."""
    with serving(checkpoint, "--server.model_name", HOSTILE) as server:
        page = visit(server)
        page.locator("#model", has_text=HOSTILE).wait_for()
        ask(page, HOSTILE)
        answer_of(page)
        page.route(
            "**/v1/chat/completions", streamed(chunk(HOSTILE), {"error": {"message": HOSTILE}})
        )
        ask(page, "hi")
        page.locator(".problem", has_text=HOSTILE).wait_for()
        assert answer_of(page) == HOSTILE
        assert page.locator(".turn .text").first.text_content() == HOSTILE
        assert page.locator(".turn img, .turn script, .turn b, #served img, #served b").count() == 0
        assert page.title() == f"{HOSTILE} · opgraft"
        page.close()


MARKDOWN = """# A plan

1. **First** a [link](https://example.org/a "b").
2. Then `code`.

```python
print("<b>")
```

| a | b |
|---|---|
| 1 | 2 |

![picture](https://example.org/picture.png) [bad](javascript:document.title='hit')
"""


def test_markdown_is_shown(server: Server, visit: Callable[..., Any]) -> None:
    """An answer in Markdown has its elements, pictures stay text, and the code can be copied."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(server, permissions=["clipboard-read", "clipboard-write"])
    page.route("**/v1/chat/completions", streamed(*map(chunk, MARKDOWN)))
    ask(page, "plan")
    text = answer_of(page)
    answer = page.locator(".turn .rich")
    assert [answer.locator(tag).count() for tag in ("h1", "ol > li", "strong", "pre code")] == [
        *(1, 2, 1, 1)
    ]
    assert answer.locator("td").all_text_contents() == ["1", "2"]
    assert "![picture](https://example.org/picture.png)" in text
    assert answer.locator("img").count() == 0
    links = answer.locator("a")
    assert links.first.get_attribute("rel") == "noopener noreferrer"
    assert [link.get_attribute("href") for link in links.all()] == ["https://example.org/a", None]
    page.get_by_role("button", name="Copy the code").click()
    page.locator(".copy", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == 'print("<b>")\n'
    page.get_by_role("button", name="Copy the answer").click()
    page.locator(".turn > .copy", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN
    found = axe.Axe().run(page)
    assert not found.violations_count, found.generate_report()


def test_an_answer_before_the_model_is_known(server: Server, visit: Callable[..., Any]) -> None:
    """Who asks at once sees an answer with a heading, though no name has come."""
    page = visit(server)
    page.route("**/v1/models", lambda route: None)
    page.route("**/v1/chat/completions", streamed(chunk("Hello.")))
    page.reload()
    ask(page, "hi")
    assert answer_of(page) == "Hello."
    assert page.locator(".turn h2").all_text_contents() == ["You", "Answer"]


def test_a_request_that_fails_says_why(server: Server, visit: Callable[..., Any]) -> None:
    """A prompt that is refused, and an answer that is cut off, show the reason, and the prompt can be sent again."""
    page = visit(server, allowed="400 (Bad Request)")
    ask(page, "a " * 600)
    page.locator(".problem", has_text="512").wait_for()
    assert page.get_by_label("Prompt", exact=True).input_value() == "a " * 600
    page.route("**/v1/chat/completions", streamed(chunk("half"), end=""))
    ask(page, "hi")
    page.locator(".problem", has_text="cut off").wait_for()
    assert answer_of(page) == "half"
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Send").click()
    assert [each["content"] for each in asked.value.post_data_json["messages"]] == ["hi"]
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0


def test_a_key_is_asked_for(checkpoint: Path, visit: Callable[..., Any]) -> None:
    """Where the server asks for a key, so does the page; the key stays in the tab."""
    with serving(checkpoint, "--api-key", "secret") as server:
        page = visit(server, allowed=REFUSED)
        page.get_by_role("dialog").wait_for()
        page.keyboard.press("Escape")
        page.locator("#state", has_text="asks for a key").wait_for()
        page.get_by_role("button", name="Key").click()
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_role("dialog").wait_for()
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        page.locator("#state", has_text="ready").wait_for()
        ask(page, "hi")
        answer_of(page)
        page.reload()
        page.locator("#state", has_text="ready").wait_for()
        assert page.evaluate("Object.values(localStorage)") == []
        assert "secret" not in page.content()
        page.close()


def test_behind_a_proxy_that_keeps_the_metrics(server: Server, visit: Callable[..., Any]) -> None:
    """Where /metrics is refused, as our own example of nginx does, there are no plots, and the chat works."""
    page = visit(server, allowed="status of 403")
    page.route("**/metrics", lambda route: route.fulfill(status=403, body="Forbidden"))
    page.reload()
    page.locator("#state", has_text="ready").wait_for()
    page.locator("#load").wait_for(state="hidden")
    ask(page, "hi")
    assert answer_of(page)


def test_a_server_that_has_gone_is_noticed(checkpoint: Path, visit: Callable[..., Any]) -> None:
    """When the server cannot be reached any more, the page says so, and what to do."""
    with serving(checkpoint) as server:
        page = visit(server, allowed="ERR_CONNECTION_REFUSED")
        page.locator("#state", has_text="ready").wait_for()
        server.end()
        page.locator("#state", has_text="not reached").wait_for()
        page.get_by_role("alert").get_by_text("start it again").wait_for()
        ask(page, "hi")
        page.locator(".turn .problem", has_text="does not answer").wait_for()
        assert page.get_by_label("Prompt", exact=True).input_value() == "hi"


def test_the_policy_of_the_page(server: Server) -> None:
    """The page may run its own script and call its own server; every digest in the policy is of a part of it."""
    answer = server.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("script-src") == digests_of("script", answer.text)
    assert policy.pop("style-src") == digests_of("style", answer.text)
    assert policy == {
        "default-src": "'none'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert "/" not in server.get("/openapi.json").json()["paths"]


class Parts(HTMLParser):
    """The texts of all elements of a kind, as a browser reads them."""

    def __init__(self, tag: str, html: str) -> None:
        super().__init__()
        self.tag = tag
        self.texts: list[str] = []
        self.feed(html)

    def handle_data(self, data: str) -> None:
        if self.lasttag == self.tag and data.strip():
            self.texts.append(data)


def digests_of(tag: str, html: str) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in Parts(tag, html).texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def test_it_loads_nothing_else(server: Server, visit: Callable[..., Any]) -> None:
    """The page asks for nothing but what it shows, and no script runs that is not its own."""
    page = visit(server, allowed="Content Security Policy")
    page.locator("#state[data-state=ready]").wait_for()
    loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert {url.removeprefix(server.url) for url in loaded} == {
        "/metrics",
        "/v1/models",
        "/v1/decisions",
    }
    page.evaluate(
        "document.head.append(Object.assign(document.createElement('script'), {text: 'window.ran = true'}))"
    )
    assert page.evaluate("window.ran") is None
