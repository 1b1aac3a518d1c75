"""Options that several commands share, and what becomes of them."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

    from raylm.config.engine import EngineConfig
    from raylm.core.sampling import SamplingParams

Subparsers = Any
"""argparse gives the result of add_subparsers no public type."""

MODEL_HELP = "a folder, a .gguf file, a demo name (smollm2-135m) or a configuration (.yaml) of one model"

_SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "n",
    "stop",
    "bad_words",
    "ignore_eos",
)


def add_model(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument("model", metavar="MODEL", nargs=None if required else "?", help=MODEL_HELP)


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """How a client of a server gets its key, where it is not OpenAI's variable; `api_key` says which it is."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--api-key", metavar="KEY", help="the server's API key (default: OPENAI_API_KEY, as in OpenAI's client)"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="the first key of this file, which holds one a line")


def add_ca(parser: argparse.ArgumentParser) -> None:
    """Whom a client trusts; `trusted` makes a context of it."""
    parser.add_argument(
        "--ca", metavar="FILE", help="certificates (PEM) that may sign the server's; default: the system's"
    )


def trusted(args: argparse.Namespace) -> ssl.SSLContext:
    """For connections to an https address. Raises ConfigError."""
    import ssl

    from raylm.errors import ConfigError

    try:
        return ssl.create_default_context(cafile=args.ca)
    except OSError as error:
        raise ConfigError(
            f"--ca {args.ca!r} cannot be read as certificates in PEM: {error.strerror or error}"
        ) from None


def api_key(args: argparse.Namespace) -> str | None:
    """The key that the options give, or what OpenAI's own client would take. Raises ConfigError when the file holds
    none."""
    if args.api_key_file is None:
        return args.api_key or os.environ.get("OPENAI_API_KEY") or None
    from raylm.serving.identity.keys import read_keys

    return read_keys(args.api_key_file, field="--api-key-file")[0]


def positive(text: str) -> int:
    """An option's value that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def json_object(text: str) -> dict[str, Any]:
    """The type of an option that takes a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is expected, got {text}")
    return value


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options that override a key of EngineConfig; one that is not given leaves the key as it is. They are made when
    the command runs: other commands need not read the configuration's classes."""
    assert isinstance(parser, LateParser)
    parser.adds_engine_flags = True


class LateParser(argparse.ArgumentParser):
    """Takes options by their whole names only, in every subcommand: --api-key is no short form of --api-keys-file."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self.adds_engine_flags = False

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        if self.adds_engine_flags:
            from raylm.cli.engine_flags import add_engine_flags

            self.adds_engine_flags = False
            add_engine_flags(self)
        found, others = super().parse_known_args(*given, **named)
        unknown = next((word.partition("=")[0] for word in others if word.startswith("-")), "")
        if close := difflib.get_close_matches(unknown, self._option_string_actions, n=1):
            self.error(f"unrecognized arguments: {' '.join(others)} (did you mean {close[0]}?)")
        return found, others


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that MODEL and the options ask for. Raises ConfigError."""
    from raylm.cli.engine_flags import given_engine
    from raylm.config.base import parse
    from raylm.config.engine import EngineConfig
    from raylm.config.engine_keys import overridden
    from raylm.config.files import read_config
    from raylm.errors import ConfigError

    data = read_config(args.model) if is_config_file(args.model) else {"model": {"path": args.model}}
    if isinstance(data, dict) and "applications" in data:
        data = _only_engine(data, args.model)
    if not isinstance(data, dict):
        raise ConfigError(f"{args.model}: a mapping is expected, not {type(data).__name__}")
    return parse(EngineConfig, overridden(data, given_engine(args)), source=args.model)


def _only_engine(data: dict[str, Any], source: str) -> object:
    """The engine of a Serve config file. Raises ConfigError where it has not just one model."""
    from raylm.config.files import named_engines
    from raylm.errors import ConfigError

    engines = named_engines(data)
    if len(engines) != 1:
        raise ConfigError(f"{source} is a Serve config file with {len(engines)} models of raylm; name an engine's file")
    return engines[0]


def is_config_file(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))


def add_sampling_options(parser: argparse.ArgumentParser, *, several: bool = True) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate at most")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--typical-p", type=float, metavar="P")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="against tokens that were generated")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="the same, for each time that they were")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="against the prompt's tokens too; 1: off")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the text; may be given several times")
    group.add_argument("--min-tokens", type=int, metavar="N", help="nothing ends the text before so many tokens")
    group.add_argument(
        "--bad-word", dest="bad_words", action="append", metavar="TEXT", help="never said; may be given several times"
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on at end-of-sequence tokens")
    if several:
        group.add_argument("--n", type=int, metavar="N", help="completions per prompt")


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given, by their names in SamplingParams and in OpenAI requests."""
    pairs = ((key, getattr(args, key, None)) for key in _SAMPLING_KEYS)
    return {key: value for key, value in pairs if value is not None}


def sampling_params(args: argparse.Namespace, config: EngineConfig, *, max_tokens: int) -> SamplingParams:
    """SamplingParams of the options; what is not given is the model's own, and `max_tokens`. Raises RequestRejected."""
    from raylm.core.sampling import SamplingParams
    from raylm.model_files.advice import sampling_defaults

    own: dict[str, Any] = sampling_defaults(config).fields()
    return SamplingParams(**{"max_tokens": max_tokens, **own, **given_sampling(args)})
