"""The page for people: a chat, decisions and plots of the load. The page loads no other file.

The folder ``vendored`` has the two libraries that show Markdown, as their projects publish them:
marked 18.2.1 (MIT) and DOMPurify 3.5.0 (Apache-2.0).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files

from starlette.responses import HTMLResponse


def page() -> HTMLResponse:
    """Return the page. Browsers allow only the page's own script and calls to this server."""
    html = _html()
    policy = {
        "default-src": "'none'",
        "script-src": _digests("script", html),
        "style-src": _digests("style", html),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    rules = [f"{name} {value}" for name, value in policy.items()]
    headers = {
        "content-security-policy": "; ".join(rules),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


@functools.cache
def _html() -> str:
    """Return the page with the libraries inside."""
    folder = files("opgraft.serving.server")

    def inside(tag: re.Match[str]) -> str:
        return f"<script>{folder.joinpath(tag[1]).read_text(encoding='utf-8')}</script>"

    html = folder.joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r'<script src="(vendored/[\w.]+)"></script>', inside, html)


def _digests(tag: str, html: str) -> str:
    """Return the digests of all elements of a kind, in the form of the policy."""
    texts = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    sources = []
    for text in texts:
        digest = hashlib.sha256(text.encode()).digest()
        written = base64.b64encode(digest).decode()
        sources.append(f"'sha256-{written}'")
    return " ".join(sources)
