"""The pages for browsers: a chat with the models at /, the API's document at /docs. Files as they lie in page/, and
headers that let a page load nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from raylm.api.call import Call
from raylm.api.errors import HttpError
from raylm.serving.answers import Answer
from raylm.serving.endpoint import HttpRoute

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No script but the page's own runs, and no string ever becomes markup or a script, whatever a model says."""
HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # An upgraded server's page must not meet scripts of the one before.
    (b"cache-control", b"no-cache"),
)


def page_routes() -> list[HttpRoute]:
    """The routes of the pages. They want no key: what they show comes by calls that do."""
    files = {
        path.name: Answer(path.read_bytes(), content_type=_TYPES[path.suffix], headers=HEADERS)
        for path in _FOLDER.iterdir()
    }

    async def chat(call: Call) -> Answer:
        return files["index.html"]

    async def docs(call: Call) -> Answer:
        return files["docs.html"]

    async def file(call: Call) -> Answer:
        name = call.path["name"]
        if name not in files or name.endswith(".html"):
            raise HttpError(404, "The page has no such file", code="not_found")
        return files[name]

    return [
        HttpRoute("GET", "/", None, chat),
        HttpRoute("GET", "/docs", None, docs),
        HttpRoute("GET", "/page/{name}", None, file, is_listed=False),
    ]
