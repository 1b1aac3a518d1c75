"""The application that the chart submits, started on a Ray of this machine."""

from __future__ import annotations

import signal

import pytest
import yaml
from openai import OpenAI

from tests.helm import rendered
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("demo")]


def test_the_default_serve_config_answers(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(rendered.serve_config({})), encoding="utf-8")
    port = free_port()
    with running(str(path), "--host", "127.0.0.1", "--port", str(port)) as (process, lines):
        wait_for_line(process, lines, f"ready: http://127.0.0.1:{port}/v1")
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=5) as client:
            model = client.models.list().data[0].id
            message = {"role": "user", "content": "What is the capital of France?"}
            answer = client.chat.completions.create(model=model, messages=[message], temperature=0, max_tokens=16)
        assert "Paris" in answer.choices[0].message.content
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
