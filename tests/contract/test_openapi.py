"""Random requests of the OpenAPI document: no answer is a 5xx, and every answer is documented.

    make contract      2,000 requests instead of a few

A request is all that the document allows ("right"), nothing that it allows ("wrong"), or an ordinary request with up to
two fields of what the document allows ("near"), since most requests of many random fields are refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.openai_fakes import Server

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5}
COMPLETION = {"model": "tiny", "prompt": "Hi", "max_tokens": 5}
ORDINARY: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/render": CHAT,
    "/invocations": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/completions/render": COMPLETION,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "tiny", "messages": MESSAGES},
    "/v1/responses": {"model": "tiny", "input": "Hi", "max_output_tokens": 5},
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 5}},
    "/api/generate": {"model": "tiny", "prompt": "Hi", "options": {"num_predict": 5}},
    "/api/show": {"model": "tiny"},
    "/v1/tokenize": {"model": "tiny", "prompt": "Hi"},
    "/tokenize": {"model": "tiny", "prompt": "Hi"},
    "/v1/detokenize": {"model": "tiny", "tokens": [72, 105]},
    "/detokenize": {"model": "tiny", "tokens": [72, 105]},
}


def schema_of(server: Server) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", server.app)


SCHEMA = schema_of(Server(alone=True))
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
CASES = [("right", operation) for operation in OPERATIONS]
# Without a body there is nothing that could be wrong.
CASES += [("wrong", operation) for operation in OPERATIONS if len(operation.body)]
CASES += [("near", operation) for operation in OPERATIONS if operation.path in ORDINARY]


@st.composite
def near(draw: st.DrawFn, operation: Any) -> Any:
    """An ordinary request with up to two fields that the document allows."""
    case = draw(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    ordinary = ORDINARY[operation.path]
    others = sorted(case.body.keys() - ordinary.keys())
    names = draw(st.lists(st.sampled_from(others), max_size=2, unique=True)) if others else []
    case.body = ordinary | {name: case.body[name] for name in names}
    return case


def requests_of(operation: Any, kind: str) -> st.SearchStrategy[Any]:
    if kind == "near":
        return near(operation)
    mode = GenerationMode.POSITIVE if kind == "right" else GenerationMode.NEGATIVE
    strategy: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=mode)
    return strategy


def check_answers(operation: Any, kind: str, count: int) -> set[int]:
    """The statuses of the answers to `count` random requests, which are all as documented."""
    statuses: set[int] = set()

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=requests_of(operation, kind))
    def check(case: Any) -> None:
        answer = case.call()
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    check()
    return statuses


@pytest.mark.parametrize(
    ("kind", "operation"), CASES, ids=[f"{kind} {each.method.upper()} {each.path}" for kind, each in CASES]
)
def test_answers_are_documented(kind: str, operation: Any, pytestconfig: pytest.Config) -> None:
    count = max(2, -(-pytestconfig.getoption("--contract-examples") // len(CASES)))
    statuses = check_answers(operation, kind, count)
    assert kind != "near" or count < 10 or 200 in statuses


def test_an_answer_that_should_not_be_is_seen() -> None:
    failing = schema_of(Server(ValueError("secret"), alone=True))["/v1/completions"]["POST"]
    with pytest.raises(BaseException, match="Server error"):
        check_answers(failing, "near", 30)
