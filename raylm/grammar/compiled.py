"""Compiled grammars in a process that matches, and the vocabulary that they are compiled for.

The vocabulary comes from a child process. Reading a tokenizer of 128,000 tokens holds Python's lock for 1.5 s, and
turning its tokens into xgrammar's for another 0.1 s: steps would wait for it. A child does both, and its result is read
back in 0.1 s without the lock.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from raylm.core.structure import StructuredOutput
from raylm.grammar import binding
from raylm.grammar.process import CompilerProcess, setup_of
from raylm.model_files.source import ModelSource

_MAX_COMPILED_BYTES = 1 << 28


class TokenPieces:
    """The bytes of tokens by id. One object instead of a vocabulary's many."""

    def __init__(self, pieces: bytes, lens: list[int]) -> None:
        """`pieces`: of all tokens, one after the other, of which token i has lens[i] bytes."""
        self._pieces = pieces
        self._ends = np.cumsum(lens, dtype=np.int64)

    def __getitem__(self, token: int) -> bytes:
        """Without bytes: a special token, or none of the tokenizer's."""
        if token >= len(self._ends):
            return b""
        start = int(self._ends[token - 1]) if token else 0
        return self._pieces[start : int(self._ends[token])]


class CompiledGrammars:
    """Grammars compiled for one model's logits, in a thread; the newest are kept for the next request.

    All structures are ones that a GrammarCompiler has let through. Nothing is started before the first.
    """

    def __init__(self, source: ModelSource, vocab_size: int, *, threads: int = 1) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._num_threads = threads
        self._compiler: binding.Compiler | None = None
        self._pieces = TokenPieces(b"", [])
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], Future[binding.Compiled]] = {}
        """By kind and value, the one asked for last at the end."""
        self._in_use: weakref.WeakValueDictionary[tuple[str, str], Future[binding.Compiled]]
        self._in_use = weakref.WeakValueDictionary()
        """All of `_kept`, and the dropped ones that rows still hold, whose memory is not free anyway."""

    def get(self, structure: StructuredOutput) -> Future[binding.Compiled]:
        """The compiled grammar, once it is compiled. Called from any thread."""
        key = structure.kind, structure.value
        with self._lock:
            future = self._in_use.get(key)
            self._kept.pop(key, None)
            if future is None or (future.done() and future.exception() is not None):
                # Only here: a step that finds its grammars must not look at all that are kept.
                self._drop_old()
                future = self._threads.submit(lambda: self._get_compiler().compile(structure))
            self._kept[key] = self._in_use[key] = future
            return future

    @property
    def pieces(self) -> TokenPieces:
        """The tokens' bytes; of none before a grammar is compiled."""
        return self._pieces

    def close(self) -> None:
        """End the thread, after the grammar that it compiles now; those that have not begun are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _get_compiler(self) -> binding.Compiler:
        if self._compiler is None:
            binding.load()
            child = CompilerProcess(setup_of(self._source, None, self._vocab_size, 1 << 32))
            try:
                found = child.vocabulary()
            finally:
                child.kill()
            self._pieces = TokenPieces(found.pieces, found.lens)
            self._compiler = binding.Compiler(binding.read_vocabulary(found.text), self._num_threads)
        return self._compiler

    def _drop_old(self) -> None:
        sizes = {key: _num_bytes(future) for key, future in self._kept.items()}
        total = sum(sizes.values())
        for key, size in sizes.items():
            if total <= _MAX_COMPILED_BYTES:
                return
            del self._kept[key]
            total -= size


def _num_bytes(future: Future[binding.Compiled]) -> int:
    if not future.done() or future.exception() is not None:
        return 0
    return future.result().memory_size_bytes()
