"""Steps of few tokens, as CUDA graphs: all that only decode, and those of short prompts and chunks beside them.

A step is hundreds of kernels, and where they are short the host takes longer to launch them than the GPU to run them:
nine milliseconds for 32 layers. A graph launches them all at once. One graph serves one shape: so many rows and tokens,
and at most so many tokens a row. Rows and tokens that are missing are the table's padding row, so kernels see nothing
special.

Graphs are made on demand: a shape runs eagerly when it first comes (which also loads its kernels) and is captured when
it comes again, in some 12 ms; so neither the start nor a first answer waits for shapes that may never come. Only the
largest are captured at the start, because all share one pool of memory and these take the most of it.
"""

from __future__ import annotations

import functools
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from raylm import ops
from raylm.worker.input_batch import DeviceArrays, InputBatch, StepArrays, StepRows
from raylm.worker.request_table import RequestTable
from raylm.worker.transfer import unpack

Run = Callable[[], None]
Capture = Callable[[Run], Run]
"""Makes of a function that launches work one that launches the same work again."""

_LADDER = ((256, 8), (512, 16), (1024, 32), (4096, 64))
"""Over 4 rows: up to so many, sizes go up in steps of so many."""
ROW_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
"""Padded rows of steps in which some compute several tokens."""
_TOKEN_SIZES = (*(size for size in ROW_SIZES if size < 256), *range(256, 1024 + 1, 64))
"""Their padded tokens: of padded rows, too. A step over the last one keeps the GPU busy for longer than the host takes
to launch it."""
_MOST_VERIFIED = 256
"""Tokens of a step that verifies drafts up to which its graph samples. Logits of more would fill the graphs' memory."""
MOST_WIDE_GRAPHS = 96
"""Of steps in which rows compute several tokens, and as many of drafts that are made on the device."""
MOST_SHARING_GRAPHS = 32
"""Of steps whose rows share prefixes."""
_NO_ROWS = np.empty(0, dtype=np.int64)
_MAX_DECODE_QUERIES = 16
"""Tokens of one row that attention takes in its way for decodes."""


def graph_sizes(max_rows: int) -> list[int]:
    """The padded numbers of rows: 1, 2, 4, 8, 16, 24 ... and max_rows itself."""
    sizes = [1, 2, 4]
    for (last, step), (before, _) in zip(_LADDER, ((0, 0), *_LADDER), strict=False):
        sizes += range(before + step, last + 1, step)
    sizes = [size for size in sizes if size < max_rows]
    return [*sizes, max_rows]


class Shape(NamedTuple):
    """What a graph is made for. `samples`: it goes on to sampled tokens, accepted into the table; `shares`: attention
    reads once what its rows share."""

    num_rows: int
    num_tokens: int
    max_query_len: int
    samples: bool
    shares: bool = False


class Computed(NamedTuple):
    """What a graph gave, on the device: the next graph that runs overwrites it. T tokens, S rows, without padding."""

    hidden: Tensor
    """[T, hidden_size], unless the graph has sampled."""
    positions: Tensor
    """int64 [T]."""
    token_ids: Tensor
    """int64 [T], where the graph has sampled, else empty."""
    counts: Tensor
    """int64 [S], where it has sampled, else empty: how many of its tokens each row keeps."""
    arrays: DeviceArrays

    def without_padding(self, num_tokens: int, num_rows: int) -> Computed:
        """The first so many tokens and rows."""
        token_rows, offsets, rows, query_start = self.arrays
        return Computed(
            self.hidden[:num_tokens],
            self.positions[:num_tokens],
            self.token_ids[:num_tokens],
            self.counts[:num_rows],
            DeviceArrays(token_rows[:num_tokens], offsets[:num_tokens], rows[:num_rows], query_start[: num_rows + 1]),
        )


class Follow(Protocol):
    """What follows a step that the table has accepted; DraftRunner.absorb."""

    def __call__(self, arrays: DeviceArrays, positions: Tensor, *, max_query_len: int, max_seq_len: int) -> None: ...


