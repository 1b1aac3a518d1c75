"""The pages' files and headers; tests/page has them in a browser."""

from __future__ import annotations

import re

import pytest

from raylm.serving.pages import page_routes
from tests.support.openai_fakes import Server

TYPES = {"/": "text/html", "/docs": "text/html", "/page/page.js": "text/javascript", "/page/style.css": "text/css"}


@pytest.mark.parametrize(("path", "kind"), TYPES.items())
async def test_nothing_comes_from_elsewhere(path: str, kind: str) -> None:
    answer = await Server().http.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|//cdn", answer.text)


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_page_names_files_that_are_there(path: str) -> None:
    http = Server().http
    waiting, seen = [path], set()
    while waiting:
        text = (await http.get(waiting.pop())).text
        named = {f"/{name}" for name in re.findall(r'(?:src|href)="(page/[^"]+)"', text)}
        named |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
        waiting += named - seen
        seen |= named
    assert {"/page/style.css", "/page/icon.svg", "/page/dom.js"} <= seen
    for name in seen:
        assert (await http.get(name)).status_code == 200, name


@pytest.mark.parametrize("name", ["nothing.js", "index.html", "..%2fpages.py", "%2e%2e/http.py", ""])
async def test_no_other_file_is_served(name: str) -> None:
    assert (await Server().http.get(f"/page/{name}")).status_code == 404


async def test_the_pages_can_be_left_out() -> None:
    server = Server(page=False)
    for route in page_routes():
        assert (await server.http.get(route.path.replace("{name}", "page.js"))).status_code == 404
    assert (await server.http.get("/v1/models")).status_code == 200
