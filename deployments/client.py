"""One chat request to a running server, with OpenAI's own client: `make client`.

A server with API keys: OPENAI_API_KEY=KEY make client, the variable that OpenAI's client reads by itself.
"""

from __future__ import annotations

import argparse
import os

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Tell me about Paris in two sentences.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.url, api_key=os.environ.get("OPENAI_API_KEY") or "none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": arguments.prompt}],
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
