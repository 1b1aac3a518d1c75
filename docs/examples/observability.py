"""What a request leaves behind: an id that the server's log lines have too, and sums among Prometheus' metrics.

python docs/examples/observability.py [URL]     URL: http://127.0.0.1:8000/v1 when it is left out
"""

from __future__ import annotations

import sys
import uuid

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    root = url.removesuffix("/v1")
    model = client.models.list().data[0].id
    before = generated(root, model)
    request_id = f"example-{uuid.uuid4()}"
    answer = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me about Paris."}],
        max_tokens=30,
        extra_headers={"x-request-id": request_id},
    )
    usage = answer.parse().usage
    assert usage is not None
    print(f"request id: {answer.headers['x-request-id']}")
    print(f"tokens: {usage.prompt_tokens} read, {usage.completion_tokens} written")
    print(f"generation_tokens_total: {before:.0f} before, {generated(root, model):.0f} now")
    state = httpx.get(f"{root}/state").raise_for_status().json()
    for served in state["models"]:
        print(f"{served['model']}: {served['replicas']} replicas, {served['running']} running")


def generated(root: str, model: str) -> float:
    """Tokens that the model has written since its server began."""
    text = httpx.get(f"{root}/metrics").raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    names = ("raylm:generation_tokens_total", {"model_name": model})
    return sum(sample.value for sample in samples if (sample.name, sample.labels) == names)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
