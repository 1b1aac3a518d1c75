"""raylm chat: a conversation in the terminal, with a model in this process or with a server."""

from __future__ import annotations

import argparse
import importlib
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from raylm.cli.options import Subparsers, add_api_key, add_ca, add_engine_options, add_model, add_sampling_options
from raylm.errors import ConfigError, RaylmError

if TYPE_CHECKING:
    from raylm.core.sampling import SamplingParams
    from raylm.llm import LLM

Message = dict[str, str]
_MAX_TOKENS = 1024
_HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("chat", help="talk to a model, offline or on a server")
    add_model(parser, required=False)
    parser.add_argument("--url", metavar="URL", help="a server's API instead, such as http://127.0.0.1:8000/v1")
    add_api_key(parser)
    add_ca(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_options(parser, several=False)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from raylm.cli.options import api_key, engine_config, given_sampling, sampling_params, trusted

    if args.url is not None:
        from raylm.cli.server import ServerSpeaker
        from raylm.core.sampling import SamplingParams

        options = {"max_tokens": _MAX_TOKENS, **given_sampling(args)}
        SamplingParams(**options)  # A wrong one is told before anything is said.
        with closing(
            ServerSpeaker(args.url, args.model, options, api_key=api_key(args), verify=trusted(args))
        ) as server:
            return Chat(server, system=args.system).run()
    if args.model is None:
        raise ConfigError("chat needs a MODEL, or --url with the address of a server")
    from raylm.llm import LLM

    config = engine_config(args)
    params = sampling_params(args, config, max_tokens=_MAX_TOKENS)
    llm = LLM(config)
    try:
        return Chat(LocalSpeaker(llm, params), system=args.system).run()
    finally:
        llm.close()


class Speaker(Protocol):
    """Who answers. Closing the iterator stops the answer."""

    name: str

    def answer(self, messages: list[Message]) -> Iterator[str]: ...


class LocalSpeaker:
    """A model in this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self.name = llm.name

    def answer(self, messages: list[Message]) -> Iterator[str]:
        prompt_ids = self._llm.text.chat([dict[str, Any](message) for message in messages])
        with _interrupt_between_steps() as interrupted:
            for delta in self._llm.stream(prompt_ids, self._params):
                yield delta.text
                if interrupted.is_set():
                    return


@contextmanager
def _interrupt_between_steps() -> Iterator[Event]:
    """Inside, a first Ctrl-C only sets the event: an exception in the middle of a step would break the engine."""
    interrupted = Event()
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class Chat:
    """The loop of one conversation."""

    def __init__(self, speaker: Speaker, *, system: str | None = None) -> None:
        self._speaker = speaker
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def run(self) -> int:
        """Read, answer, until /exit or the end of input."""
        with suppress(ImportError):
            importlib.import_module("readline")  # Gives input() line editing and a history.
        print(f"{self._speaker.name}: {_HELP}")
        while True:
            try:
                line = input("> ").strip()
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return 0
            if line == "/exit":
                return 0
            self.say(line)

    def say(self, line: str) -> None:
        """One line of the user's: a command, or a message that is answered."""
        if line == "/clear":
            self.messages = list(self._opening)
        elif line.startswith("/"):
            print(f"unknown command {line.split()[0]}; {_HELP}")
        elif line:
            self._ask(line)

    def _ask(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        answer = self._speaker.answer(self.messages)
        try:
            for piece in answer:
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pass
        except RaylmError as error:
            if not pieces:
                # Nothing was answered: the conversation goes on as if this had not been said.
                self.messages.pop()
            print(f"[{error}]", end="")
        finally:
            if (close := getattr(answer, "close", None)) is not None:
                close()
            print()
        if pieces:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
