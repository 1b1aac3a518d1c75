"""A scripted model that thinks and calls tools, as Qwen3 writes it."""

from __future__ import annotations

from dataclasses import replace

from raylm.core.structure import StructuredOutput
from raylm.text.chat import ChatTemplate
from tests.support.openai_fakes import Item, Server, said

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nI add.\n</think>\n\n"
TEXT = f"{THOUGHT}Let me add.\n{CALL}\n{OTHER}"
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    "[{{ enable_thinking }} {{ reasoning_effort }}]{{ tools | tojson if tools else '' }}"
    "{# <think></think> <tool_call> <|im_start|> #}",
    {},
)


def saying(text: str, *, size: int = 3, **config: object) -> Server:
    """A server whose model writes `text`, so many bytes at a time."""
    return scripted(*said(text, size=size), **config)


def scripted(*script: Item, **config: object) -> Server:
    return Server(*script, **{"template": TEMPLATE, "max_model_len": 4000, **config})


def prompt_of(server: Server, number: int = 0) -> str:
    """The prompt of a request that the model was given."""
    return bytes(server.generator.requests[number].prompt_ids).decode()


class NotedGrammars:
    """Notes which structures are asked for, and gives a grammar."""

    def __init__(self) -> None:
        self.asked: list[tuple[StructuredOutput, str]] = []

    async def compile_async(self, structure: StructuredOutput, *, param: str = "structure") -> StructuredOutput:
        self.asked.append((structure, param))
        return StructuredOutput("grammar", 'root ::= "a"')


def with_grammars(server: Server) -> NotedGrammars:
    """From now on the server's model takes structures."""
    grammars = NotedGrammars()
    server.catalog.model = replace(server.catalog.model, grammars=grammars)
    return grammars
