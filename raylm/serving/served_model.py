"""What the HTTP face knows of a model: its text side, a generator of tokens, and numbers for /metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta


class TextPiece(Protocol):
    """Text that became certain with one push. `num_tokens` counts the tokens used, the stop token too."""

    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def num_tokens(self) -> int: ...


class TextPieces(Protocol):
    """Tokens of one completion in, text out; with a finish reason, its own or a stop string's, it has ended."""

    def push(self, token_ids: list[int], finish_reason: str | None) -> TextPiece: ...


class Text(Protocol):
    """The part of a TextProcessor that the HTTP face uses. encode and chat may be called from other threads."""

    def encode(self, prompt: str) -> list[int]: ...
    def chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def stream(self, params: SamplingParams, *, continues_prompt: bool = False) -> TextPieces: ...


class Generator(Protocol):
    """Tokens of one completion, wherever the engine is."""

    def generate(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield deltas until one has a finish reason; closing it earlier aborts the request in the engine.

        Several tokens may be merged in one delta when the reader is behind. Raises RequestRejected, Overloaded,
        or EngineDeadError, which may also come after tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as clients see it. `created` is in seconds since the epoch."""

    name: str
    created: int
    max_model_len: int
    vocab_size: int
    text: Text
    generator: Generator


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The load of one engine, as it last reported it. `kv_usage` is in [0, 1]."""

    model: str
    engine_id: str
    running: int
    waiting: int
    kv_usage: float


class ModelCatalog(Protocol):
    """The models of this application."""

    def get(self, name: str) -> ServedModel | None:
        """None for an unknown name, and for a model that no engine has served yet."""
        ...

    def names(self) -> list[str]:
        """Every model that was asked for, whether it is up or not."""
        ...

    def ready(self) -> bool:
        """True when every model that was asked for can take requests."""
        ...

    def stats(self) -> list[EngineStats]: ...
