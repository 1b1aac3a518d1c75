"""The sentence in what Ray and Serve say of a failure."""

from __future__ import annotations

import re

_SENTENCE = re.compile(r"^raylm\.errors\.\w+: (.+)$", re.MULTILINE)
"""An error of raylm at the end of a traceback."""


def cause(messages: list[str]) -> str:
    """The sentence in Serve's status messages of an application and its failed deployments: they end with the exception
    behind the failure, its traceback before it. raylm's own where there is one."""
    sentences = _SENTENCE.findall("\n".join(messages))
    return str(sentences[-1]) if sentences else " ".join([message.rstrip().rpartition("\n")[2] for message in messages])
