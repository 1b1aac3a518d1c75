"""A request may bring a template where the configuration lets it: away from the event loop, within its own limits."""

from __future__ import annotations

import threading

import pytest

from raylm.api.call import Call
from raylm.api.preparation import Preparation
from raylm.config.chat import ChatConfig
from raylm.config.serving import HttpConfig
from raylm.text.chat import ChatTemplate
from raylm.text.chat_settings import ChatSettings
from tests.support.openai_fakes import Server, ended

OPEN = ChatTemplate("own", {}, ChatSettings(ChatConfig(allow_request_templates=True, template_kwargs={"mood": "good"})))
SHOUTING = "{% for message in messages %}{{ message.content | upper }}{{ mood }}{% endfor %}"


async def test_a_template_of_a_request_is_rendered_where_that_is_allowed():
    server = Server(ended(), template=OPEN)
    assert (await server.chat(messages=[{"role": "user", "content": "hi"}], chat_template=SHOUTING)).status_code == 200
    assert (await server.chat(chat_template=SHOUTING, chat_template_kwargs={"mood": "bad"})).status_code == 200
    first, second = (bytes(request.prompt_ids) for request in server.generator.requests)
    assert first == b"HIgood" and second.endswith(b"bad")


@pytest.mark.parametrize(
    ("template", "source", "problem"),
    [
        (OPEN, "{{ 'a' * 10 ** 9 }}", "chat_template was stopped on these messages: it makes a value of 1000000000"),
        (OPEN, "{% for %}", "chat_template is not valid, line 1"),
        (ChatTemplate("own", {}), SHOUTING, "this server takes no templates from requests"),
    ],
)
async def test_others_are_refused_by_name(template, source, problem):
    response = await Server(ended(), template=template).chat(chat_template=source)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "chat_template") and problem in error["message"]


@pytest.mark.parametrize(
    ("body", "thread"),
    [
        (b'{"chat_template": "x"}', "raylm-tokenise"),
        (b'{"chat\\u005ftemplate": "x"}', "raylm-tokenise"),
        (b'{"\\u0063hat_template": "x"}', "raylm-tokenise"),
        (b'{"chat_template_kwargs": {}, "messages": "\\u00e9"}', "MainThread"),
    ],
)
async def test_a_program_of_a_request_runs_away_from_the_event_loop(body, thread):
    found = await Preparation(HttpConfig()).read(Call(body), lambda call: threading.current_thread().name)
    assert found.startswith(thread)
