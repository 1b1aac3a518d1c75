"""The process that compiles grammars for a GrammarCompiler, apart so that it can be killed.

It reads frames from stdin and writes one to stdout for each. When stdin ends it exits, even from the middle of a
compilation.
"""

from __future__ import annotations

import errno
import os
import queue
import resource
import sys
import threading
from pathlib import Path

import msgspec

from raylm.core.structure import StructuredOutput
from raylm.errors import RequestRejected
from raylm.grammar import binding
from raylm.grammar.fault import Fault
from raylm.grammar.frames import (
    Answer,
    Done,
    Failed,
    Job,
    Ready,
    Request,
    Setup,
    Vocabulary,
    VocabularyJob,
    read_frame,
    write_frame,
)
from raylm.grammar.special import SpecialTokens, is_text, special_bytes
from raylm.grammar.translate import translate
from raylm.model_files.source import ModelSource
from raylm.text.tokenizer import Tokenizer

_TOO_MUCH = "it takes too much memory to compile"
_PASSING = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
_NICENESS = 5
"""Engines and the ingress come first."""


class _Worker:
    """What the process does once it has its setup."""

    def __init__(self, setup: Setup) -> None:
        source = ModelSource(Path(setup.path), "gguf" if setup.kind == "gguf" else "folder")
        cache_dir = None if setup.cache_dir is None else Path(setup.cache_dir)
        tokenizer = Tokenizer.load(source, cache_dir=cache_dir)
        size = setup.vocab_size or tokenizer.vocab_size
        # A model may have fewer rows of logits than its tokenizer has tokens, and more.
        tokens = [tokenizer.table[index] for index in range(min(size, tokenizer.vocab_size))]
        tokens = [token if is_text(token) else b"" for token in tokens]
        stops = [index for index in tokenizer.eos_token_ids if index < size]
        for index in stops:
            tokens[index] = b""
        self._special = SpecialTokens.of(tokenizer, size)
        for index in self._special.ids.values():
            tokens[index] = special_bytes(index)
        self._vocabulary = binding.vocabulary(tokens, size, stops)
        self._pieces, self._lens = b"".join(tokens), [len(token) for token in tokens]
        self._size = size
        self._stops = stops
        cache_bytes = min(binding.CACHE_BYTES, setup.memory_bytes // 4)
        self._compiler = binding.Compiler(self._vocabulary, cache_bytes=cache_bytes)
        del tokenizer, tokens
        self._warm()
        # What the compiler keeps of earlier grammars must not count against the next one; the heap has gaps besides.
        _limit_memory(setup.memory_bytes + 2 * cache_bytes)

    def _warm(self) -> None:
        """The first compilation costs more than the others."""
        self._compile(Job(StructuredOutput("json_object")))

    def answer(self, request: Request) -> Answer:
        if isinstance(request, VocabularyJob):
            return Vocabulary(str(self._vocabulary.serialize_json()), self._pieces, self._lens)
        return self._answer_job(request)

    def _answer_job(self, job: Job) -> Done | Failed:
        """No structure may end the process: the next one would find none."""
        try:
            return self._compile(job)
        except (Fault, RequestRejected) as error:
            message = str(error)
        except MemoryError:
            message = _TOO_MUCH
        except RecursionError:
            message = "it nests too deep to be read"
        except RuntimeError as error:
            message = _TOO_MUCH if "bad_alloc" in str(error) else _reason(error)
        except Exception as error:
            message = f"it cannot be read: {type(error).__name__}: {error}"[:500]
        return Failed(_sendable(message), is_passing=message == _TOO_MUCH)

    def _compile(self, job: Job) -> Done:
        structure = translate(job.structure, self._special)
        compiled = self._compiler.compile(structure)
        self._check_beginning(compiled)
        return Done(structure)

    def _check_beginning(self, compiled: binding.Compiled) -> None:
        """A grammar that allows no token at all would fail in the first step."""
        import numpy as np

        mask = np.zeros((1, -(-self._size // 32)), np.int32)
        binding.matcher(compiled, self._stops or [0]).fill_next_token_bitmask(mask, 0, False)
        if not mask.any():
            raise Fault("no token of the model's vocabulary can begin a text that matches")


def _sendable(text: str) -> str:
    """Half of a surrogate pair, which a schema may quote, cannot be sent as UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _reason(error: RuntimeError) -> str:
    """xgrammar's words without the time and the place in its source."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "it cannot be compiled"
    if text.startswith("[") and ".cc:" in text:
        text = text.split(".cc:", 1)[1].partition(": ")[2]
    return text[:500]


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    os.nice(_NICENESS)
    # tvm_ffi would import it, and nothing here needs it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    # What the C++ library prints must not come between the frames.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setup = read_frame(sys.stdin.buffer)
    if setup is None:
        return
    try:
        worker = _Worker(msgspec.msgpack.decode(setup, type=Setup))
    except Exception as error:
        is_passing = isinstance(error, MemoryError) or getattr(error, "errno", None) in _PASSING
        write_frame(out, msgspec.msgpack.encode(Ready(_sendable(f"{type(error).__name__}: {error}"), is_passing)))
        return
    write_frame(out, msgspec.msgpack.encode(Ready()))
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        request: Request = msgspec.msgpack.decode(jobs.get(), type=Request)
        write_frame(out, msgspec.msgpack.encode(worker.answer(request)))


def _read(jobs: queue.SimpleQueue[bytes]) -> None:
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        jobs.put(frame)
    os._exit(0)


if __name__ == "__main__":
    main()
