"""The folder beside the output in which a batch keeps what it has done, until all of it is merged."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import msgspec

from raylm.batch.files import TEMPORARY, Place
from raylm.batch.requests import Result
from raylm.batch.shards import Plan, Shard
from raylm.batch.tables import write_table
from raylm.errors import ConfigError, RaylmError

_MANIFEST = "manifest.json"
_ROWS = "rows.jsonl"
_SHARD = "shard-"
_LIFE = "engine-"


class Identity(msgspec.Struct, frozen=True):
    """What must be the same for a batch to go on where another run of it stopped."""

    input: str
    """A digest of all lines."""
    shard_size: int
    model: str
    """The model section of the configuration, as JSON."""
    max_tokens: int


class Totals(msgspec.Struct):
    """A batch's results: lines, those of them that are errors, and tokens."""

    lines: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Report(msgspec.Struct):
    """A shard is done. `started` and `ended` are in seconds since the epoch."""

    index: int
    num_requests: int
    totals: Totals
    started: float
    ended: float


class Manifest(msgspec.Struct):
    """Whose work the folder holds. `totals` is set once the output is complete."""

    identity: Identity
    totals: Totals | None = None


class WorkFolder:
    """Every file in it is written whole or not at all, so that it can be read whenever its writer was killed."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    def rows(self) -> Place:
        """The rows of Parquet input as lines."""
        return self.place / _ROWS

    def manifest(self) -> Manifest | None:
        place = self.place / _MANIFEST
        return msgspec.json.decode(place.read(), type=Manifest) if place.exists() else None

    def begin(self, identity: Identity) -> None:
        """Take the folder for a batch, or go on with it. Raises ConfigError when it holds another's work."""
        found = self.manifest()
        if found is None:
            self.place.make_folder()
            self._write_manifest(Manifest(identity))
        elif found.identity != identity:
            raise _different(self.place, found.identity, identity)

    def complete(self, manifest: Manifest) -> None:
        """The output is there: say so first, then remove what it was made from."""
        self._write_manifest(manifest)
        self.clear(but=_MANIFEST)

    def clear(self, *, but: str = "") -> None:
        """Remove all files of a batch, the manifest first, because without it the rest means nothing."""
        for name in sorted(self.place.names() - {but}, key=lambda name: name != _MANIFEST):
            if name.startswith((_MANIFEST, _ROWS, _SHARD, _LIFE)) or TEMPORARY in name:
                (self.place / name).remove()

    def finished(self) -> set[int]:
        """The shards whose results are here."""
        names = [name for name in self.place.names() if name.startswith(_SHARD) and TEMPORARY not in name]
        return {int(name.removeprefix(_SHARD).removesuffix(".jsonl")) for name in names}

    def note_life(self, most: int) -> None:
        """An engine begins to live. Raises RaylmError when more than `most` have in this run.

        Ray replaces engines for ever, and a line that kills each of them would keep it busy with that.
        """
        with (self.place / f"{_LIFE}{uuid.uuid4().hex}").writer():
            pass
        lives = sum(name.startswith(_LIFE) and TEMPORARY not in name for name in self.place.names())
        if lives > most:
            raise RaylmError(f"{lives - 1} engines were started in this run, and died; Ray's logs tell of what")

    def forget_lives(self) -> None:
        """A new run begins."""
        for name in self.place.names():
            if name.startswith(_LIFE):
                (self.place / name).remove()

    def has(self, shard: Shard) -> bool:
        return self._shard(shard).exists()

    def write(self, shard: Shard, results: Sequence[bytes]) -> None:
        """Keep a shard's results, a line each."""
        with self._shard(shard).writer() as file:
            file.write(b"".join(result + b"\n" for result in results))

    def merge(self, plan: Plan, output: Place) -> Totals:
        """Write the output from all shards. Raises RaylmError when a shard does not have one result a line."""
        totals = Totals()
        with output.writer(drafts=self.place) as target:
            if output.url.endswith(".parquet"):
                write_table(target, (line for shard in plan.shards for line in self._lines(shard, totals)))
            else:
                for shard in plan.shards:
                    target.writelines(self._lines(shard, totals))
        return totals

    def _lines(self, shard: Shard, totals: Totals) -> Iterator[bytes]:
        before = totals.lines
        try:
            with self._shard(shard).reader() as source:
                for line in source:
                    count(line, totals)
                    yield line
        except FileNotFoundError:
            raise RaylmError(
                f"the results of shard {shard.index} are not in {self.place.url}; on a cluster of several machines "
                "--output must be on storage that all of them share"
            ) from None
        if totals.lines - before != shard.num_requests:
            raise RaylmError(
                f"shard {shard.index} has {totals.lines - before} results for {shard.num_requests} lines; remove "
                f"{self._shard(shard).url} and run the batch again"
            )

    def _shard(self, shard: Shard) -> Place:
        return self.place / f"{_SHARD}{shard.index:08d}.jsonl"

    def _write_manifest(self, manifest: Manifest) -> None:
        with (self.place / _MANIFEST).writer() as file:
            file.write(msgspec.json.encode(manifest))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


_results = msgspec.json.Decoder(Result)
_bodies = msgspec.json.Decoder(_Body)


def count(line: bytes, totals: Totals) -> None:
    """Add a line of the output to the totals."""
    response = _results.decode(line).response
    totals.lines += 1
    totals.errors += response is None or response.status_code >= 400
    if response is not None:
        usage = _bodies.decode(response.body).usage
        totals.prompt_tokens += usage.prompt_tokens
        totals.completion_tokens += usage.completion_tokens


def spool(folder: WorkFolder, lines: Iterator[bytes]) -> None:
    """Keep the rows of tables as lines, whole or not at all."""
    folder.place.make_folder()
    with folder.rows.writer() as file:
        file.writelines(lines)


def _different(place: Place, found: Identity, wanted: Identity) -> ConfigError:
    name = next(name for name in Identity.__struct_fields__ if getattr(found, name) != getattr(wanted, name))
    return ConfigError(
        f"{place.url} holds the work of another batch: its {name} is {getattr(found, name)!r}, not "
        f"{getattr(wanted, name)!r}; choose another --output, or drop that work with --overwrite"
    )
