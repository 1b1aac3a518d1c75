"""What the HTTP face knows of a model: its text side, a generator of tokens, and numbers for /metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from raylm.config.sampling import SamplingDefaults
from raylm.core.control import Control
from raylm.core.load import Load
from raylm.core.measures import EngineMeasures
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import ModelInfo, TokenDelta
from raylm.core.structure import StructuredOutput
from raylm.generation.ability import Ability
from raylm.stacks import ProcessStacks
from raylm.text.chat import ChatTemplate
from raylm.text.chat_options import ChatOptions
from raylm.text.definition import TokenizerInfo
from raylm.text.stop import StopTable


class TextPiece(Protocol):
    """Text that became certain with one push. `num_tokens` counts the tokens used, the stop token too; `stop_reason` is
    the stop string, or the one of stop_token_ids, that ended it."""

    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def stop_reason(self) -> str | int | None: ...


class TextPieces(Protocol):
    """Tokens of one completion in, text out; with a finish reason, its own or a stop string's, it has ended."""

    def push(self, token_ids: list[int], finish_reason: str | None) -> TextPiece: ...


class Detokenizing(Protocol):
    """Tokens of one text in, text out."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        ...


class Text(Protocol):
    """The part of a TextProcessor that the HTTP face uses. Other threads call encode, render, decode, token_names and
    prepare."""

    @property
    def chat_template(self) -> ChatTemplate: ...
    def encode(self, prompt: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]: ...
    def render(self, messages: Sequence[Mapping[str, object]], options: ChatOptions | None = None) -> str: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_names(self, ids: Sequence[int]) -> list[str]: ...
    @property
    def tokenizer_info(self) -> TokenizerInfo: ...
    def prepare(self, params: SamplingParams) -> SamplingParams: ...
    def stop_table(self, params: SamplingParams) -> StopTable | None: ...
    def stream(
        self, params: SamplingParams, *, continues_prompt: bool = False, stops: StopTable | None = None
    ) -> TextPieces: ...
    def detokenizer(self, params: SamplingParams, *, continues_prompt: bool) -> Detokenizing: ...
    def token_bytes(self, token_id: int) -> bytes:
        """What a token is by itself, special tokens too; nothing beyond the vocabulary."""
        ...


class Grammars(Protocol):
    """Turns structures into what engines take, as a GrammarCompiler does."""

    async def compile_async(self, structure: StructuredOutput, *, param: str = ...) -> StructuredOutput:
        """Raises RequestRejected, Overloaded."""
        ...


class Deltas(Protocol):
    """Deltas of the sequences of one prompt, until all have ended. Must be closed by who leaves earlier.

    Deltas of a sequence may be merged in one when the reader is behind. Raises RequestRejected, Overloaded or
    EngineDeadError, which may also come after tokens.
    """

    @property
    def engine_id(self) -> str:
        """The engine that has it, or had it last; empty before, and where there is but one."""
        ...

    @property
    def route(self) -> str:
        """Why it is that engine, in a few words; empty where there is but one."""
        ...

    async def admitted(self) -> None:
        """Return once the engine has taken the request into its queue; raises as the deltas do."""
        ...

    def __aiter__(self) -> Deltas: ...
    async def __anext__(self) -> TokenDelta: ...
    def end(self, request_id: str) -> None:
        """The reader needs no more of this sequence: it is aborted in the engine."""
        ...

    def abort(self) -> None:
        """End the sequences that have not ended; each gets a last delta with the finish reason "abort"."""
        ...

    async def aclose(self) -> None:
        """Abort the sequences that have not ended."""
        ...


class Generator(Protocol):
    """Tokens from a prompt, wherever the engine is."""

    def generate(
        self, request_ids: Sequence[str], prompt_ids: list[int], params: SamplingParams, options: RequestOptions
    ) -> Deltas:
        """One sequence for each id. Raises Overloaded when no engine can take it."""
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
    sampling: SamplingDefaults = SamplingDefaults()
    """How requests are sampled that leave it open."""
    grammars: Grammars | None = None
    """None: no request may ask for structured output."""
    ability: Ability = Ability()
    aliases: tuple[str, ...] = ()
    """Other names under which clients find it."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine's load, as it last reported it. What it is and what it has measured come with its replica's reports,
    which only /metrics reads."""

    model: str
    engine_id: str
    load: Load
    info: ModelInfo | None = None
    prefix_caching: bool = False
    measures: EngineMeasures | None = None


class EngineHandle(Protocol):
    """One engine, as who looks after it sees it."""

    @property
    def model(self) -> str:
        """The name of its model."""
        ...

    @property
    def engine_id(self) -> str: ...

    async def control(self, op: Control) -> list[str]:
        """Have it do this between two steps; what each worker says of it. Raises RequestRejected, Overloaded,
        RequestLost."""
        ...


class ModelCatalog(Protocol):
    """The models of this application."""

    def get(self, name: str) -> ServedModel | None:
        """None for an unknown name, aliases among them, and for a model that no engine has served yet."""
        ...

    def names(self) -> list[str]:
        """Every model that was asked for, whether it is up or not."""
        ...

    def aliases(self) -> dict[str, str]:
        """Other names of these models -> `names`; none of them is another model's name."""
        ...

    def ready(self) -> bool:
        """True when every model that was asked for can take requests."""
        ...

    def unready(self) -> dict[str, str]:
        """Why each model that cannot take requests now cannot; by name."""
        ...

    def alive(self) -> bool:
        """False once models and engines are no longer followed, and when the server ends."""
        ...

    def stats(self) -> list[EngineStats]: ...

    def engines(self, name: str) -> Sequence[EngineHandle]:
        """Every engine of a model, those too that take no new requests."""
        ...

    async def stacks(self, names: Collection[str]) -> list[ProcessStacks]:
        """What the processes of these models do now, and those in front of them."""
        ...
