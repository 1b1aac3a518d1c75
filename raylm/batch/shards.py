"""A batch cut into shards: runs of lines that are answered, and checkpointed, together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal, NamedTuple

import msgspec
import numpy as np

from raylm.batch.files import Place
from raylm.batch.requests import BadLine, BatchRequest, custom_id_of, default_id, parse_line, parse_row, plain_request

MAX_LINE_BYTES = 8 * 2**20
"""A longer line is an error, and is never held in memory as a whole. The server's limit of a body, by default."""
MAX_SHARD_BYTES = 32 * 2**20


Kind = Literal["lines", "rows", "text"]
"""What a line is: JSON as users write it, a table's row as JSON, or a prompt."""


class Shard(msgspec.Struct):
    """Lines of one file: `num_bytes` from `offset` on, the first of them line `first_line` of the batch, from 1.

    num_requests: lines that are not blank. duplicates: of these, counted from 0, those whose custom_id the batch had
    before.
    """

    index: int
    file: str
    kind: Kind
    offset: int
    num_bytes: int
    first_line: int
    num_requests: int
    duplicates: list[int] = []


class Line(NamedTuple):
    """One line of a file without its end; `data` is None where it is too long."""

    number: int
    data: bytes | None
    num_bytes: int

    @property
    def is_blank(self) -> bool:
        return self.data is not None and not self.data.strip()


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards of a batch, and a digest of the bytes that they were made from."""

    shards: list[Shard]
    digest: str

    @property
    def num_requests(self) -> int:
        return sum(shard.num_requests for shard in self.shards)


def plan_shards(files: Iterable[Place], kind: Kind, size: int) -> Plan:
    """Read all files once and cut them into shards of `size` requests; holds 16 bytes a line, and a few a shard."""
    planner = _Planner(kind, size)
    for file in files:
        with file.reader() as source:
            planner.add(file, source)
    return planner.plan()


def requests_of(shard: Shard, *, model: str) -> Iterator[BatchRequest | BadLine]:
    """The shard's requests in order, read as they are asked for."""
    duplicates = frozenset(shard.duplicates)
    with Place(shard.file).reader() as source:
        source.seek(shard.offset)
        found = lines(source, first=shard.first_line, num_bytes=shard.num_bytes)
        for position, line in enumerate(line for line in found if not line.is_blank):
            try:
                request = _parsed(line, shard.kind, model)
            except BadLine as error:
                yield error
                continue
            yield _duplicate(line, request) if position in duplicates else request


def _parsed(line: Line, kind: Kind, model: str) -> BatchRequest:
    if line.data is None:
        raise BadLine("line_too_long", f"Line {line.number} has {line.num_bytes} bytes, at most {MAX_LINE_BYTES}")
    if kind == "rows":
        return parse_row(msgspec.json.decode(line.data), line.number, model=model)
    if kind == "lines":
        return parse_line(line.data, line.number, model=model)
    try:
        prompt = line.data.decode()
    except UnicodeDecodeError as error:
        raise BadLine("invalid_utf8", f"Line {line.number} is not valid UTF-8 at byte {error.start}") from None
    return plain_request({"prompt": prompt}, line.number, model=model)


def _duplicate(line: Line, request: BatchRequest) -> BadLine:
    message = f"Line {line.number} has the custom_id of an earlier line"
    return BadLine("duplicate_custom_id", message, request.custom_id)


def lines(source: BinaryIO, *, first: int = 1, num_bytes: int | None = None) -> Iterator[Line]:
    """Lines from where `source` stands, over `num_bytes` or to the end."""
    number, left = first, num_bytes
    while (line := _read_line(source, number)) is not None:
        yield line
        number += 1
        if left is not None:
            left -= line.num_bytes
            if left <= 0:
                return


def _read_line(source: BinaryIO, number: int) -> Line | None:
    data = source.readline(MAX_LINE_BYTES + 1)
    if not data:
        return None
    if len(data) <= MAX_LINE_BYTES or data.endswith(b"\n"):
        return Line(number, data.rstrip(b"\r\n"), len(data))
    size, part = len(data), data
    while part and not part.endswith(b"\n"):
        part = source.readline(2**20)
        size += len(part)
    return Line(number, None, size)


class _Planner:
    """Collects lines into shards. Lines are counted through all files."""

    def __init__(self, kind: Kind, size: int) -> None:
        self._kind = kind
        self._size = size
        self._shards: list[Shard] = []
        self._ids = bytearray()
        """A digest of each request's custom_id."""
        self._digest = hashlib.blake2b(digest_size=16)
        self._number = 0

    def add(self, file: Place, source: BinaryIO) -> None:
        shard = Shard(len(self._shards), file.url, self._kind, 0, 0, self._number + 1, 0)
        for line in lines(source, first=self._number + 1):
            self._number = line.number
            self._digest.update(line.data if line.data is not None else str(line.num_bytes).encode())
            self._digest.update(b"\n")
            shard.num_bytes += line.num_bytes
            if not line.is_blank:
                shard.num_requests += 1
                self._ids += _digest_of_id(line, self._kind)
            if shard.num_requests == self._size or shard.num_bytes >= MAX_SHARD_BYTES:
                self._shards.append(shard)
                end = shard.offset + shard.num_bytes
                shard = Shard(len(self._shards), file.url, self._kind, end, 0, line.number + 1, 0)
        if shard.num_requests:
            self._shards.append(shard)

    def plan(self) -> Plan:
        if not self._shards:
            return Plan([], self._digest.hexdigest())
        last = np.cumsum([shard.num_requests for shard in self._shards])
        for position in self._duplicates():
            index = int(np.searchsorted(last, position, side="right"))
            shard = self._shards[index]
            shard.duplicates.append(int(position - last[index]) + shard.num_requests)
        return Plan(self._shards, self._digest.hexdigest())

    def _duplicates(self) -> np.ndarray:
        """Requests, counted from 0, whose custom_id came before, in order."""
        halves = np.frombuffer(bytes(self._ids), np.uint64).reshape(-1, 2)
        # Stable, so that of equal ids the first line comes first.
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        same = (halves[order[1:]] == halves[order[:-1]]).all(axis=1)
        return np.sort(order[1:][same])


def _digest_of_id(line: Line, kind: Kind) -> bytes:
    told = line.data is not None and kind != "text"
    custom_id = custom_id_of(line.data or b"", line.number) if told else default_id(line.number)
    return hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
