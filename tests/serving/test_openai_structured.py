"""Structured output over HTTP: every client's way to ask for it, every refusal, and documents of a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from jsonschema import validate
from openai import AsyncOpenAI, BadRequestError

from raylm.batch.answer import Answerer, OneModel
from raylm.batch.requests import plain_request
from raylm.batch.running import answer_all
from raylm.config.engine import EngineConfig
from raylm.config.serving import HttpConfig
from raylm.core.structure import StructuredOutput
from raylm.engine.factory import local_engine
from raylm.engine.local_client import LocalClient
from raylm.errors import RequestRejected
from raylm.generation.served_model import ServedModel
from raylm.grammar.compiler import GrammarCompiler
from raylm.model_files.source import locate
from raylm.serving.http import build_http_app
from raylm.text.processor import TextProcessor
from tests.support import checkpoints
from tests.support.openai_fakes import Server

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
EBNF = 'root ::= "a"'


class FakeGrammars:
    """Notes what is asked for; a value of "bad" is refused."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []

    async def compile_async(self, structure: StructuredOutput, *, param: str = "structure") -> StructuredOutput:
        self.asked.append((structure.kind, structure.value, param))
        if "bad" in structure.value:
            raise RequestRejected(f"{param}: no", param=param, code="invalid_structure")
        return StructuredOutput("grammar", EBNF)


def server() -> tuple[Server, FakeGrammars]:
    made, grammars = Server(strict=True), FakeGrammars()
    made.catalog.model = replace(made.catalog.model, grammars=grammars)
    return made, grammars


WAYS: list[tuple[dict[str, Any], tuple[str, Any, str]]] = [
    ({"response_format": {"type": "json_object"}}, ("json_object", "", "response_format")),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        ("json_schema", SCHEMA, "response_format.schema"),
    ),
    ({"response_format": {"type": "json_object", "schema": None}}, ("json_object", "", "response_format")),
    ({"response_format": FORMAT}, ("json_schema", SCHEMA, "response_format.json_schema.schema")),
    ({"response_format": TAG}, ("structural_tag", TAG, "response_format")),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA, "structured_outputs.json")),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ("json_schema", SCHEMA, "structured_outputs.json")),
    ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+", "structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a", "ü"]}}, ("choice", ["a", "ü"], "structured_outputs.choice")),
    ({"structured_outputs": {"grammar": EBNF}}, ("grammar", EBNF, "structured_outputs.grammar")),
    ({"structured_outputs": {"json_object": True}}, ("json_object", "", "structured_outputs.json_object")),
    (
        {"structured_outputs": {"structural_tag": TAG, "regex": None, "disable_fallback": True}},
        ("structural_tag", TAG, "structured_outputs.structural_tag"),
    ),
    ({"guided_json": SCHEMA}, ("json_schema", SCHEMA, "guided_json")),
    ({"guided_regex": "a+"}, ("regex", "a+", "guided_regex")),
    ({"guided_choice": ["a"]}, ("choice", ["a"], "guided_choice")),
    ({"guided_grammar": EBNF}, ("grammar", EBNF, "guided_grammar")),
    ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", SCHEMA, "json_schema")),
    ({"regex": "a+"}, ("regex", "a+", "regex")),
    ({"ebnf": EBNF}, ("grammar", EBNF, "ebnf")),
    ({"structural_tag": json.dumps(TAG)}, ("structural_tag", TAG, "structural_tag")),
]


@pytest.mark.parametrize(("fields", "expected"), WAYS, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_every_way_to_ask_is_understood(
    kind: str, fields: dict[str, Any], expected: tuple[str, Any, str]
) -> None:
    made, grammars = server()
    response = await getattr(made, kind)(**fields, max_tokens=2)
    assert response.status_code == 200, response.text
    ((asked_kind, value, param),) = grammars.asked
    assert (asked_kind, param) == (expected[0], expected[2])
    assert value == expected[1] or json.loads(value) == expected[1]
    (request,) = made.generator.requests
    assert request.params.structure == StructuredOutput("grammar", EBNF)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "json": None}},
    ],
)
async def test_values_that_ask_for_nothing(fields: dict[str, Any]) -> None:
    made, grammars = server()
    assert (await made.chat(**fields, max_tokens=2)).status_code == 200
    assert grammars.asked == []
    assert made.generator.requests[0].params.structure is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1}}},
        "response_format.json_schema",
    ),
    ({"response_format": {"type": "json_object", "schema": "{}"}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "schemas": {}}}, "response_format.schemas"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"response_format": {**FORMAT, "strict": True}}, "response_format.strict"),
    ({"response_format": {**TAG, "tags": []}}, "response_format.tags"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "style": "xml"}}},
        "response_format.json_schema.style",
    ),
    ({"structured_outputs": 5}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"whitespace_pattern": "[ ]*"}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"xml": True}}, "structured_outputs.xml"),
    ({"structured_outputs": {"regex": "bad"}}, "structured_outputs.regex"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": "bad"}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"regex": "a", "ebnf": EBNF}, "ebnf"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"regex": "a", "use_beam_search": True, "n": 2}, "use_beam_search"),
    ({"regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    made, _ = server()
    response = await made.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert made.generator.requests == []


async def test_a_model_without_a_compiler_refuses() -> None:
    error = (await Server().chat(regex="a")).json()["error"]
    assert (error["param"], error["code"]) == ("regex", "unsupported_parameter")


class App(NamedTuple):
    client: AsyncOpenAI
    http: httpx.AsyncClient


@pytest.fixture(scope="module")
def random_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = checkpoints.llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=256)
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(folder), "max_model_len": 256},
            "cache": {"block_size": 4, "num_blocks": 400},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
            "runtime": {"device": "cpu"},
        }
    )
    engine = local_engine(config, progress=False)
    source = locate(str(folder))
    client, text, grammars = LocalClient(engine), TextProcessor.load(source), GrammarCompiler(source)
    model = ServedModel("random", 1, 256, engine.info.vocab_size, text, client, grammars=grammars)
    yield build_http_app(OneModel(model), HttpConfig(strict=True))
    client.close()
    grammars.close()