class GraphRunner:
    """Runs steps through graphs.

    `forward` maps an InputBatch and what the stage begins with to hidden states [T, hidden_size]; it launches the same
    kernels whatever the values are. `draw` samples token ids from hidden states, the rows' settings and the tokens'
    positions. Where `samples` says so, it too launches the same kernels, and graphs include it. A stage that `begins`
    takes the batch's token ids, others the hidden states that they are given. The longest sequence that a graph may
    meet is the table's max_model_len.
    """

    def __init__(
        self,
        forward: Callable[[InputBatch, Tensor], Tensor],
        draw: Callable[[Tensor, Sequence[Tensor], Tensor], Tensor],
        table: RequestTable,
        settings: Callable[[np.ndarray], Sequence[np.ndarray]],
        *,
        hidden_size: int,
        dtype: torch.dtype,
        begins: bool,
        samples: bool,
        capture: Capture,
        max_tokens: int,
        num_drafts: int = 0,
        follow: Follow | None = None,
    ) -> None:
        """`settings` gives how rows sample, for ops.sample. `max_tokens`: those of the largest step. `num_drafts`: what
        a row verifies at most. `follow` is launched behind every step that has gone on to its tokens, and must launch
        the same kernels each time."""
        self._forward = forward
        self._draw = draw
        self._table = table
        self._settings = settings
        self._capture = capture
        self._follow = follow
        self._samples = samples
        most = min(max_tokens, _TOKEN_SIZES[-1])
        verified = min(table.max_rows * (1 + num_drafts), most, _MOST_VERIFIED)
        self._most_sampled = max(table.max_rows, verified)
        self._token_sizes = sorted({*(size for size in _TOKEN_SIZES if size < most), verified, most})
        self._sizes = graph_sizes(table.max_rows)
        self._row_sizes = [size for size in ROW_SIZES if size < table.max_rows] + [table.max_rows]
        self._graphs: dict[Shape, _Graph] = {}
        """Those that are captured."""
        self._seen: set[Shape] = set()
        """Those that have run."""
        device = table.device
        self._hidden = torch.empty(max(most, table.max_rows), hidden_size, dtype=dtype, device=device)
        # Rows that pad a batch take what is there: it must be numbers.
        self._given = None if begins else torch.zeros_like(self._hidden)

    def takes(self, step: StepRows) -> bool:
        """Whether there is a graph so large."""
        return not step.is_wide or self._padded(step) <= self._token_sizes[-1]

    def samples(self, step: StepRows) -> bool:
        """Whether the graph of a step that it takes can go on to tokens: all rows sample, and not too many tokens."""
        few = not step.is_wide or _at_least(self._token_sizes, self._padded(step)) <= self._most_sampled
        return self._samples and few and not step.is_chunk.any()

    def warm_up(self) -> None:
        """Capture the largest sizes: of all steps, of those that verify drafts, and of decodes."""
        nothing = StepRows(_NO_ROWS, _NO_ROWS, _NO_ROWS, _NO_ROWS.astype(np.bool_), _NO_ROWS)
        rows, most = self._table.max_rows, self._token_sizes[-1]
        # The largest graph of decodes shares prefixes, because their partial results take memory too.
        shares = bool(self._table.shares_in) and rows <= ops.MOST_PREFIX_SEQS
        of_many = [Shape(rows, most, most, samples=False)] if most > self._most_sampled else []
        of_drafts = [Shape(rows, self._most_sampled, 1, self._samples)] if self._most_sampled > rows else []
        for shape in (*of_many, *of_drafts, Shape(rows, rows, 1, self._samples, shares)):
            for _ in range(2):
                self._run(nothing, shape)

    def run(self, step: StepRows, given: Tensor | None = None, *, samples: bool) -> Computed:
        """Run a step that `takes` has taken; with `samples`, where the method of this name allows it, up to the tokens,
        which are in the table then. `given`: hidden states [T, hidden_size] where the stage does not begin."""
        if self._given is not None and given is not None:
            self._given[: len(given)].copy_(given)
        computed = self._run(step, self._shape_for(step, samples=samples))
        return computed.without_padding(int(step.query_lens.sum()), len(step.rows))

    def _shape_for(self, step: StepRows, *, samples: bool) -> Shape:
        if not step.is_wide:
            size = _at_least(self._sizes, len(step.rows))
            return Shape(size, size, 1, samples, self._table.share_prefixes(step.rows))
        num_tokens = _at_least(self._token_sizes, self._padded(step))
        longest = 1 << (int(step.query_lens.max()) - 1).bit_length()
        # Past decodes attention does not care how many there may be.
        longest = longest if longest <= _MAX_DECODE_QUERIES else num_tokens
        return Shape(self._wide_rows(step), num_tokens, longest, samples)

    def _padded(self, step: StepRows) -> int:
        """The tokens of a wide step, and of the rows that pad it."""
        return int(step.query_lens.sum()) + self._wide_rows(step) - len(step.rows)

    def _wide_rows(self, step: StepRows) -> int:
        return _at_least(self._row_sizes, len(step.rows))

    def _run(self, step: StepRows, shape: Shape) -> Computed:
        arrays = _padded_arrays(step, shape, self._table.padding_row)
        settings = self._settings(arrays.token_rows) if shape.samples else ()
        packed = self._table.upload.pack([*arrays, *settings])
        graph = self._graphs.pop(shape, None) or _Graph(packed, [*arrays, *settings], self._table.device)
        graph.buffer.copy_(packed, non_blocking=True)
        if graph.replay is None and shape in self._seen:
            self._make_room(shape)
            graph.replay = self._capture(lambda: self._compute(graph, shape))
        if graph.replay is not None:
            self._graphs[shape] = graph  # The last used one is the last.
            graph.replay()
        else:
            self._seen.add(shape)
            self._compute(graph, shape)
        assert graph.computed is not None, "it has run"
        return graph.computed

    def _make_room(self, shape: Shape) -> None:
        """All shapes of plain decodes are kept. There are many of wide steps, and steps that share prefixes have few
        shapes at a time: of either kind only those used last are."""
        wide = [known for known in self._graphs if known.max_query_len > 1]
        if shape.max_query_len > 1 and len(wide) == MOST_WIDE_GRAPHS:
            del self._graphs[wide[0]]
        sharing = [known for known in self._graphs if known.shares]
        if shape.shares and len(sharing) == MOST_SHARING_GRAPHS:
            del self._graphs[sharing[0]]

    def _compute(self, graph: _Graph, shape: Shape) -> None:
        """What a graph holds: from the inputs on the device to hidden states, or to tokens in the table.

        Nothing is copied out of it but hidden states: what else it gives is small and stays where it
        was made. (A slice of `hidden` here would keep all of it in memory, a shape each.)
        """
        table, arrays, size = self._table, graph.arrays, shape.num_tokens
        limits = {"max_query_len": shape.max_query_len, "max_seq_len": table.max_model_len}
        batch = InputBatch.gather(arrays, table, **limits, shares=shape.shares)
        # A copy: the model overwrites what it is given.
        hidden = self._forward(batch, batch.token_ids if self._given is None else self._given[:size].clone())
        if not shape.samples:
            none = batch.positions[:0]
            graph.computed = Computed(self._hidden[:size].copy_(hidden), batch.positions, none, none, arrays)
            return
        token_ids = self._draw(hidden, graph.settings, batch.following)
        counts = table.accept(arrays.rows, arrays.query_start, arrays.query_start, token_ids)
        graph.computed = Computed(self._hidden[:0], batch.positions, token_ids, counts, arrays)
        if self._follow is not None:
            self._follow(arrays, batch.positions, **limits)


