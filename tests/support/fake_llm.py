"""An LLM without a model: every output is `max_tokens` tokens."""

from __future__ import annotations

from raylm.core.step import CacheLayout, ModelInfo


class FakeText:
    def encode(self, prompt):
        return [ord(character) % 100 for character in prompt]

    def chat(self, messages):
        return [token for message in messages for token in self.encode(message["content"])]


class FakeOutput:
    def __init__(self, count):
        self.text = "w" * count
        self.token_ids = [1] * count
        self.finish_reason = "length"


class FakeCompletion:
    def __init__(self, prompt, prompt_ids, count):
        self.prompt = prompt
        self.prompt_token_ids = prompt_ids
        self.outputs = [FakeOutput(count)]


class FakeDelta:
    def __init__(self, text):
        self.text = text


class FakeLLM:
    """`made` holds every instance; `calls` the prompts and parameters of every generate."""

    made: list[FakeLLM] = []
    short = 0
    """Tokens that an output lacks."""

    def __init__(self, config=None, *, progress=True):
        self.config = config
        self.name = "fake"
        layout = CacheLayout(16, [0])
        kinds = ("cpu", "float32", "float32")
        self.info = ModelInfo(10, 0, layout, 1, 0.0, 0.0, 1000, 100, [50], *kinds, {"weights": 0.5})
        self.text = FakeText()
        self.calls = []
        self.streamed = []
        self.num_resets = 0
        self.closed = False
        FakeLLM.made.append(self)

    def reset_prefix_cache(self):
        self.num_resets += 1

    def generate(self, prompts, params=None, *, progress=True):
        each = params if isinstance(params, list) else [params] * len(prompts)
        self.calls.append((prompts, each))
        return [
            FakeCompletion(prompt if isinstance(prompt, str) else None, list(prompt), own.max_tokens - self.short)
            for prompt, own in zip(prompts, each, strict=True)
        ]

    def stream(self, prompt_ids, params):
        self.streamed.append((prompt_ids, params))
        yield from (FakeDelta("Hel"), FakeDelta("lo"))

    def close(self):
        self.closed = True
