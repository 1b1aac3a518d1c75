"""instructor: models of pydantic by tools and by JSON schemas."""

from __future__ import annotations

from typing import Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.support.asked import DEMO, PARIS
from tests.support.client_packages import client_package

instructor = client_package("instructor")
pytestmark = pytest.mark.serve


class Capital(BaseModel):
    """The capital of a country."""

    country: Literal["France", "Italy"]
    city: Literal["Paris", "Rome"]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_model_of_pydantic_is_filled(base_url: str, mode: str) -> None:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as openai:
        client = instructor.from_openai(openai, mode=instructor.Mode[mode])
        found = client.chat.completions.create(
            model=DEMO,
            messages=[{"role": "user", "content": PARIS}],
            response_model=Capital,
            temperature=0,
            max_tokens=128,
            max_retries=0,
        )
    assert isinstance(found, Capital)


def test_a_model_is_filled_while_it_streams(base_url: str) -> None:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as openai:
        client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
        partial = list(
            client.chat.completions.create_partial(
                model=DEMO,
                messages=[{"role": "user", "content": PARIS}],
                response_model=Capital,
                temperature=0,
                max_tokens=128,
                max_retries=0,
            )
        )
    assert partial[-1].city in ("Paris", "Rome")