def _at_least(sizes: Sequence[int], count: int) -> int:
    """The least of some rising sizes that is not under count."""
    return sizes[bisect_left(sizes, count)]


def _padded_arrays(step: StepRows, shape: Shape, padding_row: int) -> StepArrays:
    """A step filled up to a shape: by rows of one token, then by tokens that are nobody's."""
    missing = shape.num_rows - len(step.rows)
    arrays = StepArrays.build(
        np.concatenate([step.rows, np.full(missing, padding_row)]),
        np.concatenate([step.query_lens, np.ones(missing, dtype=np.int64)]),
    )
    surplus = shape.num_tokens - len(arrays.token_rows)
    if not surplus:
        return arrays
    return arrays._replace(
        token_rows=np.concatenate([arrays.token_rows, np.full(surplus, padding_row)]),
        offsets=np.concatenate([arrays.offsets, np.zeros(surplus, dtype=np.int64)]),
    )


class _Graph:
    """One shape: where its inputs lie, how it is launched, and where it leaves what it gives: hidden states in a tensor
    that all shapes share, the rest in memory that an older shape's graph may write to when it runs."""

    def __init__(self, packed: Tensor, arrays: Sequence[np.ndarray], device: torch.device) -> None:
        """`packed` is what its inputs look like, made of `arrays`."""
        self.buffer = torch.empty_like(packed, device=device)
        inputs = unpack(self.buffer, arrays)
        count = len(StepArrays._fields)
        self.arrays, self.settings = DeviceArrays(*inputs[:count]), inputs[count:]
        self.replay: Run | None = None
        self.computed: Computed | None = None
        """None until it has run."""


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
