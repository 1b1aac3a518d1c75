"""What the events of one of OpenAI's streams share, encoded once, because each token pays for an event."""

from __future__ import annotations

import msgspec

from raylm.api.errors import http_error
from raylm.api.params import AnswerForm
from raylm.api.protocol import Completion
from raylm.api.wire import DONE, FINGERPRINT, Reply, error_event, event, timings_of, usage_of
from raylm.generation.choices import ChoiceDelta, Tally
from raylm.generation.lines import one_line

encode = msgspec.json.Encoder().encode


class Frame:
    """The parts of a stream's events around what a choice gained."""

    def __init__(self, reply: Reply, kind: str, form: AnswerForm) -> None:
        """`kind`: the events' field `object`."""
        self._reply = reply
        self._kind = kind
        self._form = form
        self.start = (
            f'data: {{"id":{encode(reply.id).decode()},"object":"{kind}","created":{reply.created},'
            f'"model":{encode(reply.model).decode()},"system_fingerprint":"{FINGERPRINT}","choices":[{{"index":'
        )
        """Up to a choice's index."""
        # With include_usage every event has the field, and only the last one its numbers.
        self.end = b'}],"usage":null}\n\n' if form.include_usage else b"}]}\n\n"

    def end_of(self, tally: Tally) -> bytes:
        """An event's end behind the fields of its choice; with the usage so far, where the request asks for that."""
        if not self._form.continuous_usage:
            return self.end
        return b'}],"usage":' + encode(usage_of(tally.counts())) + b"}\n\n"

    def closing(self, tally: Tally) -> bytes:
        """The events after the last choice's."""
        if not self._form.include_usage and not self._form.timings:
            return DONE
        reply = self._reply
        last: Completion[None] = Completion(
            reply.id, self._kind, reply.created, reply.model, [], usage_of(tally.counts()), FINGERPRINT
        )
        last.timings = timings_of(tally, wanted=self._form.timings)
        return event(last) + DONE

    @staticmethod
    def failed(error: Exception) -> bytes:
        """The events of a stream that ends with an error."""
        return error_event(http_error(error))


def text(value: str) -> bytes:
    """A string as JSON, on one line."""
    return one_line(encode(value))


def reason(delta: ChoiceDelta) -> bytes:
    """The value of `finish_reason`, and the field `stop_reason` at the end."""
    if delta.finish_reason is None:
        return b"null"
    return one_line(encode(delta.finish_reason) + b',"stop_reason":' + encode(delta.stop_reason))
