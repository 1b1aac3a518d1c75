"""Logits processors that users write, by their names in the entry point group raylm.logits_processors."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Protocol

import numpy as np
from torch import Tensor

from raylm.core.step import RowSampling
from raylm.errors import ConfigError
from raylm.log import get_logger
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.stages import LogitRows, RowNotes

logger = get_logger(__name__)

GROUP = "raylm.logits_processors"
_MOST_CHARS = 300
"""Of what is told about a failure."""


class LogitsProcessor(Protocol):
    """Changes the logits of the rows that name it. The entry point is called without arguments, once a worker.

    A step calls it once with all of its rows, whose requests fail when it raises. It must not wait for the device, nor
    change its arguments, and must give the same on every worker. Rows of drafts that will be rejected come too.
    """

    def __call__(self, logits: Tensor, token_ids: Tensor, num_tokens: Tensor) -> Tensor:
        """New logits for `logits` [M, vocab]. token_ids int64 [M, max_model_len] has in its first num_tokens[m] (int64
        [M]) columns the prompt and what has been generated; what is beyond has no meaning."""
        ...


def load_processors(names: Sequence[str]) -> dict[str, LogitsProcessor]:
    """The processors of these names. Raises ConfigError where there is none, or it cannot be made."""
    if not names:
        return {}
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    made = {}
    for name in names:
        if name not in found:
            known = ", ".join(sorted(found)) or "none"
            raise ConfigError(
                f"generation.logits_processors names {name!r}, but the installed packages have {known} in the entry "
                f"point group {GROUP}"
            )
        try:
            made[name] = found[name].load()()
            if not callable(made[name]):
                raise TypeError(f"{made[name]!r:.100} is not callable")
        except Exception as error:
            raise ConfigError(
                f"generation.logits_processors: {name} could not be made: {type(error).__name__}: {error}"
            ) from error
    return made


class Processors:
    """logits_processors: the stage that runs those of each row, in the order in which its request names them."""

    def __init__(self, table: RequestTable, processors: dict[str, LogitsProcessor], notes: RowNotes) -> None:
        self._table = table
        self._notes = notes
        self._processors = processors
        self._names: dict[int, tuple[str, ...]] = {}

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        self._names[row] = sampling.params.logits_processors
        return bool(self._names[row])

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        wanted = [self._names.get(row, ()) for row in of.rows.tolist()]
        for turn in range(max(map(len, wanted))):
            for name, processor in self._processors.items():
                indices = np.array([i for i, names in enumerate(wanted) if names[turn : turn + 1] == (name,)])
                if len(indices):
                    self._run(name, processor, logits, of, indices)
        return logits

    def _run(self, name: str, processor: LogitsProcessor, logits: Tensor, of: LogitRows, indices: np.ndarray) -> None:
        (index,) = self._table.upload(indices)
        token_ids = self._table.token_ids.index_select(0, of.table_rows.index_select(0, index)).long()
        try:
            changed = processor(logits.index_select(0, index), token_ids, of.positions.index_select(0, index))
            logits.index_copy_(0, index, changed.to(logits.dtype))
        except Exception as error:
            # Anyone's code: it may fail its own requests and no others.
            logger.exception("The logits processor %s failed", name)
            for row in of.rows[indices].tolist():
                self._notes.fail(row, f"logits_processors: {name} raised {type(error).__name__}: {error}"[:_MOST_CHARS])
