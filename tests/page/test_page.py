"""The page at / in a browser: chats, streams, keys, and models that mean no good."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.page.pages import Scripted, call, chunk
from tests.support.live_http import listening
from tests.support.openai_fakes import Server, ended

expect = pytest.importorskip("playwright.sync_api", reason="pip install playwright").expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = [
    "<script>window.hacked = 1; alert(1)</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload=window.hacked=1><a href=\"javascript:window.hacked=1\">x</a></svg>",
    "</div></main><iframe srcdoc=\"<script>parent.hacked=1</script>\"></iframe>",
    "\u202e<b>&lt;&amp;</b>\u0000 [x](javascript:window.hacked=1) ```html\n<style>*{display:none}</style>```",
]  # fmt: skip


def ask(page: Page, text: str) -> None:
    page.wait_for_selector("#send:not([disabled])")
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Page) -> None:
    """Wait until no answer is on its way."""
    page.wait_for_selector("#stop[disabled]", state="attached")
    page.wait_for_selector("#again:not([disabled])")


def texts(page: Page, selector: str) -> list[str]:
    return [found.text_content() or "" for found in page.query_selector_all(selector)]


def evaluated(page: Page, expression: str) -> object:
    """As in the browser's console: playwright's own way is a string made code, which the page's policy stops."""
    result = page.context.new_cdp_session(page).send("Runtime.evaluate", {"expression": expression})
    return result["result"].get("value")


def until(page: Page, selector: str, text: str, index: int = 0) -> None:
    expect(page.locator(selector).nth(index)).to_have_text(text, use_inner_text=False, timeout=120_000)


def not_hacked(page: Page) -> None:
    assert evaluated(page, "window.hacked") is None
    assert page.locator("iframe, b, :is(#transcript, .model) :is(script, img, svg, a, style)").count() == 0
    assert page.is_visible("#ask")


def test_a_chat_is_streamed_stopped_and_generated_anew(page: Page) -> None:
    server = Server(b"He", b"llo", ended(b"!"), max_model_len=1000)
    with listening(server.app) as url:
        page.goto(url)
        assert page.wait_for_selector("#model option", state="attached").get_attribute("value") == "tiny"
        page.fill("[name=system]", "Be brief.")
        page.fill("[name=temperature]", "0.5")
        page.fill("[name=seed]", "7")
        page.fill("[name=max_tokens]", "40")
        ask(page, "hi there")
        answered(page)
        assert texts(page, ".user .text") == ["hi there"]
        assert texts(page, ".assistant .text") == ["Hello!"]
        (figures,) = texts(page, ".figures")
        assert re.search(r"first token after \d+ ms .* 7 tokens · stop", figures), figures
        asked = server.generator.requests[0]
        assert (asked.params.temperature, asked.params.seed, asked.params.max_tokens) == (0.5, 7, 40)
        assert b"Be brief." in bytes(asked.prompt_ids) and b"hi there" in bytes(asked.prompt_ids)

        page.click("#again")
        answered(page)
        assert texts(page, ".assistant .text") == ["Hello!"]
        assert server.generator.requests[1].prompt_ids == asked.prompt_ids

        server.generator.script = [b"for ever", None]
        ask(page, "more")
        until(page, ".assistant .text", "for ever", 1)
        assert page.is_disabled("#send")
        page.click("#stop")
        answered(page)
        assert texts(page, ".figures")[1].endswith("stopped here")
        third = bytes(server.generator.requests[2].prompt_ids)
        assert b"hi there" in third and b"Hello!" in third and b"more" in third

        page.click("#new")
        assert texts(page, ".message") == []
    assert server.generator.live == 0 and len(server.generator.aborted) == 1


def test_the_servers_state_is_beside_it(page: Page) -> None:
    with listening(Server().app) as url:
        page.goto(url)
        page.wait_for_selector(".model")
        tiny, late = texts(page, ".model")
        assert tiny.startswith("tiny") and "replicas1" in tiny and "running3" in tiny and "waiting2" in tiny
        assert "cache in use25.0 %" in tiny
        assert late.startswith("late") and "not ready" in late


