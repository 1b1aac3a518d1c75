"""Answers that are held to a form: a model of pydantic, and one of several words.

python docs/examples/structured_output.py [URL]     URL: http://127.0.0.1:8000/v1 when it is left out
"""

from __future__ import annotations

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class Capital(BaseModel):
    country: Literal["France", "Italy", "Spain"]
    city: Literal["Paris", "Rome", "Madrid"]


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    completion = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        response_format=Capital,
        max_tokens=100,
    )
    print(completion.choices[0].message.parsed)

    # OpenAI has no parameter for this one; vLLM's is taken.
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Is 'I love it' positive or negative?"}],
        extra_body={"structured_outputs": {"choice": ["positive", "negative"]}},
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
