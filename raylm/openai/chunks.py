"""Server-sent events of one answer. All but the text is encoded once, because each token pays for a chunk."""

from __future__ import annotations

import msgspec

from raylm.openai.adapter import FINGERPRINT, ChoiceDelta, Job, Reply, event
from raylm.openai.lines import one_line
from raylm.openai.logprobs import Entries, field
from raylm.openai.logprobs import joined as joined_entries
from raylm.openai.params import AnswerForm
from raylm.openai.protocol import Completion, Usage

_encode = msgspec.json.Encoder().encode


class ChunkEncoder:
    """Makes the events of one stream."""

    def __init__(self, reply: Reply, job: Job, form: AnswerForm) -> None:
        self._reply = reply
        self._kind = "chat.completion.chunk" if reply.chat else "text_completion"
        self._returns_ids = form.token_ids
        start = (
            f'data: {{"id":{_json(reply.id)},"object":"{self._kind}","created":{reply.created},'
            f'"model":{_json(reply.model)},"system_fingerprint":"{FINGERPRINT}","choices":[{{"index":'
        )
        field = ',"delta":{"content":' if reply.chat else ',"text":'
        self._heads = [f"{start}{index}{field}".encode() for index in range(job.num_sequences)]
        self._reason = ('},"logprobs":null,' if reply.chat else ',"logprobs":null,').encode() + b'"finish_reason":'
        # With include_usage every chunk has the field, and only the last one its numbers.
        self._end = b'}],"usage":null}\n\n' if form.include_usage else b"}]}\n\n"
        role = f',"delta":{{"role":"assistant","content":""{self._reason.decode()}null'
        roles = [f"{start}{index}{role}".encode() for index in range(job.num_sequences)] if reply.chat else []
        self._opening = b"".join(head + self._end for head in roles)
        self._prompt_ids: dict[int, list[int]] = {}
        if not self._returns_ids:
            return
        if reply.chat:
            # A chat has one prompt: its tokens are in the first event.
            prompt_ids = b'],"prompt_token_ids":' + _encode(job.prompts[0].prompt_ids)
            first = roles[0] + self._end.replace(b"]", prompt_ids, 1)
            self._opening = first + b"".join(head + self._end for head in roles[1:])
        else:
            self._prompt_ids = {
                prompt.first + number: prompt.prompt_ids for prompt in job.prompts for number in range(prompt.params.n)
            }

    def opening(self) -> bytes:
        """The events before the first token: who speaks, for each choice of a chat."""
        return self._opening

    def chunk(self, delta: ChoiceDelta, usage: Usage | None = None) -> bytes:
        """The event of a delta, with the usage so far where that is given; empty when it would say nothing new."""
        index, text, reason = delta[:3]
        entries = delta.entries if delta.entries and delta.entries[0] else None
        before = self._reason if entries is None else self._with_logprobs(entries)
        ids = self._ids(delta) if self._returns_ids else b""
        if reason is None:
            if not text and not ids and entries is None:
                return b""
            last = b"null" + ids
        else:
            last = _json(reason).encode() + b',"stop_reason":' + _encode(delta.stop_reason) + ids
        end = self._end if usage is None else b'}],"usage":' + _encode(usage) + b"}\n\n"
        return self._heads[index] + _text(text) + before + one_line(last) + end

    def usage(self, usage: Usage) -> bytes:
        """The event with the usage, which comes after the last choice's."""
        return event(
            Completion(self._reply.id, self._kind, self._reply.created, self._reply.model, [], usage, FINGERPRINT)
        )

    def _with_logprobs(self, entries: Entries) -> bytes:
        return self._reason.replace(b"null", one_line(field(entries)), 1)

    def _ids(self, delta: ChoiceDelta) -> bytes:
        """The fields of token ids; a choice's first event has its prompt's too."""
        prompt_ids = self._prompt_ids.pop(delta.choice, None)
        if prompt_ids is None:
            return b',"token_ids":' + _encode(delta.token_ids) if delta.token_ids else b""
        return b',"prompt_token_ids":' + _encode(prompt_ids) + b',"token_ids":' + _encode(delta.token_ids)


class Interval:
    """Collects a choice's deltas until they have so many tokens. The first of a choice goes at once, the last too."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._held: dict[int, ChoiceDelta | None] = {}

    def push(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        """What is to be sent now."""
        if self._num_tokens == 1:
            return delta
        is_first = delta.choice not in self._held
        held = self._held.get(delta.choice)
        if held is not None:
            delta = joined(held, delta)
        waits = not is_first and delta.finish_reason is None and delta.num_tokens < self._num_tokens
        self._held[delta.choice] = delta if waits else None
        return None if waits else delta

    def rest(self) -> list[ChoiceDelta]:
        """What was held back, for a stream that ends early."""
        return [delta for delta in self._held.values() if delta is not None]


def joined(first: ChoiceDelta, second: ChoiceDelta) -> ChoiceDelta:
    """Two deltas of one choice as one."""
    parts = [delta.entries for delta in (first, second) if delta.entries is not None]
    return second._replace(
        text=first.text + second.text,
        num_tokens=first.num_tokens + second.num_tokens,
        logprob=first.logprob + second.logprob,
        num_cached=first.num_cached + second.num_cached,
        token_ids=first.token_ids + second.token_ids,
        entries=joined_entries(parts) if parts else None,
    )


def _text(text: str) -> bytes:
    return one_line(_encode(text))


def _json(value: str) -> str:
    return _encode(value).decode()
