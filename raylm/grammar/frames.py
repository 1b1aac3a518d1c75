"""What a GrammarCompiler and its processes say to each other: frames of 4 bytes of length and msgpack."""

from __future__ import annotations

import struct
from typing import IO

import msgspec

from raylm.core.structure import StructuredOutput

_HEADER = struct.Struct("<I")
_MAX_FRAME = 1 << 30


class Setup(msgspec.Struct, frozen=True):
    """The first frame: the model, the width of its logits (0: as many as tokens), and bytes to allocate beyond what
    the process has once it is ready."""

    path: str
    kind: str
    cache_dir: str | None
    vocab_size: int
    memory_bytes: int


class Job(msgspec.Struct, tag="job", frozen=True):
    """Compile this; answered by Done or Failed."""

    structure: StructuredOutput


class VocabularyJob(msgspec.Struct, tag="vocabulary", frozen=True):
    """Answered by a Vocabulary."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The answer to Setup. Some text in `error`: the process is of no use and exits. is_passing: another may do, since
    this machine had no memory or no file left."""

    error: str = ""
    is_passing: bool = False


class Done(msgspec.Struct, tag="done", frozen=True):
    """The structure in a form that engines take."""

    structure: StructuredOutput


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The structure cannot be kept to. is_passing: it was too dear or deadly, which another attempt might not be, on a
    machine that is less busy."""

    message: str
    is_passing: bool = False


class Vocabulary(msgspec.Struct, tag="words", frozen=True):
    """text: what binding.read_vocabulary reads. pieces: the bytes of all tokens, one after the other, of which token i
    has lens[i]."""

    text: str
    pieces: bytes
    lens: list[int]


Request = Job | VocabularyJob
Answer = Ready | Done | Failed | Vocabulary


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame; None at the end of the stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    if size > _MAX_FRAME:
        return None
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: IO[bytes], body: bytes) -> None:
    stream.write(_HEADER.pack(len(body)) + body)
    stream.flush()
