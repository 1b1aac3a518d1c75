"""/docs in a browser: the OpenAPI document, without anything from elsewhere."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from raylm.api.call import Call
from raylm.config.serving import HttpConfig
from raylm.serving.endpoint import Endpoint, HttpRoute
from raylm.serving.identity.callers import Callers
from raylm.serving.pages import page_routes
from tests.support.live_http import listening
from tests.support.openai_fakes import Server

if TYPE_CHECKING:
    from playwright.sync_api import Page

STREAM = {"schema": {"type": "string", "x-event": {"$ref": "#/components/schemas/Message"}}}
DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "raylm", "version": "1.2", "description": "About all of it."},
    "paths": {
        "/v1/chat/completions": {
            "post": {
                "summary": "A chat",
                "description": "Generates an answer.",
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Chat"}}}},
                "responses": {
                    "200": {
                        "description": "The answer",
                        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": STREAM},
                    },
                    "401": {"description": "No key"},
                },
            }
        },
        "/v1/models/{model}": {
            "parameters": [],
            "get": {
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
                "responses": {"200": {"description": "The model"}},
            },
        },
    },
    "components": {
        "schemas": {
            "Chat": {
                "type": "object",
                "description": "What is asked.",
                "required": ["messages"],
                "properties": {
                    "messages": {"type": "array", "items": {"$ref": "#/components/schemas/Message"}},
                    "temperature": {
                        "anyOf": [{"type": "number", "minimum": 0, "maximum": 100}, {"type": "null"}],
                        "default": None,
                        "description": "0 is greedy",
                    },
                    "role": {"enum": ["user", "tool"]},
                    "anything": {},
                },
            },
            "Message": {"type": "object", "properties": {"content": {"type": ["string", "null"]}}},
        }
    },
}
MARKUP = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"


def app(document: object) -> Starlette:
    async def openapi(call: Call) -> bytes:
        return json.dumps(document).encode()

    table = [*page_routes(), HttpRoute("GET", "/openapi.json", None, openapi)]
    return Starlette(
        routes=[Route(route.path, Endpoint([route], HttpConfig(), Callers(HttpConfig()))) for route in table]
    )


def test_routes_fields_and_types(page: Page) -> None:
    with listening(app(DOCUMENT)) as url:
        page.goto(f"{url}/docs")
        page.wait_for_selector("details.route")
        summaries = page.locator("details.route > summary").all_text_contents()
        assert summaries == ["POST/v1/chat/completions A chat", "GET/v1/models/{model}", "Chat", "Message"]
        page.click("summary >> nth=0")
        shown = page.locator("details.route").nth(0).inner_text()
        assert "Generates an answer." in shown and "application/json" in shown and "401" in shown and "No key" in shown
        assert "temperature" in shown and "0 is greedy" in shown
        assert "text/event-stream: events, each Message" in shown
        rows = [row.locator("td").all_text_contents() for row in page.locator("#schema-Chat tbody tr").all()]
        assert rows == [
            ["messages (required)", "list of Message", "", ""],
            ["temperature", "number (at least 0, at most 100) or null", "null", "0 is greedy"],
            ["role", '"user" or "tool"', "", ""],
            ["anything", "anything", "", ""],
        ]
        page.locator("details.route").nth(0).get_by_role("link", name="Chat", exact=True).click()
        page.wait_for_selector("#schema-Chat[open]")
        page.fill("#find", "models get")
        assert page.locator("details.route:visible > summary").all_text_contents() == ["GET/v1/models/{model}"]


def test_the_servers_own_document(page: Page) -> None:
    """Every route of it, and every type that one names, has its place."""
    with listening(Server().app) as url:
        document = httpx.get(f"{url}/openapi.json", timeout=60).json()
        page.goto(f"{url}/docs")
        page.wait_for_selector("details.route")
        shown = page.locator("details.route > summary code").all_text_contents()
        routes = [path for path, operations in document["paths"].items() for _ in operations]
        assert shown == [*routes, *document["components"]["schemas"]] and len(routes) > 20
        targets = page.locator("a[href^='#schema-']").evaluate_all("links => links.map(link => link.hash.slice(1))")
        missing = [name for name in set(targets) if page.locator(f"[id='{name}']").count() != 1]
        assert missing == []


def test_a_document_is_text(page: Page) -> None:
    document = copy.deepcopy(DOCUMENT)
    document["info"]["title"] = document["info"]["description"] = MARKUP
    document["components"]["schemas"]["Chat"]["properties"][MARKUP] = {"type": MARKUP, "description": MARKUP}
    document["paths"][MARKUP] = document["paths"].pop("/v1/chat/completions")
    with listening(app(document)) as url:
        page.goto(f"{url}/docs")
        page.wait_for_selector("details.route")
        assert MARKUP in (page.text_content("#docs") or "")
        assert page.locator("#docs :is(img, script)").count() == 0


@pytest.mark.parametrize("document", ["no document", None])
def test_without_a_document_there_is_a_sentence(page: Page, document: object) -> None:
    with listening(app(document)) as url:
        page.goto(f"{url}/docs")
        page.wait_for_selector("#docs .error")
