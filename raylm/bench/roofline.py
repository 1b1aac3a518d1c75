"""What a step has to move and compute, kind of kernel by kind, and what the device could do in the time it took.

The roofline model of Williams, Waterman and Patterson (2009): work that moves B bytes and takes F operations needs at
least max(B / bandwidth, F / peak) seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raylm import ops
from raylm.bench.report import KindResult
from raylm.layers.linear import MIN_ROWS_TO_ADD
from raylm.models.arch import ArchConfig, ExpertsSpec, MLPSpec
from raylm.parallel.collectives import LEAST_ROWS_TO_SPLIT

_TOGETHER, _HEAD, _SUMS = "layers in one kernel", "head", "sums over ranks"
_KINDS = (
    (_TOGETHER, ("few_layers",)),
    ("products", ("linear_kernel", "gemm", "gemv", "nvjet", "cutlass", "splitkreduce", "cublas", "patched_decode")),
    ("attention", ("attention_kernel", "prefill_kernel", "prefill_hopper", "flash")),
    (_SUMS, ("all_reduce", "peer_", "nccl")),
    ("norms", ("norm_kernel", "norm_any")),
    ("rotary and cache", ("rope_store", "rotary", "store_kv")),
    ("activation", ("gated_kernel", "gated_any", "gatedrows")),
    ("rounding to 8 bits", ("scaled_rows", "rounded_rows")),
    ("sampling", ("sample_kernel", "penalize", "logits_kernel", "logprobs", "row_strips")),
)
"""By parts of kernels' names in small letters; the first that fits."""
OTHER = "inputs, copies, the rest"
_BESIDE = "Memcpy PtoP"
"""Copies to another GPU by copy engines, which run beside kernels."""

_READ_BYTES = 1 << 31
_SIDE = 8192
_TRIES = 5


class Need(NamedTuple):
    """What work has to move and compute."""

    bytes: float
    flops: float


class Peaks(NamedTuple):
    """What the device did when it did nothing else: bytes/s read, and operations/s of a product in the model's type."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step: `tokens` computed for `rows` sequences, `logit_rows` of them sampled. `pairs`: query and key together
    that one layer's attention sees, `keys`: keys that it reads, both of layers that see everything."""

    tokens: float
    rows: float
    logit_rows: float
    pairs: float
    keys: float


def decode_shape(rows: int, context: float) -> StepShape:
    """Each of `rows` sequences computes a token that sees `context`."""
    return StepShape(rows, rows, rows, pairs=rows * context, keys=rows * context)


def prefill_shape(prompts: float, prompt_len: int) -> StepShape:
    """`prompts` whole prompts of `prompt_len` tokens; may be a fraction, where one takes several steps."""
    tokens = prompts * prompt_len
    return StepShape(tokens, prompts, prompts, pairs=tokens * (prompt_len + 1) / 2, keys=tokens)


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    name = kernel.lower()
    return next((kind for kind, parts in _KINDS if any(part in name for part in parts)), OTHER)


class WeightItems(NamedTuple):
    """Bytes of a weight within the layers, where these are others than the model's dtype has."""

    linear: float | None = None
    expert: float | None = None


AS_ACTIVATIONS = WeightItems()


