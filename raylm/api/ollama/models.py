"""Ollama's reads of models: /api/tags, /api/show, /api/ps, /api/version."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256

import msgspec
from pydantic import BaseModel, ConfigDict

from raylm.api.about import ON_MODEL, About
from raylm.api.call import Call
from raylm.api.ollama.encoder import timestamp
from raylm.api.parser import read_fields, validated
from raylm.api.preparation import Models, Preparation
from raylm.config.serving import HttpConfig
from raylm.errors import RequestRejected
from raylm.generation.served_model import ServedModel

VERSION = "0.13.0"
"""Whose API this is: clients ask for it to know what they may send."""
_LATEST = ":latest"
_NEVER = datetime(9999, 12, 31, tzinfo=UTC)
_ARCHITECTURE = "raylm"
"""Clients look for NAME.context_length, where NAME is general.architecture."""


class Details(msgspec.Struct, frozen=True):
    """What this server does not tell of a model is empty."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: tuple[str, ...] = ()
    parameter_size: str = ""
    quantization_level: str = ""


class Tag(msgspec.Struct):
    name: str
    model: str
    modified_at: str
    digest: str
    size: int = 0
    details: Details = Details()


class Tags(msgspec.Struct):
    models: list[Tag]


class Process(msgspec.Struct):
    name: str
    model: str
    digest: str
    expires_at: str
    context_length: int
    size: int = 0
    size_vram: int = 0
    details: Details = Details()


class Processes(msgspec.Struct):
    models: list[Process]


class Shown(msgspec.Struct):
    modified_at: str
    parameters: str
    model_info: dict[str, str | int]
    capabilities: list[str]
    license: str = ""
    modelfile: str = ""
    template: str = ""
    details: Details = Details()


class Version(msgspec.Struct):
    version: str


class ShowRequest(BaseModel):
    """POST /api/show. `name` is an older name of `model`."""

    model_config = ConfigDict(strict=True, frozen=True)
    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def named(models: Models, name: str | None) -> ServedModel:
    """The model of this name, which may have Ollama's tag ":latest". Raises what its absence means."""
    if name is not None and name not in models.names():
        name = name.removesuffix(_LATEST)
    return models.get(name)


ABOUT_SHOW = About("One model, as Ollama says it.", "Ollama", (ShowRequest,), Shown, errors=ON_MODEL)
ABOUT_TAGS = About("The models, as Ollama lists them.", "Ollama", answer=Tags)
ABOUT_PROCESSES = About("The models that are up, as Ollama lists them.", "Ollama", answer=Processes)
ABOUT_VERSION = About("The version of Ollama whose API this is.", "Ollama", answer=Version)


class OllamaModels:
    """The models as Ollama's clients read them."""

    def __init__(self, models: Models, config: HttpConfig, preparation: Preparation) -> None:
        self._models = models
        self._config = config
        self._preparation = preparation

    async def tags(self, call: Call) -> bytes:
        found = [
            Tag(name, name, _modified(model), _digest(model))
            for model in self._models.all()
            for name in (model.name, *model.aliases)
        ]
        return msgspec.json.encode(Tags(found))

    async def processes(self, call: Call) -> bytes:
        """Models that are loaded: all that are up, for ever."""
        found = [
            Process(model.name, model.name, _digest(model), timestamp(_NEVER), model.max_model_len)
            for model in self._models.all()
        ]
        return msgspec.json.encode(Processes(found))

    async def show(self, call: Call) -> bytes:
        request = await self._preparation.read(call, self._read)
        name = request.model or request.name
        if name is None:
            raise RequestRejected("model is required", param="model", code="missing_field")
        return msgspec.json.encode(_shown(named(self._models, name)))

    def _read(self, call: Call) -> ShowRequest:
        data = read_fields(call.body, self._config, ShowRequest.model_fields.keys() | {"system", "options"})
        return validated(ShowRequest, data)

    async def version(self, call: Call) -> bytes:
        return msgspec.json.encode(Version(VERSION))


def _shown(model: ServedModel) -> Shown:
    parameters = "\n".join(f"{name} {value:g}" for name, value in model.sampling.fields().items())
    info: dict[str, str | int] = {
        "general.architecture": _ARCHITECTURE,
        "general.basename": model.name,
        f"{_ARCHITECTURE}.context_length": model.max_model_len,
        f"{_ARCHITECTURE}.vocab_size": model.vocab_size,
    }
    capabilities = ["completion", "tools", *(["thinking"] if model.ability.reasons else [])]
    return Shown(_modified(model), parameters, info, capabilities)


def _modified(model: ServedModel) -> str:
    return timestamp(datetime.fromtimestamp(model.created, UTC))


def _digest(model: ServedModel) -> str:
    """Clients tell models apart by it."""
    return sha256(f"{model.name} {model.created}".encode()).hexdigest()
