"""The bodies of Ollama's /api/chat and /api/generate, and the fields that are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast

from raylm.api.unsupported import Fields, refuse_fields


def _listed(value: object) -> object:
    """`stop` may be one string; null is none."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Options(_Body):
    """`options`. null means the default everywhere."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str], FailFast(), BeforeValidator(_listed)] = []
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaRequest(_Body):
    """What both ways of asking share. What is `object` here is read elsewhere."""

    model: str | None = None
    """Where it is left out, the one model that there is."""
    stream: bool | None = None
    """By default on, as with Ollama."""
    format: object = None
    think: object = None
    options: Options | None = None
    keep_alive: object = None


class ChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: list[object] | None = None
    tools: object = None


class GenerateRequest(OllamaRequest):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


UNSUPPORTED: Fields = {"logprobs": (False,), "top_logprobs": (0,)}
GENERATE_UNSUPPORTED: Fields = {
    "context": ([],),
    "height": (0,),
    "images": ([],),
    "steps": (0,),
    "suffix": ("",),
    "template": ("",),
    "width": (0,),
}
OPTIONS_UNSUPPORTED: Fields = {"mirostat": (0, 0.0), "tfs_z": (1, 1.0)}
HARMLESS: Mapping[str, str] = dict.fromkeys(("truncate", "shift"), "a prompt that does not fit is refused")
HARMLESS_OPTIONS = frozenset(
    {
        # The server's configuration says how a model runs.
        *("num_ctx", "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "vocab_only", "use_mmap"),
        *("use_mlock", "num_thread", "num_keep", "logits_all", "embedding_only"),
        # Penalties look at the whole text; mirostat's numbers say nothing without it.
        *("repeat_last_n", "penalize_newline", "mirostat_tau", "mirostat_eta"),
    }
)
CHAT_KNOWN = ChatRequest.model_fields.keys() | UNSUPPORTED.keys() | HARMLESS.keys()
GENERATE_KNOWN = (
    GenerateRequest.model_fields.keys() | UNSUPPORTED.keys() | GENERATE_UNSUPPORTED.keys() | HARMLESS.keys()
)
OPTIONS_KNOWN = Options.model_fields.keys() | OPTIONS_UNSUPPORTED.keys() | HARMLESS_OPTIONS


def refuse_unsupported(data: Mapping[str, object], *, chat: bool) -> None:
    """Raises RequestRejected for the first field that asks for something that this server does not do."""
    refuse_fields(data, UNSUPPORTED)
    if not chat:
        refuse_fields(data, GENERATE_UNSUPPORTED)
    refuse_fields(data.get("options"), OPTIONS_UNSUPPORTED, "options.")
