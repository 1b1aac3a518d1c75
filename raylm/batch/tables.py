"""Parquet in and out. In between everything is lines of JSON, so that there is one way of cutting and of merging."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from raylm.batch.files import Place
from raylm.batch.requests import REQUEST_COLUMNS, Result
from raylm.errors import ConfigError

_ROWS_AT_A_TIME = 1024

OUTPUT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("custom_id", pa.string()),
        ("response", pa.struct([("status_code", pa.int32()), ("request_id", pa.string()), ("body", pa.string())])),
        ("error", pa.struct([("code", pa.string()), ("message", pa.string())])),
    ]
)
"""The columns of the output; `body` is JSON."""


def rows_as_lines(place: Place) -> Iterator[bytes]:
    """The rows of a Parquet file as lines of JSON, of the columns that a request can have. Raises ConfigError."""
    with place.reader() as source:
        try:
            file = pq.ParquetFile(source)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{place.url}: cannot be read as Parquet: {error}") from None
        names = file.schema_arrow.names
        columns = [name for name in names if name in REQUEST_COLUMNS]
        if not {"body", "prompt", "messages"} & set(columns):
            raise ConfigError(
                f"{place.url} has the columns {', '.join(names)}; one of body, prompt and messages is needed"
            )
        for batch in file.iter_batches(_ROWS_AT_A_TIME, columns=columns):
            for row in batch.to_pylist():
                yield msgspec.json.encode(row) + b"\n"


def write_table(target: BinaryIO, results: Iterable[bytes]) -> None:
    """Write lines of results as Parquet, a bounded number of them in memory."""
    decoder = msgspec.json.Decoder(Result)
    with pq.ParquetWriter(target, OUTPUT_SCHEMA) as writer:
        rest = iter(results)
        while rows := [_row(decoder.decode(line)) for line in islice(rest, _ROWS_AT_A_TIME)]:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=OUTPUT_SCHEMA))


def _row(result: Result) -> dict[str, Any]:
    response = result.response
    return {
        "id": result.id,
        "custom_id": result.custom_id,
        "response": response and {**msgspec.structs.asdict(response), "body": bytes(response.body).decode()},
        "error": result.error and msgspec.structs.asdict(result.error),
    }