def needs(
    arch: ArchConfig,
    step: StepShape,
    *,
    item: int,
    weight_items: WeightItems = AS_ACTIVATIONS,
    cache_item: int | None = None,
    ranks: int = 1,
) -> dict[str, Need]:
    """What a step needs at least, by kind, on one device. `item`: bytes of a weight, an activation and a cached number;
    `cache_item`: of a cached number, where that is another. `ranks` devices share heads, experts' and MLPs' widths and
    the vocabulary; what their sums have to move is not counted.

    Products read their weights and inputs and write their outputs; attention reads queries and keys and values of its
    context and writes its outputs; the rest reads and writes activations. What stays in the second-level cache between
    two kernels is counted like the rest: with few rows it is next to nothing.
    """
    tokens, hidden, layers = step.tokens, arch.hidden_size, arch.num_layers
    q, kv = arch.num_heads // ranks * arch.head_dim, max(arch.num_kv_heads // ranks, 1) * arch.head_dim
    products = layers * [_Product(hidden, q + 2 * kv, tokens), _Product(q, hidden, tokens)]
    linear_item, expert_item, cache_item = weight_items.linear or item, weight_items.expert or item, cache_item or item
    products += [product for layer in arch.layers for product in _mlp_products(layer.mlp, hidden, tokens, ranks)]
    weights = sum(
        (expert_item if product.of_experts else linear_item) * product.copies * product.k * product.n
        for product in products
    )
    flops = sum(2 * product.rows * product.k * product.n for product in products)
    vocab = arch.vocab_size // ranks
    head_weights = hidden * vocab
    moved = sum(product.rows * (product.k + product.n) for product in products)
    # What the activation reads and writes, which stands between the products of an MLP.
    inner = sum(product.rows * product.n for product in products[2 * layers :: 2])
    inner += sum(product.rows * product.k for product in products[2 * layers + 1 :: 2])
    seen = [min(1.0, layer.window * step.tokens / step.pairs) if layer.window else 1.0 for layer in arch.layers]
    # A norm reads what came and the residual stream and writes both, or its product has added them already. (What comes
    # in halves counts once.)
    streams = 2 if tokens >= MIN_ROWS_TO_ADD else 4
    cached = cache_item * 2 * kv * step.keys * sum(seen)
    attention = Need(cached + item * layers * 2 * q * tokens, 4 * q * step.pairs * sum(seen))
    logits = step.logit_rows
    head = Need(item * (head_weights + logits * (hidden + vocab)), 2 * logits * head_weights)
    return {
        "products": Need(weights + item * moved + head.bytes, flops + head.flops),
        "attention": attention,
        # A kernel that runs all layers does their products and attention: the head is the only product beside it.
        _TOGETHER: Need(weights + attention.bytes, flops + attention.flops),
        _HEAD: head,
        "norms": Need(item * streams * hidden * tokens * 2 * layers, 0.0),
        "rotary and cache": Need(item * 2 * (q + 2 * kv) * tokens * layers, 0.0),
        "activation": Need(item * inner, 0.0),
        "sampling": Need(item * arch.vocab_size * logits / (ranks if logits >= LEAST_ROWS_TO_SPLIT else 1), 0.0),
    }


class _Product(NamedTuple):
    """[rows, k] times a weight [n, k], of which `copies` are read."""

    k: int
    n: int
    rows: float
    copies: float = 1.0
    of_experts: bool = False


def _mlp_products(mlp: MLPSpec | ExpertsSpec, hidden: int, tokens: float, ranks: int) -> list[_Product]:
    """In pairs: what widens, what narrows again. Experts are chosen as if at random."""
    size = mlp.size // ranks
    if isinstance(mlp, MLPSpec):
        return [_Product(hidden, (1 + mlp.gated) * size, tokens), _Product(size, hidden, tokens)]
    touched = mlp.num_experts * (1 - (1 - mlp.per_token / mlp.num_experts) ** tokens)
    rows = tokens * mlp.per_token
    sizes = (hidden, 2 * size), (size, hidden)
    pair = [_Product(k, n, rows, touched, of_experts=True) for k, n in sizes]
    return pair if mlp.shared is None else pair + _mlp_products(mlp.shared, hidden, tokens, ranks)


