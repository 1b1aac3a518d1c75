"""POST /v1/completions: texts that go on from prompts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from raylm.api.about import GENERATING, About
from raylm.api.answering import Draft
from raylm.api.call import Call
from raylm.api.chunks import TextChunk
from raylm.api.frame import Frame, encode, reason, text
from raylm.api.params import AnswerForm, asking, check_num_sequences
from raylm.api.parser import parse, prompts_of
from raylm.api.preparation import Models
from raylm.api.protocol import Completion, CompletionRequest, TextChoice
from raylm.api.unsupported import COMPLETIONS_ONLY, HARMLESS, UNSUPPORTED
from raylm.api.wire import FINGERPRINT, Reply, timings_of, usage_of
from raylm.config.serving import HttpConfig
from raylm.generation.choices import ChoiceDelta, Tally, Whole
from raylm.generation.job import Job
from raylm.generation.lines import one_line
from raylm.generation.listing import field

ABOUT = About(
    "Texts that go on from prompts.",
    "Chats and completions",
    (CompletionRequest,),
    Completion[TextChoice],
    TextChunk,
    GENERATING,
    refused={**UNSUPPORTED, **COMPLETIONS_ONLY},
    ignored=HARMLESS,
)


class Completions:
    """Reads the bodies of this operation."""

    def __init__(self, models: Models, config: HttpConfig) -> None:
        self._models = models
        self._config = config

    def parse(self, call: Call) -> Draft:
        """What the call asks for. Raises whatever is wrong with it."""
        request = parse(CompletionRequest, call.body, self._config)
        model = self._models.get(request.model)
        asked = asking(request, model.sampling, call.identity, default_max_tokens=self._config.default_max_tokens)
        prompts = prompts_of(request.prompt)
        check_num_sequences(len(prompts), asked.wanted, self._config.max_choices)

        def encoder(reply: Reply, job: Job) -> CompletionEncoder:
            return CompletionEncoder(reply, job, asked.answer)

        return Draft(model, asked, prompts, "prompt", encoder, id_prefix="cmpl-", continues_prompt=True)


class CompletionEncoder:
    """Makes the answer to one request for completions."""

    def __init__(self, reply: Reply, job: Job, form: AnswerForm) -> None:
        self._reply = reply
        self._form = form
        self._frame = Frame(reply, "text_completion", form)
        self._heads = [f'{self._frame.start}{index},"text":'.encode() for index in range(job.num_sequences)]
        self._prompt_ids = {
            prompt.first + number: prompt.prompt_ids
            for prompt in (job.prompts if form.token_ids else ())
            for number in range(prompt.params.n)
        }
        """Those that no event has said yet."""

    def opening(self) -> bytes:
        return b""

    def chunk(self, delta: ChoiceDelta, tally: Tally) -> bytes:
        """The event of a delta; empty when it would say nothing new."""
        ids = self._ids(delta) if self._form.token_ids else b""
        entries = delta.entries if delta.entries and delta.entries[0] else None
        if delta.finish_reason is None and not delta.text and not ids and entries is None:
            return b""
        before = _REASON if entries is None else _REASON.replace(b"null", one_line(field(entries)), 1)
        head = self._heads[delta.choice]
        return head + text(delta.text) + before + reason(delta) + ids + self._frame.end_of(tally)

    def closing(self, tally: Tally) -> bytes:
        return self._frame.closing(tally)

    def failed(self, error: Exception) -> bytes:
        return self._frame.failed(error)

    def answer(self, choices: Sequence[Whole], tally: Tally) -> bytes:
        """The JSON of an answer that is not streamed."""
        reply = self._reply
        found = [self._choice(index, whole) for index, whole in enumerate(choices)]
        usage = usage_of(tally.counts())
        whole = Completion(reply.id, "text_completion", reply.created, reply.model, found, usage, FINGERPRINT)
        whole.timings = timings_of(tally, wanted=self._form.timings)
        return encode(whole)

    def _choice(self, index: int, whole: Whole) -> TextChoice:
        ids, entries = self._form.token_ids, whole.entries
        return TextChoice(
            index,
            whole.text,
            whole.finish_reason,
            None if entries is None else msgspec.Raw(field(entries)),
            whole.stop_reason,
            whole.token_ids if ids else msgspec.UNSET,
            whole.prompt_ids if ids else msgspec.UNSET,
            msgspec.UNSET if whole.prompt_list is None else msgspec.Raw(whole.prompt_list),
        )

    def _ids(self, delta: ChoiceDelta) -> bytes:
        """The fields of token ids; a choice's first event has its prompt's too."""
        prompt_ids = self._prompt_ids.pop(delta.choice, None)
        if prompt_ids is None:
            return b',"token_ids":' + encode(delta.token_ids) if delta.token_ids else b""
        return b',"prompt_token_ids":' + encode(prompt_ids) + b',"token_ids":' + encode(delta.token_ids)


_REASON = b',"logprobs":null,"finish_reason":'
