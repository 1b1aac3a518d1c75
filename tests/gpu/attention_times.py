"""What paged attention takes: decode as a share of the memory's bandwidth, prefill in TFLOP/s.

python -m tests.gpu.attention_times [BACKEND]    on a CUDA host; prints one JSON line a case, in all in half a minute

BACKEND is a value of runtime.attention; cases that it cannot run are left out.

bf16, cache blocks of 16 in random order; `codes` is a cache of 8-bit floats. Calls stand in a CUDA graph, a kernel of
no work behind each, whose own time is taken off, over caches that take turns, so that no call finds its own in the L2
cache. The bandwidth is that of a large element-wise kernel, measured before them, its reading and its writing counted.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.alibi import alibi_slopes
from raylm.layers.attention import AttentionMetadata, CacheScales, Scores
from raylm.layers.attention_backends import AttentionBackend, Setting, choose_backend
from tests.gpu.timing import Call, bandwidth, cold_copies, graph_us

BLOCK = 16


@dataclass(frozen=True)
class Case:
    """Sequences of `context` keys, of which each one's last `queries` are computed."""

    seqs: int
    context: int
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    window: int = 0
    alibi: bool = False
    codes: bool = False
    spread: bool = False
    """Contexts from a hundredth of `context` to twice as much, instead of one for all."""
    prefix: int = 0
    """Keys at the start that `sharers` sequences, each so many-th one of the batch, have in the same blocks."""
    sharers: int = 1

    def lengths(self) -> list[int]:
        if not self.spread:
            return [self.context] * self.seqs
        low, high = self.context // 100, 2 * self.context
        return [low + (high - low) * i // (self.seqs - 1) for i in range(self.seqs)]

    @property
    def bytes(self) -> int:
        """Of keys and values that have to be read."""
        seen = self.window + self.queries - 1 if self.window else 1 << 40
        keys = sum(min(length, seen) - self.prefix for length in self.lengths()) + self.groups * self.prefix
        return keys * self.kv_heads * self.head_size * self.pair_bytes

    @property
    def groups(self) -> int:
        return -(-self.seqs // self.sharers)

    @property
    def pair_bytes(self) -> int:
        """Of a key's element and a value's."""
        return 2 if self.codes else 4

    @property
    def flops(self) -> int:
        pairs = sum(self.queries * (length - self.queries) + self.queries**2 / 2 for length in self.lengths())
        return int(4 * pairs * self.heads * self.head_size)


DECODE = [
    Case(64, 4096),
    Case(64, 4096, codes=True),
    *(Case(64, 4096, head_size=size, codes=True) for size in (64, 80, 256)),
    Case(1, 32768, codes=True),
    Case(256, 512, codes=True),
    Case(64, 6400, spread=True, codes=True),
    *(Case(64, 4096, queries=queries, codes=True) for queries in (5, 16)),
    Case(64, 4096, heads=64, kv_heads=8, codes=True),
    Case(1, 32768),
    Case(256, 512),
    Case(64, 6400, spread=True),
    Case(32, 256),
    Case(1, 128),
    *(Case(64, 4096, queries=queries) for queries in (5, 8, 16)),
    *(Case(64, 4096, head_size=size) for size in (64, 80, 96, 192, 256)),
    Case(64, 4096, heads=9, kv_heads=3, head_size=64),
    Case(1, 32768, head_size=64),
    Case(64, 4096, window=1024),
    Case(64, 4096, kv_heads=1),
    Case(64, 4096, heads=64, kv_heads=8),
    Case(64, 4096, alibi=True),
    *(Case(64, 4096, prefix=2048, sharers=sharers) for sharers in (64, 32, 16, 4)),
    *(Case(64, 4096, prefix=3584, sharers=sharers, codes=codes) for sharers in (64, 16) for codes in (False, True)),
    Case(256, 1280, prefix=1024, sharers=256),
    Case(8, 8192, prefix=7680, sharers=8),
]
PREFILL = [
    *(Case(8, 4096, queries=4096, head_size=size) for size in (64, 80, 96, 128, 192, 256)),
    Case(1, 16384, queries=16384),
    Case(16, 1024, queries=1024),
    Case(1, 16384, queries=2048),
    Case(8, 4096, queries=4096, alibi=True),
    *(Case(8, 4096, queries=4096, head_size=size, codes=True) for size in (64, 128, 256)),
    Case(1, 16384, queries=2048, codes=True),
]


def attention_us(case: Case, backend: AttentionBackend) -> float:
    """Without the kernel between them, calls would begin before the call ahead has ended, as in no model."""
    nothing = torch.zeros(1, device="cuda")

    def spaced(call: Call) -> Call:
        def both() -> Tensor:
            call()
            return nothing.neg_()

        return both

    return graph_us([spaced(call) for call in calls_of(case, backend)]) - graph_us([nothing.neg_] * 64)


def calls_of(case: Case, backend: AttentionBackend) -> list[Call]:
    """The case over several caches, all of them together larger than the L2 cache."""
    blocks = [-(-length // BLOCK) for length in case.lengths()]
    shape = (sum(blocks), BLOCK, case.kv_heads, case.head_size)
    copies = cold_copies(case.pair_bytes * sum(blocks) * BLOCK * case.kv_heads * case.head_size)
    table = torch.zeros(case.seqs, max(blocks), dtype=torch.int32)
    order = torch.randperm(sum(blocks)).split(blocks)
    for row, ids in zip(table, order, strict=True):
        row[: len(ids)] = ids
    for row in range(case.groups, case.seqs):
        table[row, : case.prefix // BLOCK] = table[row % case.groups, : case.prefix // BLOCK]
    starts = torch.arange(case.seqs + 1, dtype=torch.int32) * case.queries
    lengths = torch.tensor(case.lengths(), dtype=torch.int32)
    q = torch.randn(case.seqs * case.queries, case.heads, case.head_size, dtype=torch.bfloat16, device="cuda")
    kind = ops.CODES if case.codes else torch.bfloat16
    table, starts, lengths = table.cuda(), starts.cuda(), lengths.cuda()
    prefixes = ops.shared_prefixes(table, starts, lengths, BLOCK) if case.prefix else None
    none = torch.empty(0, dtype=torch.int64)
    step = AttentionMetadata(starts, lengths, table, none, case.queries, max(case.lengths()), prefixes=prefixes)
    slopes = alibi_slopes(case.heads).cuda() if case.alibi else None
    scales = CacheScales(0.5, 2.0) if case.codes else CacheScales()
    scores = Scores(scale=case.head_size**-0.5, window=case.window, alibi_slopes=slopes, cache=scales)
    caches = [torch.randn(2, *shape, dtype=torch.bfloat16, device="cuda").to(kind) for _ in range(copies)]
    planned = backend.plan(step)
    return [lambda k=k, v=v: backend.attend(q, (k, v), planned, scores) for k, v in caches]


def backend_for(wanted: str, case: Case) -> AttentionBackend | None:
    device = torch.device("cuda")
    setting = Setting(device, torch.bfloat16, case.head_size, BLOCK, alibi=case.alibi, codes=case.codes)
    try:
        return choose_backend(wanted, setting)[0]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return None


def main(wanted: str) -> None:
    most = bandwidth()
    print(json.dumps({"bench": "bandwidth", "tb_per_s": round(most / 1e6, 3)}), flush=True)
    for case in [*DECODE, *PREFILL]:
        if (backend := backend_for(wanted, case)) is None:
            continue
        time = attention_us(case, backend)
        line = {"bench": "decode" if case in DECODE else "prefill", **asdict(case), "us": round(time, 2)}
        if case in DECODE:
            line["of_bandwidth"] = round(case.bytes / time / most, 3)
        else:
            line["tflops"] = round(case.flops / time / 1e6, 1)
        print(json.dumps({"backend": backend.name, **line}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["auto"])
