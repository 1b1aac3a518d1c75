"""OpenAI's Responses: a streamed answer, and one that goes on from it. The server stores both until they are deleted.

python docs/examples/responses.py [URL]     URL: http://127.0.0.1:8000/v1 when it is left out
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    with client.responses.stream(
        model=model, input="What is the capital of France?", max_output_tokens=100, temperature=0
    ) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
        print()
        first = stream.get_final_response()

    second = client.responses.create(
        model=model, previous_response_id=first.id, input="And of Italy?", max_output_tokens=100, temperature=0
    )
    print(second.output_text)

    print(client.responses.retrieve(second.id).status)
    for response in (second, first):
        client.responses.delete(response.id)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
