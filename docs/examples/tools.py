"""A loop of tools: the model calls a function, its result goes back, the model answers. The call is streamed.

python docs/examples/tools.py [URL]     URL: http://127.0.0.1:8000/v1 when it is left out

A small model rarely calls a function by itself, so the first request says that it must: tool_choice "required". The
arguments then always match the function's schema. It may also repeat itself, so that one call is asked for. A larger
model needs neither tool_choice nor parallel_tool_calls.
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Madrid"]}},
            "required": ["city"],
        },
    },
}


def weather(city: str) -> str:
    return json.dumps({"city": city, "sky": "sunny", "celsius": 21})


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How is the weather in Rome?"}]
    with client.chat.completions.stream(
        model=model,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
    ) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                print(event.arguments_delta, end="", flush=True)
        print()
        message = stream.get_final_completion().choices[0].message
    calls = message.tool_calls or []
    messages.append({"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"}) for call in calls]})
    for call in calls:
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], max_tokens=100)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