@pytest.fixture
async def random(random_app: Any) -> AsyncIterator[App]:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(random_app), base_url="http://raylm")
    client = AsyncOpenAI(base_url="http://raylm/v1", api_key="none", http_client=http, max_retries=0)
    yield App(client, http)
    await http.aclose()


def batch_answerer(tmp_path: Path) -> Answerer:
    folder = checkpoints.llama(tmp_path, max_position_embeddings=256)
    config = EngineConfig.model_validate(
        {"model": {"path": str(folder)}, "cache": {"num_blocks": 100}, "runtime": {"device": "cpu"}}
    )
    return Answerer(config, local_engine(config, progress=False), max_tokens=40)


async def test_lines_of_a_batch_may_ask_for_it(tmp_path: Path) -> None:
    answerer = batch_answerer(tmp_path)
    try:
        lines = (
            {"prompt": "hi", "seed": 1, **fields} for fields in ({"response_format": FORMAT}, {"guided_regex": "("})
        )
        requests = [plain_request(line, number, model=answerer.name) for number, line in enumerate(lines, 1)]
        good, bad = [await answerer.answer(request) for request in requests]
    finally:
        answerer.close()
    assert good.response is not None and bad.response is not None
    validate(json.loads(json.loads(bytes(good.response.body))["choices"][0]["text"]), SCHEMA)
    error = json.loads(bytes(bad.response.body))["error"]
    assert (bad.response.status_code, error["param"]) == (400, "guided_regex")


async def test_no_line_of_a_batch_is_refused_for_the_number_of_structures(tmp_path: Path) -> None:
    answerer = batch_answerer(tmp_path)
    try:
        lines = ({"prompt": "hi", "guided_choice": [f"a{number}"], "max_tokens": 1} for number in range(300))
        requests = [plain_request(line, number, model=answerer.name) for number, line in enumerate(lines, 1)]
        results = await answer_all(answerer, requests, keep_order=True)
    finally:
        answerer.close()
    assert [result.response and result.response.status_code for result in results] == [200] * 300


HI: list[Any] = [{"role": "user", "content": "hi"}]


async def test_answers_of_a_real_engine_are_documents(random: App) -> None:
    chat = await random.client.chat.completions.create(
        model="random", messages=HI, response_format=FORMAT, n=3, seed=1, temperature=1.2, max_tokens=60
    )
    for choice in chat.choices:
        assert choice.finish_reason == "stop"
        validate(json.loads(choice.message.content), SCHEMA)
    text = await random.client.completions.create(
        model="random", prompt="hi", extra_body={"guided_choice": ["left", "right"]}, max_tokens=10
    )
    assert text.choices[0].text in ("left", "right")


async def test_a_stream_of_a_real_engine_is_a_document(random: App) -> None:
    stream = await random.client.chat.completions.create(
        model="random", messages=HI, response_format=FORMAT, seed=1, temperature=1.2, max_tokens=60, stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    validate(json.loads(text), SCHEMA)


async def test_a_schema_that_cannot_be_met_gets_400_with_its_place(random: App) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "minItems": 2, "maxItems": 1}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    with pytest.raises(BadRequestError, match="minItems 2 is over maxItems 1") as caught:
        await random.client.chat.completions.create(model="random", messages=HI, response_format=form)
    assert caught.value.param == "response_format.json_schema.schema"
    assert "#/properties/a" in str(caught.value)


async def test_a_stop_string_goes_with_a_grammar(random: App) -> None:
    answer = await random.client.completions.create(
        model="random", prompt="hi", stop=["END"], extra_body={"regex": "[a-z]{2}END[0-9]{9}"}, max_tokens=40
    )
    assert re.fullmatch("[a-z]{2}", answer.choices[0].text)
