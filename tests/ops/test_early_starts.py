"""Kernels that begin while the one ahead of them drains (programmatic dependent launch): each waits for it before it
reads what that may still write, and lets nobody past it before it has waited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from raylm import ops
from tests.ops.test_op_sample import settings

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_cuda_extension")]

_CYCLES = 400_000
"""About 200 us: longer than any operator here needs to start and end."""
_LATE_COPY = """
extern "C" __global__ void late_copy(const unsigned* from, unsigned* to, long long words, long long cycles) {
  asm volatile("griddepcontrol.launch_dependents;");  // the next kernel may begin
  const long long begin = clock64();
  while (clock64() - begin < cycles) {}
  for (long long i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}
"""

LateCopy = Callable[[Tensor, Tensor], None]
Run = Callable[[Tensor], list[Tensor]]


class _CurrentStream:
    """torch's current stream, for cupy."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


@pytest.fixture(scope="module")
def late_copy() -> LateCopy:
    """late_copy(source, target): a kernel that lets the next one begin at once, and copies at its very end."""
    cupy: Any = pytest.importorskip("cupy", minversion="14", reason="cupy compiles the kernel that writes late")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels start early from compute capability 9.0 on")
    kernel = cupy.RawKernel(_LATE_COPY, "late_copy", options=("-arch=sm_90",), backend="nvrtc")

    def copy(source: Tensor, target: Tensor) -> None:
        assert source.is_contiguous() and target.is_contiguous() and source.nbytes == target.nbytes
        with cupy.cuda.Stream.from_external(_CurrentStream()):
            arguments = (source.data_ptr(), target.data_ptr(), source.nbytes // 4)
            kernel((1,), (1024,), (*map(cupy.int64, arguments), cupy.int64(_CYCLES)))

    return copy


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)


# Each makes all that its operator takes besides x, so that nothing comes between the kernel ahead and the operator.


def _norm() -> Run:
    weight = _random(1024)
    return lambda x: [ops.rms_norm(x, weight, 1e-6)]


def _add_norm() -> Run:
    weight, residual = _random(1024), _random(40, 1024)
    return lambda x: [ops.add_rms_norm(x, residual, weight, 1e-6)]


def _linear(*shape: int) -> Run:
    weight = _random(*shape)
    return lambda x: [ops.linear(x, weight, frozen=True)]


def _gated(*shape: int) -> Run:
    weight = _random(*shape)
    return lambda x: [ops.gated_linear(x, weight, "silu", frozen=True)]


def _rope_store() -> Run:
    caches = [torch.zeros(2, 16, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    angles = torch.arange(64, device="cuda")[:, None] * torch.linspace(0.1, 1, 64, device="cuda")
    table, weight = torch.cat([angles.cos(), angles.sin()], dim=1), _random(128)
    positions = torch.arange(12, device="cuda") + 3

    def run(x: Tensor) -> list[Tensor]:
        q, k, v = x.view(12, 12, 128).split([8, 2, 2], dim=1)
        ops.rope_store(q, k, v, weight, weight, 1e-6, positions, table, *caches, positions, frozen=True)
        return [q, *caches]

    return run


def _attention(rows: int, *, frozen: bool = False) -> Run:
    cache, table = _random(8, 16, 2, 128), torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    starts = torch.tensor([0, rows // 2, rows], dtype=torch.int32, device="cuda")
    lens = torch.tensor([40, 64], dtype=torch.int32, device="cuda")
    arrivals = torch.zeros(ops.MAX_ARRIVALS, dtype=torch.int32, device="cuda")

    def run(x: Tensor) -> list[Tensor]:
        numbers = (rows // 2, 64, 0.1)
        tensors = (x.view(rows, 8, 128), cache, cache, table, starts, lens)
        return [ops.paged_attention(*tensors, *numbers, arrivals=arrivals, frozen=frozen)]

    return run


def _sample() -> Run:
    own = settings(8, device="cuda").values()
    return lambda x: [ops.sample(x, *own)]


def _logprobs() -> Run:
    token_ids = torch.arange(8, device="cuda")
    return lambda x: list(ops.token_logprobs(x, token_ids, 4))


CASES: dict[str, tuple[tuple[int, int], Callable[[], Run]]] = {
    "rms_norm": ((40, 1024), _norm),
    "add_rms_norm": ((40, 1024), _add_norm),
    "silu_mul": ((40, 1024), lambda: lambda x: [ops.silu_mul(x)]),
    "gelu_tanh_mul": ((40, 1024), lambda: lambda x: [ops.gelu_tanh_mul(x)]),
    "linear, few rows": ((3, 1024), lambda: _linear(3072, 1024)),
    "linear, tiles": ((40, 1024), lambda: _linear(3072, 1024)),
    "linear, split": ((40, 1024), lambda: _linear(1024, 1024)),
    "gated_linear, few rows": ((3, 1024), lambda: _gated(3072, 1024)),
    "gated_linear, tiles": ((40, 1024), lambda: _gated(3072, 1024)),
    "rope_store": ((12, 1536), _rope_store),
    "decode": ((2, 1024), lambda: _attention(2)),
    "decode, frozen": ((2, 1024), lambda: _attention(2, frozen=True)),
    "prefill": ((40, 1024), lambda: _attention(40)),
    "sample": ((8, 32_768), _sample),
    "token_logprobs": ((8, 32_768), _logprobs),
}


@pytest.mark.parametrize("case", CASES)
def test_waits_for_what_the_kernel_ahead_writes(case: str, late_copy: LateCopy) -> None:
    shape, make = CASES[case]
    ready = _random(*shape)
    expected = make()(ready.clone())
    run, late = make(), torch.full_like(ready, float("nan"))
    torch.cuda.synchronize()
    late_copy(ready, late)
    for found, right in zip(run(late), expected, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("case", CASES)
def test_lets_nobody_past_that_kernel(case: str, late_copy: LateCopy) -> None:
    """What a kernel writes is there for all that come after the next one."""
    shape, make = CASES[case]
    ready, x, run = _random(64, 64), _random(*shape), make()
    expected = ops.silu_mul(ready)
    run(x.clone())
    late = torch.full_like(ready, float("nan"))
    torch.cuda.synchronize()
    late_copy(ready, late)
    run(x)
    assert torch.equal(ops.silu_mul(late), expected)


def test_lengths_that_are_not_frozen(late_copy: LateCopy) -> None:
    cache, q = _random(8, 16, 2, 128), _random(2, 8, 128)
    table = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    starts = torch.arange(3, dtype=torch.int32, device="cuda")
    ready = torch.tensor([40, 64], dtype=torch.int32, device="cuda")

    def attend(lens: Tensor) -> Tensor:
        return ops.paged_attention(q, cache, cache, table, starts, lens, 1, 64, 0.1)

    expected, late = attend(ready), torch.ones_like(ready)
    torch.cuda.synchronize()
    late_copy(ready, late)
    assert torch.equal(attend(late), expected)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("rows", "shape"), [(3, (3072, 1024)), (40, (3072, 1024)), (40, (1024, 1024)), (3, (32_768, 1024))]
)
def test_weights_that_are_not_frozen(in_graph: bool, rows: int, shape: tuple[int, int], late_copy: LateCopy) -> None:
    x, ready = _random(rows, shape[1]), _random(*shape)
    expected = ops.linear(x, ready)
    late = torch.empty_like(ready)
    zeros = torch.zeros_like(ready)

    def run() -> Tensor:
        late.copy_(zeros)
        late_copy(ready, late)
        return ops.linear(x, late)

    assert torch.equal(run(), expected)
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for _ in range(3):
            graph.replay()
            assert torch.equal(out, expected)