def measure_peaks(dtype: torch.dtype, *, scaled: bool = False) -> Peaks:
    """On the current CUDA device: the fastest of a sum of 2 GiB and a product of one row with them, and a square
    product of 8,192, of 8-bit numbers where they are `scaled`."""
    weights = torch.zeros(_READ_BYTES // dtype.itemsize // _SIDE, _SIDE, dtype=dtype, device="cuda")
    row = torch.zeros(1, _SIDE, dtype=dtype, device="cuda")
    numbers = weights.view(torch.int32)
    read = min(_seconds(lambda: ops.linear(row, weights, frozen=True)), _seconds(lambda: numbers.max()))
    # Random numbers: a product of zeros takes less power, and so runs faster than a model ever does.
    square = torch.randn(_SIDE, _SIDE, device="cuda").to(dtype)
    codes = ops.scale_rows(square) if scaled else None
    product = _seconds(
        lambda: square @ square if codes is None else ops.scaled_linear(codes, codes.codes, codes.scales, dtype=dtype)
    )
    return Peaks(_READ_BYTES / read, 2 * _SIDE**3 / product)


def kind_results(
    own_us: dict[str, tuple[float, float]],
    needed: dict[str, Need],
    peaks: Peaks,
    *,
    model: str,
    batch: int,
    step_us: float,
    layers: int,
) -> list[KindResult]:
    """`own_us`: by kind, microseconds a step and kernels a step. The last result is the whole step, pauses included.
    Activations of fewer kernels than `layers` are so far done by their products, and need nothing of their own; norms
    of fewer than two a layer by the sums over ranks, which then need what they do."""
    for kind, most in (("activation", layers), ("norms", 2 * layers)):
        if kind in needed and kind in own_us:
            whole, share = needed[kind], min(1.0, own_us[kind][1] / most)
            needed = needed | {kind: Need(whole.bytes * share, whole.flops * share)}
            if kind == "norms" and _SUMS in own_us:
                needed = needed | {_SUMS: Need(whole.bytes * (1 - share), 0.0)}
    if _TOGETHER in own_us:
        needed = needed | {"products": needed[_HEAD]}
    found = [
        _result(kind, us, count, needed.get(kind, Need(0, 0)), peaks, model=model, batch=batch)
        for kind, (us, count) in sorted(own_us.items(), key=lambda item: -item[1][0])
    ]
    ran = [needed[kind] for kind in own_us if kind in needed]
    total = Need(sum(need.bytes for need in ran), sum(need.flops for need in ran))
    kernels = sum(count for _, count in own_us.values())
    return [*found, _result("the step", step_us, kernels, total, peaks, model=model, batch=batch)]


def _result(kind: str, us: float, kernels: float, need: Need, peaks: Peaks, *, model: str, batch: int) -> KindResult:
    memory_us, compute_us = 1e6 * need.bytes / peaks.bytes_per_s, 1e6 * need.flops / peaks.flops_per_s
    return KindResult(
        bench="roofline",
        model=model,
        batch=batch,
        kind=kind,
        us=us,
        kernels=kernels,
        mb=need.bytes / 1e6,
        gflop=need.flops / 1e9,
        roofline_share=max(memory_us, compute_us) / us if us else 0.0,
        memory_idle_us=max(us - memory_us, 0.0),
    )


def _seconds(call: Callable[[], object]) -> float:
    call()
    return statistics.median(_timed(call) for _ in range(_TRIES))


def _timed(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(4):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 4000


def own_us(spans: Sequence[tuple[str, float, float]]) -> Iterator[tuple[str, float]]:
    """The name and the microseconds of each of (name, start, length), in the order of time. A kernel that is started
    early waits within its time for the one before: what counts is from that one's end to its own. Copies beside kernels
    do not count."""
    end = 0.0
    for name, start, length in spans:
        if name.startswith(_BESIDE):
            continue
        yield name, max(start + length - max(start, end), 0.0)
        end = max(end, start + length)


def kinds_us(spans: Sequence[tuple[str, float, float]], steps: int) -> dict[str, tuple[float, float]]:
    """Microseconds and kernels a step by kind."""
    found: dict[str, tuple[float, float]] = {}
    for name, own in own_us(spans):
        us, count = found.get(kind := kind_of(name), (0.0, 0.0))
        found[kind] = us + own / steps, count + 1 / steps
    return found
