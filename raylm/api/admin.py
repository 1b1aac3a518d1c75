"""What an operator tells engines: to forget their prefix caches, to record a profile, to show what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import msgspec

from raylm.api.about import About
from raylm.api.call import Call
from raylm.api.errors import HttpError
from raylm.core.control import MAX_PROFILED_STEPS, Control, ResetCache, StartProfile, StopProfile
from raylm.errors import Overloaded, RaylmError, RequestRejected
from raylm.generation.served_model import EngineHandle, ModelCatalog
from raylm.stacks import ProcessStacks

_RETRY_S = 5.0
_WHICH = {
    "model": "The engines of this model alone; without it those of every model.",
    "engine": "This engine alone, by its id in /state.",
}
_FAILURES = frozenset({400, 404, 503})
_FALSE = {"false", "False", "0", ""}


class EngineAnswer(msgspec.Struct, omit_defaults=True):
    """workers: what each says of it, by rank; none where they have no part in it. error: why it was not done."""

    model: str
    engine: str
    workers: list[str] = []
    error: str | None = None


class EngineAnswers(msgspec.Struct):
    engines: list[EngineAnswer]


class ProcessAnswer(msgspec.Struct):
    """stacks: of its threads and tasks, as text. error: why there are none."""

    process: str
    node: str
    pid: int
    stacks: str
    error: str | None


class StacksAnswer(msgspec.Struct):
    processes: list[ProcessAnswer]


_TAG = "Looking after engines"
ABOUT_RESET = About(
    "Let nothing be found in the prefix cache that was computed until now. Running requests go on.",
    _TAG,
    answer=EngineAnswers,
    errors=_FAILURES,
    query=_WHICH | {"reset_running_requests": "vLLM's; only false: requests keep what they have."},
)
ABOUT_START = About(
    "Record the steps of engines with torch's profiler, into files in runtime.profile_folder.",
    _TAG,
    answer=EngineAnswers,
    errors=_FAILURES,
    query=_WHICH | {"num_steps": f"Stop by itself after so many steps, 1 to {MAX_PROFILED_STEPS}."},
)
ABOUT_STOP = About(
    "End a recording. Answers when the files are there, with their names.",
    _TAG,
    answer=EngineAnswers,
    errors=_FAILURES,
    query=_WHICH,
)
ABOUT_STACKS = About(
    "What every process does now: the stacks of its threads.",
    _TAG,
    answer=StacksAnswer,
    errors=_FAILURES,
    query={"model": "The processes of this model alone, beside the ingresses; without it those of every model."},
)


class Administration:
    """The operations of the scope `admin` on the engines of a catalog."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog

    async def reset_prefix_cache(self, call: Call) -> bytes:
        _check(call, {"reset_running_requests", *_WHICH})
        if call.query.get("reset_running_requests", "") not in _FALSE:
            raise RequestRejected(
                "reset_running_requests must be false: running requests keep what they have",
                param="reset_running_requests",
                code="unsupported_parameter",
            )
        return await self._tell(call, ResetCache())

    async def start_profile(self, call: Call) -> bytes:
        _check(call, {"num_steps", *_WHICH})
        return await self._tell(call, StartProfile(_num_steps(call.query.get("num_steps"))))

    async def stop_profile(self, call: Call) -> bytes:
        _check(call, _WHICH.keys())
        return await self._tell(call, StopProfile())

    async def stacks(self, call: Call) -> bytes:
        _check(call, {"model"})
        found = await self._catalog.stacks(self._names(call))
        return msgspec.json.encode(StacksAnswer([_process(each) for each in found]))

    def _names(self, call: Call) -> list[str]:
        """The models that are meant. Raises HttpError."""
        names = self._catalog.names()
        asked = call.query.get("model")
        if asked is None:
            return names
        wanted = self._catalog.aliases().get(asked, asked)
        if wanted not in names:
            message = f"The model {asked!r:.200} does not exist"
            raise HttpError(404, message, param="model", code="model_not_found")
        return [wanted]

    async def _tell(self, call: Call, op: Control) -> bytes:
        """Every engine that is meant, at once. What only some of them fail at stands in the answer; what all fail at
        is raised."""
        engines = [engine for name in self._names(call) for engine in self._catalog.engines(name)]
        if (wanted := call.query.get("engine")) is not None:
            engines = [engine for engine in engines if engine.engine_id == wanted]
            if not engines:
                raise RequestRejected(f"the engine {wanted!r:.200} does not exist", param="engine")
        if not engines:
            raise Overloaded("no engine is up", retry_after=_RETRY_S)
        results = await asyncio.gather(*(_told(engine, op) for engine in engines))
        failures = [result for result in results if isinstance(result, RaylmError)]
        if len(failures) == len(results):
            raise failures[0]
        answers = [_answer(engine, result) for engine, result in zip(engines, results, strict=True)]
        return msgspec.json.encode(EngineAnswers(answers))


async def _told(engine: EngineHandle, op: Control) -> list[str] | RaylmError:
    try:
        return await engine.control(op)
    except RaylmError as error:
        return error


def _answer(engine: EngineHandle, result: list[str] | RaylmError) -> EngineAnswer:
    if isinstance(result, RaylmError):
        return EngineAnswer(engine.model, engine.engine_id, error=str(result))
    return EngineAnswer(engine.model, engine.engine_id, result)


def _process(found: ProcessStacks) -> ProcessAnswer:
    return ProcessAnswer(found.process, found.node, found.pid, found.stacks, found.error)


def _check(call: Call, known: Collection[str]) -> None:
    """Everything stands in the query; what is not known is refused. Raises RequestRejected."""
    if bytes(call.body).strip() not in (b"", b"{}"):
        raise RequestRejected("this operation has no body: what it takes stands in the URL's query")
    for name in call.query:
        if name not in known:
            raise RequestRejected(f"{name!r:.200} is unknown in the query; allowed: {', '.join(known)}", param=name)


def _num_steps(text: str | None) -> int | None:
    if text is None:
        return None
    if text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_PROFILED_STEPS:
        return int(text[:9])
    raise RequestRejected(
        f"num_steps must be a number of 1 to {MAX_PROFILED_STEPS}, got {text!r:.100}", param="num_steps"
    )
