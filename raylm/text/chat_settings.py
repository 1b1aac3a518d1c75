"""What a model's configuration says of its chats, with the template's text in place of its file or name."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import jinja2

from raylm.config.chat import ChatConfig, is_template
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.text.sandbox import Sandbox

_BUNDLED = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class ChatSettings:
    """How the chats of one model are rendered. `template`: the operator's own; None takes the checkpoint's."""

    config: ChatConfig = field(default_factory=ChatConfig)
    template: str | None = None

    @classmethod
    def of(cls, engine: EngineConfig) -> ChatSettings:
        """Raises ConfigError when model.chat_template is not there, or is no template."""
        given = engine.model.chat_template
        return cls(engine.chat, None if given is None else _checked(template_source(given)))

    @cached_property
    def key(self) -> str:
        """Equal for equal settings."""
        return sha256(f"{self.config.model_dump_json()}\n{self.template}".encode()).hexdigest()


def template_source(given: str) -> str:
    """The text of model.chat_template: itself a template, a bundled template's name, or a file. Raises ConfigError."""
    if is_template(given):
        return given
    if given in bundled_names():
        return bundled(given)
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template {given!r} cannot be read: {error}; allowed: a file, the text of a template, or one "
            f"of {', '.join(bundled_names())}"
        ) from None


def _checked(source: str) -> str:
    try:
        Sandbox(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"model.chat_template is not valid, line {error.lineno}: {error.message}") from None
    return source


def bundled_names() -> list[str]:
    """Templates for families that ship none."""
    return sorted(path.stem for path in _BUNDLED.glob("*.jinja"))


def bundled(name: str) -> str:
    """The text of one of bundled_names()."""
    return (_BUNDLED / f"{name}.jinja").read_text(encoding="utf-8")
