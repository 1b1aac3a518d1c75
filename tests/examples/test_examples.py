"""The scripts of docs/examples print what they promise, each against a running server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylm.text.chat import ChatTemplate
from tests.support.live_http import listening
from tests.support.openai_fakes import Server, said

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
THINKING = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# <think></think> #}", {})
NUMBER = r"\d+"


def run(name: str, url: str) -> str:
    """The output of an example; its warnings are errors."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), f"{url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


@pytest.fixture
def thinking_url() -> Iterator[str]:
    """A server whose model thinks first."""
    server = Server(*said("<think>17 times 3 is 51.</think>\n\nIt is 51."), template=THINKING, max_model_len=2000)
    with listening(server.app) as url:
        yield url


@pytest.mark.serve
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("structured_output", r"country='France' city='Paris'\n(positive|negative)\n"),
        ("tools", r'(?s)\{\s*"city": ?"(Paris|Rome|Madrid)"\s*\}\n.+\n'),
        ("responses", r".*Paris.*\n(.+\n)+completed\n"),
        (
            "observability",
            rf"request id: example-[-0-9a-f]+\ntokens: {NUMBER} read, {NUMBER} written\n"
            rf"generation_tokens_total: {NUMBER} before, {NUMBER} now\nsmollm2-135m: 1 replicas, {NUMBER} running\n",
        ),
    ],
)
def test_an_example_prints_what_it_promises(serve_url: str, name: str, expected: str) -> None:
    printed = run(name, serve_url)
    assert re.fullmatch(expected, printed), printed


def test_reasoning_is_told_apart(thinking_url: str) -> None:
    lines = run("reasoning", thinking_url).splitlines()
    assert lines[1:] == ["reasoning: 17 times 3 is 51.", "answer: It is 51."]
    assert re.fullmatch("tokens of reasoning: [1-9][0-9]*", lines[0])


def test_every_example_is_run() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.stem}"' in text for path in EXAMPLES.glob("*.py"))
