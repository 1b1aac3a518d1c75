"""raylm top: a server's models, engines, queues, caches and rates, as they are now."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import TYPE_CHECKING, TextIO

from raylm.cli.options import Subparsers, add_api_key, add_ca, api_key, trusted
from raylm.errors import RaylmError

if TYPE_CHECKING:
    import httpx
    import msgspec

    from raylm.serving.state import EngineState, ModelState, State

_CLEAR, _REST = "\x1b[H", "\x1b[J"
_BEGIN, _END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_BOLD, _DIM, _RED, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
_ONCE_S = 0.6
"""A server has rates once two looks are half a second apart."""
_BAR = 20
_HEADINGS = ("engine", "running", "waiting", "prompt", "tokens/s", "hits", "cache")
_WIDTHS = (14, 8, 8, 9, 10, 6)


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("top", help="watch a server's engines, queues, caches and rates")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the API's address (default: %(default)s)")
    add_api_key(parser)
    add_ca(parser)
    parser.add_argument("--every", type=_seconds, default=1.0, metavar="S", help="seconds between looks (%(default)g)")
    parser.add_argument("--once", action="store_true", help="print one frame and leave")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import msgspec

    from raylm.cli.server import connect
    from raylm.serving.state import State

    decoder = msgspec.json.Decoder(State)
    with connect(args.url, api_key=api_key(args), verify=trusted(args)) as http:
        address = str(http.base_url).rstrip("/").removesuffix("/v1") + "/state"
        if args.once:
            _look(http, address, decoder)
            time.sleep(_ONCE_S)
            print("\n".join(frame(_look(http, address, decoder), coloured=sys.stdout.isatty())))
            return 0
        _watch(http, address, decoder, every_s=args.every, out=sys.stdout)
    return 0


def _watch(
    http: httpx.Client, address: str, decoder: msgspec.json.Decoder[State], *, every_s: float, out: TextIO
) -> None:
    """Draw until Ctrl-C. A server that is away is said so, and looked for again."""
    lines = frame(_look(http, address, decoder), coloured=True)
    out.write(_BEGIN)
    try:
        while True:
            size = shutil.get_terminal_size()
            shown = [f"{line}\x1b[K" for line in lines[: size.lines - 1]]
            out.write(_CLEAR + "\r\n".join(shown) + _REST)
            out.flush()
            time.sleep(every_s)
            try:
                lines = frame(_look(http, address, decoder), coloured=True)
            except RaylmError as error:
                lines = [f"{_RED}{_clean(str(error))}{_PLAIN}", *lines[1:]]
    finally:
        out.write(_END)
        out.flush()


def _look(http: httpx.Client, address: str, decoder: msgspec.json.Decoder[State]) -> State:
    """Raises RaylmError."""
    import httpx
    import msgspec

    try:
        response = http.get(address, timeout=10)
    except httpx.HTTPError as error:
        raise RaylmError(f"the server at {address} did not answer: {error}") from None
    if response.status_code != 200:
        raise RaylmError(f"the server at {address} answered {response.status_code}: is it raylm's?")
    try:
        return decoder.decode(response.content)
    except msgspec.DecodeError as error:
        raise RaylmError(f"{address} is not the state of a raylm server of this version: {error}") from None


def frame(state: State, *, coloured: bool) -> list[str]:
    """The lines of one picture."""
    bold, dim, red, plain = (_BOLD, _DIM, _RED, _PLAIN) if coloured else ("", "", "", "")
    engines = sum(model.replicas for model in state.models)
    ready = "ready" if state.ready else f"{red}not ready{plain}"
    lines = [f"{bold}raylm {_clean(state.version)}{plain}  {ready}  {len(state.models)} models, {engines} engines"]
    for model in state.models:
        lines += ["", f"{bold}{_clean(model.model)}{plain}  {_summary(model, red, plain)}"]
        if model.engines:
            lines.append(f"{dim}  {_row(_HEADINGS)}{plain}")
        lines += [f"  {_row(_cells(engine))}" for engine in model.engines]
    return lines


def _summary(model: ModelState, red: str, plain: str) -> str:
    if not model.replicas:
        return f"{red}no engine{plain}"
    told = [f"{model.running} running", f"{model.waiting} waiting"]
    if model.tokens_per_s is not None:
        told.append(f"{model.tokens_per_s:,.1f} tokens/s")
    if model.cache_usage is not None:
        told.append(f"cache {model.cache_usage:.0%}")
    return ("" if model.ready else f"{red}not ready{plain}  ") + ", ".join(told)


def _cells(engine: EngineState) -> tuple[str, ...]:
    rate, hits = engine.tokens_per_s, engine.prefix_hit_rate
    return (
        _clean(engine.engine)[:12],
        str(engine.running),
        str(engine.waiting),
        f"{engine.waiting_prompt_tokens:,}",
        "-" if rate is None else f"{rate:,.1f}",
        "-" if hits is None else f"{hits:.0%}",
        _bar(engine.cache_usage),
    )


def _row(cells: tuple[str, ...]) -> str:
    first, *numbers, last = cells
    middle = "".join(cell.rjust(width) for cell, width in zip(numbers, _WIDTHS[1:], strict=True))
    return f"{first.ljust(_WIDTHS[0])}{middle}  {last}"


def _bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * _BAR)
    return f"{'#' * full}{'.' * (_BAR - full)} {share:4.0%}"


def _clean(text: str) -> str:
    """A server's names hold nothing that a terminal obeys."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _seconds(text: str) -> float:
    if not 0.1 <= (value := float(text)) <= 3600:
        raise argparse.ArgumentTypeError(f"must be from 0.1 to 3600 seconds, got {text}")
    return value
