"""A model that thinks before it answers: what it thinks is streamed apart from its answer.

python docs/examples/reasoning.py [URL]     URL: http://127.0.0.1:8000/v1 when it is left out

It wants a model that thinks, such as Qwen3; the demo model does not.
OpenAI's client has no name for the field; it is read as `reasoning_content`, or as `reasoning`. At most
`thinking_token_budget` tokens are thought; then the model has to answer.
"""

from __future__ import annotations

import sys

from openai import BadRequestError, OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "How much is 17 times 3?"}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"thinking_token_budget": 500},
    )
    reasoning, content = "", ""
    for chunk in stream:
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
        if chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
            print(f"tokens of reasoning: {chunk.usage.completion_tokens_details.reasoning_tokens}")
    print(f"reasoning: {reasoning.strip()}")
    print(f"answer: {content.strip()}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
    except BadRequestError as error:
        sys.exit(error.message)