def test_an_error_is_the_servers_sentence(page: Page) -> None:
    server = Server(RuntimeError("secret"), max_model_len=1000)
    with listening(server.app) as url:
        page.goto(url)
        ask(page, "hi")
        answered(page)
        assert "internal error" in texts(page, ".error")[0]
        server.generator.script = [b"some", RuntimeError("secret")]
        page.click("#again")
        answered(page)
        assert texts(page, ".assistant .text") == ["some"] and "internal error" in texts(page, ".error")[0]
        page.fill("[name=tools]", "{not json")
        ask(page, "hi")
        expect(page.get_by_role("alert")).to_contain_text("Tools are no JSON")


def test_the_key_is_asked_for_and_kept_in_memory_only(page: Page, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    server = Server(ended(b"in"), max_model_len=1000, api_keys_file=str(keys))
    with listening(server.app) as url:
        page.goto(url)
        page.wait_for_selector("#ask-key[open]")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-reason")).to_contain_text("Incorrect")
        page.fill("#key", "sesame")
        page.press("#key", "Enter")
        ask(page, "hi")
        answered(page)
        assert texts(page, ".assistant .text") == ["in"]
        kept = evaluated(page, "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        assert isinstance(kept, str) and "sesame" not in kept and "sesame" not in page.content()
        assert page.input_value("#key") == ""
        page.reload()
        page.wait_for_selector("#ask-key[open]")
    assert len(server.generator.requests) == 1


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_says_is_text(page: Page, text: str) -> None:
    raw = text.encode()
    middle = len(raw) // 2
    server = Server(raw[:middle], ended(raw[middle:]), max_model_len=1000)
    with listening(server.app) as url:
        page.goto(url)
        ask(page, text)
        answered(page)
        assert texts(page, ".message .text") == [text, text]
        not_hacked(page)


@pytest.mark.parametrize("text", HOSTILE)
def test_names_reasoning_calls_and_errors_are_text(page: Page, text: str) -> None:
    """Also of models that an operator named, and of tools that somebody else described."""
    scripted = Scripted(
        [
            chunk(role="assistant", content=""),
            chunk(reasoning=text),
            chunk(tool_calls=[call(0, text, id=text, name=text)]),
            chunk(content=text),
            {"error": {"message": text}},
        ],
        models=[text],
    )
    with listening(scripted.app) as url:
        page.goto(url)
        ask(page, "hi")
        answered(page)
        assert texts(page, ".reasoning .text") == [text]
        assert texts(page, ".call strong") == texts(page, ".call pre") == [text]
        assert texts(page, ".assistant > .text") == texts(page, ".assistant > .error") == [text]
        assert texts(page, ".model h3") == [text] and page.input_value("#model") == text
        not_hacked(page)


def test_reasoning_and_a_loop_of_tools(page: Page) -> None:
    scripted = Scripted(
        [
            chunk(role="assistant", content=""),
            chunk(reasoning="I should ", reasoning_content="I should "),
            chunk(reasoning="look.", reasoning_content="look."),
            chunk(tool_calls=[call(0, "", id="a", name="weather")]),
            chunk(tool_calls=[call(0, '{"city":')]),
            chunk(tool_calls=[call(0, '"Oslo"}'), call(1, "{}", id="b", name="time")]),
            chunk(finish_reason="tool_calls"),
        ],
        [chunk(content="Rain at noon."), chunk(finish_reason="stop")],
    )
    with listening(scripted.app) as url:
        page.goto(url)
        page.fill("[name=tools]", '[{"type": "function", "function": {"name": "weather"}}]')
        ask(page, "Weather?")
        answered(page)
        assert texts(page, ".reasoning .text") == ["I should look."]
        page.click(".reasoning summary")
        assert not page.is_visible(".reasoning .text")
        assert texts(page, ".call strong") == ["weather", "time"]
        assert texts(page, ".call pre") == ['{"city":"Oslo"}', "{}"]
        page.fill(".call textarea >> nth=0", "rain")
        page.fill(".call textarea >> nth=1", "noon")
        page.click("text=Send results")
        until(page, ".assistant > .text", "Rain at noon.")
        answered(page)
        assert texts(page, ".assistant > .text") == ["Rain at noon."]
    first, second = scripted.bodies
    assert first["tools"][0]["function"]["name"] == "weather"
    assert second["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
                {"id": "b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
    ]
