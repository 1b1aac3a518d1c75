"""Pure decode steps as CUDA graphs.

A decode step of a small model is hundreds of short kernels, and the host takes longer to launch them than the GPU to
run them. A graph launches them all at once. One graph serves one padded number of rows: rows that are missing are the
table's padding row, so kernels see nothing special.

Graphs are made on demand: a size runs eagerly when it first comes (which also loads its kernels) and is captured when
it comes again, in some 20 ms; so neither the start nor a first answer waits for sizes that may never come. Only the
largest is captured at the start, because all share one pool of memory and that one takes the most of it.
"""

from __future__ import annotations

import functools
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from raylm import ops
from raylm.worker.input_batch import InputBatch, StepArrays
from raylm.worker.request_table import RequestTable
from raylm.worker.transfer import unpack

Run = Callable[[], None]
Capture = Callable[[Run], Run]
"""Makes of a function that launches work one that launches the same work again."""

_LADDER = ((256, 8), (512, 16), (1024, 32), (4096, 64))
"""Over 4 rows: up to so many, sizes go up in steps of so many."""
_NO_ROWS = np.empty(0, dtype=np.int64)


def graph_sizes(max_rows: int) -> list[int]:
    """The padded numbers of rows: 1, 2, 4, 8, 16, 24 ... and max_rows itself."""
    sizes = [1, 2, 4]
    for (last, step), (before, _) in zip(_LADDER, ((0, 0), *_LADDER), strict=False):
        sizes += range(before + step, last + 1, step)
    sizes = [size for size in sizes if size < max_rows]
    return [*sizes, max_rows]


class GraphRunner:
    """Decodes rows through graphs.

    `forward` maps an InputBatch and what the stage begins with to hidden states [T, hidden_size], `logits` hidden
    states to logits; both launch the same kernels whatever the values are. So does the sampling operator where
    `samples` says so: then a graph goes on to the sampled tokens. A stage that `begins` takes the batch's token ids,
    others the hidden states that they are given. The longest sequence that a graph may meet is the table's
    max_model_len.
    """

    def __init__(
        self,
        forward: Callable[[InputBatch, Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
        table: RequestTable,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        begins: bool,
        samples: bool,
        capture: Capture,
    ) -> None:
        self._forward = forward
        self._logits = logits
        self._table = table
        self._capture = capture
        self.samples = samples
        self._sizes = graph_sizes(table.max_rows)
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._hidden = torch.empty(table.max_rows, hidden_size, dtype=dtype, device=table.device)
        # Rows that pad a batch take what is there: it must be numbers.
        self._given = None if begins else torch.zeros_like(self._hidden)
        self._token_ids = torch.empty(table.max_rows, dtype=torch.int64, device=table.device)

    def takes(self, rows: np.ndarray, query_lens: np.ndarray) -> bool:
        """Whether every row computes its last known token, and none computes more."""
        table = self._table
        return bool((query_lens == 1).all() and (table.num_known[rows] - table.num_computed[rows] == 1).all())

    def warm_up(self) -> None:
        """Capture the largest size."""
        for _ in range(2):
            self._run(_NO_ROWS, self._sizes[-1], samples=self.samples)

    def sample(self, rows: np.ndarray, given: Tensor | None = None) -> Tensor:
        """Decode rows and put the tokens that they sample into the table. Returns them, [num_rows]: the next step
        overwrites them. `given`: hidden states [num_rows, hidden_size] where the stage does not begin."""
        self._give(given)
        self._run(rows, self._size_for(rows), samples=True)
        self._table.num_known[rows] += 1
        return self._token_ids[: len(rows)]

    def decode(self, rows: np.ndarray, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Decode rows up to their hidden states. Returns those, which the next step overwrites, and the cells for their
        next tokens, [num_rows] each."""
        self._give(given)
        graph = self._run(rows, self._size_for(rows), samples=False)
        return self._hidden[: len(rows)], graph.inputs[-1][: len(rows)]

    def _give(self, given: Tensor | None) -> None:
        if self._given is not None and given is not None:
            self._given[: len(given)].copy_(given)

    def _size_for(self, rows: np.ndarray) -> int:
        return self._sizes[bisect_left(self._sizes, len(rows))]

    def _run(self, rows: np.ndarray, size: int, *, samples: bool) -> _Graph:
        padded = np.full(size, self._table.padding_row)
        padded[: len(rows)] = rows
        settings = self._table.sampling(padded) if samples else ()
        step, _ = StepArrays.build(padded, np.ones(size, dtype=np.int64), self._table)
        arrays = [*settings, *step]
        packed = self._table.upload.pack(arrays)
        graph = self._graphs.get((size, samples))
        if graph is None:
            graph = self._graphs[size, samples] = _Graph(packed, arrays, self._table.device)
        graph.buffer.copy_(packed, non_blocking=True)
        if graph.replay is not None:
            graph.replay()
            return graph
        if graph.has_run:
            graph.replay = self._capture(lambda: self._compute(graph.inputs, samples=samples))
            graph.replay()
        else:
            self._compute(graph.inputs, samples=samples)
            graph.has_run = True
        return graph

    def _compute(self, inputs: list[Tensor], *, samples: bool) -> None:
        """What a graph holds: from the inputs on the device to hidden states, or to tokens in the table."""
        table = self._table
        num_settings = len(inputs) - len(StepArrays._fields)
        batch = InputBatch.gather(inputs[num_settings:], table, max_query_len=1, max_seq_len=table.max_model_len)
        size = len(batch.token_ids)
        # A copy: the model overwrites what it is given.
        hidden = self._forward(batch, batch.token_ids if self._given is None else self._given[:size].clone())
        if not samples:
            self._hidden[:size].copy_(hidden)
            return
        token_ids = ops.sample(self._logits(hidden), *inputs[:num_settings])
        self._token_ids[:size].copy_(token_ids)
        table.write_tokens(batch.sample_cells, token_ids)


class _Graph:
    """One size: where its inputs lie, and how it is launched. What it gives lies in tensors that all sizes share."""

    def __init__(self, packed: Tensor, arrays: Sequence[np.ndarray], device: torch.device) -> None:
        """`packed` is what its inputs look like, made of `arrays`."""
        self.buffer = torch.empty_like(packed, device=device)
        self.inputs = unpack(self.buffer, arrays)
        self.has_run = False
        self.replay: Run | None = None


class CudaCapture:
    """Captures into graphs that share one pool of memory, so they must run one after another on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        # torch.cuda.graph() would wait for the device, collect garbage and empty the memory cache.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with warnings.catch_warnings(action="ignore"):  # That the graph is empty, or void.
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that graphs are captured on; they run on whatever stream is current. cuBLAS keeps 32 MiB for every
    stream that it ever sees, hence one for all."""
    return torch.cuda.Stream(device)
