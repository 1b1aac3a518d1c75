"""llama-index: OpenAILike, its completions and chats, whole and streamed, and its tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.asked import DEMO, PARIS, get_weather
from tests.support.client_packages import client_package

openai_like = client_package("llama_index.llms.openai_like")
llms = client_package("llama_index.core.llms")
tools = client_package("llama_index.core.tools")
pytestmark = pytest.mark.serve


def make(base_url: str, **fields: Any) -> Any:
    return openai_like.OpenAILike(
        model=DEMO,
        api_base=base_url,
        api_key="none",
        context_window=2048,
        max_tokens=64,
        temperature=0,
        max_retries=0,
        **fields,
    )


@pytest.mark.parametrize("is_chat_model", [True, False])
def test_a_stream_says_what_the_whole_answer_says(base_url: str, is_chat_model: bool) -> None:
    llm = make(base_url, is_chat_model=is_chat_model)
    whole = llm.complete("The capital of France is").text
    assert "Paris" in whole
    assert list(llm.stream_complete("The capital of France is"))[-1].text == whole


def test_a_chat_is_streamed(base_url: str) -> None:
    llm = make(base_url, is_chat_model=True)
    parts = [part.delta for part in llm.stream_chat([llms.ChatMessage(role="user", content=PARIS)])]
    assert "Paris" in "".join(parts)


def test_a_required_tool_is_called(base_url: str) -> None:
    llm = make(base_url, is_chat_model=True, is_function_calling_model=True)
    tool = tools.FunctionTool.from_defaults(get_weather)
    answer = llm.chat_with_tools([tool], user_msg="How is the weather in Rome?", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather" and set(call.tool_kwargs) == {"city"}
