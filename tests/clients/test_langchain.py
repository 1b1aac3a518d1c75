"""langchain-openai: ChatOpenAI, whole and streamed, structured output and bound tools."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.support.asked import DEMO, PARIS
from tests.support.client_packages import client_package

langchain_openai = client_package("langchain_openai")
pytestmark = pytest.mark.serve


class Capital(BaseModel):
    """The capital of a country."""

    city: Literal["Paris", "Rome"]


@pytest.fixture
def model(base_url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=base_url, api_key="none", model=DEMO, temperature=0, max_tokens=64, max_retries=0
    )


def test_a_stream_says_what_the_whole_answer_says(model: Any) -> None:
    whole = model.invoke(PARIS)
    assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] > 0
    chunks = list(model.stream(PARIS))
    assert len(chunks) > 3
    assert "".join(chunk.content for chunk in chunks) == whole.content


@pytest.mark.parametrize("method", ["json_schema"])
def test_structured_output(model: Any, method: str) -> None:
    found = model.with_structured_output(Capital, method=method).invoke(PARIS)
    assert isinstance(found, Capital)
