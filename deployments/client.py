"""One chat request to a running server, with OpenAI's own client: `make client`.

A server with API keys: OPENAI_API_KEY=KEY make client, the variable that OpenAI's client reads by itself.
"""

from __future__ import annotations

import argparse
import os
import sys

from openai import APIConnectionError, OpenAI, OpenAIError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Tell me about Paris in two sentences.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    arguments = parser.parse_args()
    try:
        ask(arguments.url, arguments.prompt)
    except APIConnectionError:
        sys.exit(f"client: no server answers at {arguments.url}; `make serve` starts one")
    except OpenAIError as error:
        sys.exit(f"client: {arguments.url}: {error}")


def ask(url: str, prompt: str) -> None:
    """Print the answer as it comes."""
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "none")
    models = client.models.list().data
    if not models:
        sys.exit(f"client: the server at {url} has no model yet; it says `ready` when it has")
    model = models[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=128,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
