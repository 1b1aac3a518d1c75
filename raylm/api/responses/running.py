"""ResponseRun: one response while it is generated."""

from __future__ import annotations

from contextlib import aclosing

from raylm.api.call import Events
from raylm.api.errors import HttpError, http_error
from raylm.api.metrics import HttpMetrics
from raylm.api.preparation import Preparation
from raylm.api.responses.prompting import FIELD, Asked, Prompt
from raylm.api.responses.wire import Response
from raylm.api.responses.writer import ResponseWriter
from raylm.generation.choices import Tally
from raylm.generation.running import Generation, Origin


class ResponseRun:
    """Generates one response and writes it. Must be closed: what has not ended by then is aborted in the engine."""

    def __init__(self, asked: Asked, prompt: Prompt, response: Response, started: float) -> None:
        """`started`: when the request arrived (perf_counter)."""
        self._asked = asked
        self._prompt = prompt
        self._started = started
        self._writer = ResponseWriter(response, {})
        self._tally = Tally(0)
        self._generation: Generation | None = None
        self.response = response
        self.error: HttpError | None = None
        """What ended it, if anything did."""

    async def admit(self, preparation: Preparation, metrics: HttpMetrics) -> None:
        """Return once the engine has taken it. Raises what is wrong with it, and why no engine takes it."""
        asked, prompt = self._asked, self._prompt
        asking, job = await preparation.job_of(asked.model, prompt.asked, [prompt.text], FIELD)
        self._tally = Tally(job.prompt_tokens)
        origin = Origin(self.response.id, self._started, False, asking.answer.logprobs, prompt.reading)
        self._generation = Generation(asked.model, job, metrics.model(asked.model.name), origin)
        await self._generation.admitted()

    async def events(self) -> Events:
        """Its events but for the last one, which `closing` gives. An error ends them, and is in `error` then."""
        assert self._generation is not None, "admit has been called"
        writer = self._writer
        yield writer.opening()
        try:
            finish_reason: str | None = None
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    self._tally.add(delta)
                    finish_reason = delta.finish_reason
                    if told := writer.push(delta):
                        yield told
            yield writer.end_round(finish_reason)
        except Exception as error:
            # The engine is free before a slow client has read.
            await self.aclose()
            self.error = http_error(error)
            writer.fail(self.error)

    def closing(self) -> bytes:
        """The last event; the response is complete then."""
        return self._writer.closing(self._tally.counts())

    def fail(self, error: HttpError) -> None:
        """End it with an error from elsewhere."""
        self.error = error
        self._writer.fail(error)

    async def aclose(self) -> None:
        if self._generation is not None:
            await self._generation.aclose()
