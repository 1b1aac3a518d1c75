"""Which attention backend is chosen and why, and what FlashAttention's function is called with."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.alibi import alibi_slopes
from raylm.layers.attention import AttentionMetadata, KVCache, Scores
from raylm.layers.attention_backends import FLASH_PACKAGES, INVARIANT, RAYLM, AttentionBackend, Setting, choose_backend
from raylm.ops import extension, fallback

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
USUAL = Setting(CUDA, torch.bfloat16, head_dim=64, block_size=16)
NOT_INSTALLED = extension.ExtensionStatus(None)


def kernels_for(*devices: str) -> extension.ExtensionStatus:
    return extension.ExtensionStatus(Path("kernels.so"), ops={device: ("paged_attention",) for device in devices})


def install(monkeypatch: pytest.MonkeyPatch, status: extension.ExtensionStatus, **modules: ModuleType | None) -> None:
    """A process with this extension and, of FlashAttention's packages, only `modules` (with __ for a dot)."""
    monkeypatch.setattr(extension, "load", lambda: status)
    for name in ("vllm", *FLASH_PACKAGES):
        monkeypatch.setitem(sys.modules, name, None)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)


def flash_module(varlen: object = None, *, versions: tuple[int, ...] = (2, 3)) -> ModuleType:
    module = ModuleType("flash")
    module.flash_attn_varlen_func = varlen or Varlen()
    module.is_fa_version_supported = lambda version: version in versions
    return module


class Varlen:
    """FlashAttention's function, computed by our reference; it holds its arguments to what the real one wants."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, int]] = []
        self.versions: list[int] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: None = None,
        seqused_k: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        fa_version: int = 2,
    ) -> torch.Tensor:
        num_seqs = len(seqused_k)
        assert q.shape[1:] == (4, 64) and k.shape == v.shape and k.shape[1:] == (16, 2, 64)
        assert cu_seqlens_k is None and cu_seqlens_q.shape == (num_seqs + 1,)
        assert block_table.shape[0] == num_seqs and block_table.shape[1] * 16 >= max_seqlen_k
        for lengths in (cu_seqlens_q, seqused_k, block_table):
            assert lengths.dtype == torch.int32 and lengths.stride(-1) == 1
        assert cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == q.shape[0]
        assert cu_seqlens_q.diff().max() == max_seqlen_q and seqused_k.max() == max_seqlen_k
        assert alibi_slopes is None or (fa_version == 2 and alibi_slopes.shape == q.shape[1:2])
        assert causal and window_size[1] == (-1 if window_size[0] == -1 else 0)
        self.windows.append(window_size)
        self.versions.append(fa_version)
        lengths = (cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k)
        settings = (softmax_scale, window_size[0] + 1, softcap, alibi_slopes)
        return fallback.paged_attention(q, k, v, block_table, *lengths, *settings)


LENGTHS = pytest.mark.parametrize("lengths", [[(5, 5), (1, 40), (7, 29)], [(1, 1), (1, 33)]], ids=["mixed", "decode"])


def step_of(lengths: list[tuple[int, int]]) -> AttentionMetadata:
    """Sequences of (queries, keys); three blocks of 16 each."""
    query_lens, seq_lens = (torch.tensor(column, dtype=torch.int32) for column in zip(*lengths, strict=True))
    return AttentionMetadata(
        query_start=torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0, dtype=torch.int32)]),
        seq_lens=seq_lens,
        block_table=torch.randperm(10, dtype=torch.int32)[: 3 * len(lengths)].view(-1, 3),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
    )


def some_heads(step: AttentionMetadata) -> tuple[torch.Tensor, KVCache]:
    """Queries, a view of wider rows, and a cache."""
    fused = torch.randn(int(step.query_start[-1]), 8, 64)
    return fused[:, :4], (torch.randn(10, 16, 2, 64), torch.randn(10, 16, 2, 64))


def expected(q: torch.Tensor, cache: KVCache, step: AttentionMetadata, scores: Scores) -> torch.Tensor:
    """What the operator gives."""
    lengths = (step.query_start, step.seq_lens, step.max_query_len, step.max_seq_len)
    settings = (scores.scale, scores.window, scores.soft_cap, scores.alibi_slopes)
    return ops.paged_attention(q, *cache, step.block_table, *lengths, *settings, sinks=scores.sinks)


@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("alibi", [False, True])
@LENGTHS
def test_flash_attention_is_called_with_its_own_arguments(
    lengths: list[tuple[int, int]], alibi: bool, soft_cap: float, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    varlen = Varlen()
    install(monkeypatch, NOT_INSTALLED, vllm_flash_attn=flash_module(varlen))
    backend, _ = choose_backend("flash_attn", dataclasses.replace(USUAL, alibi=alibi))
    step = step_of(lengths)
    scores = Scores(scale=0.2, window=window, soft_cap=soft_cap, alibi_slopes=alibi_slopes(4) if alibi else None)
    q, cache = some_heads(step)
    planned = backend.plan(step)
    torch.testing.assert_close(backend.attend(q, cache, planned, scores), expected(q, cache, step, scores))
    assert varlen.windows == [(window - 1, 0) if window else (-1, -1)]
    assert varlen.versions == [2 if alibi else 3]


def test_flash_attention_2_where_3_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, NOT_INSTALLED, vllm_flash_attn=flash_module(versions=(2,)))
    backend, _ = choose_backend("flash_attn", USUAL)
    assert backend.attend.args[1:] == (2,)
    install(monkeypatch, NOT_INSTALLED, vllm_flash_attn=flash_module(versions=(4,)))
    with pytest.raises(ConfigError, match=r"has no kernels for this GPU \(FlashAttention 3 or 2\)"):
        choose_backend("flash_attn", USUAL)


def test_auto_takes_the_first_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(setting: Setting) -> tuple[str, bool, str]:
        backend, reason = choose_backend("auto", setting)
        return backend.name, backend.supports_graphs, reason

    on_cpu = Setting(CPU, torch.float32, head_dim=64, block_size=16)
    install(monkeypatch, kernels_for("cpu", "cuda"), vllm_flash_attn=flash_module())
    assert chosen(USUAL) == ("raylm", True, "the compiled extension has its kernel for cuda")
    assert chosen(on_cpu) == ("raylm", True, "the compiled extension has its kernel for cpu")
    assert chosen(dataclasses.replace(USUAL, codes=True))[0] == "raylm"
    assert chosen(dataclasses.replace(on_cpu, codes=True)) == (
        "torch",
        False,
        "not raylm: its kernels for CPUs do not read a cache of fp8 (cache.dtype); "
        "not flash_attn: it runs on CUDA only and the device is cpu",
    )
    install(monkeypatch, kernels_for("cpu"), vllm__vllm_flash_attn=flash_module(), vllm=ModuleType("vllm"))
    name, graphs, reason = chosen(USUAL)
    assert (name, graphs) == ("flash_attn", False)
    assert "kernels.so has no paged_attention for cuda" in reason and extension.BUILD_COMMAND in reason
    install(monkeypatch, NOT_INSTALLED, vllm_flash_attn=flash_module())
    assert chosen(on_cpu)[:2] == ("torch", False)
    install(monkeypatch, NOT_INSTALLED)
    name, graphs, reason = chosen(USUAL)
    assert (name, graphs) == ("torch", False)
    assert "not flash_attn: neither vllm_flash_attn nor vllm.vllm_flash_attn can be imported" in reason


def test_deterministic_takes_one_kernel_for_all_queries_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = dataclasses.replace(USUAL, deterministic=True)
    names = ("paged_attention", "invariant_attention")
    install(monkeypatch, extension.ExtensionStatus(Path("kernels.so"), ops={"cuda": names}))
    assert choose_backend("auto", wanted) == (INVARIANT, "runtime.deterministic: one kernel for all queries")
    install(monkeypatch, kernels_for("cuda"), vllm_flash_attn=flash_module())
    with pytest.raises(ConfigError, match="runtime.deterministic needs raylm's own .* has no invariant_attention for"):
        choose_backend("auto", wanted)
    install(monkeypatch, NOT_INSTALLED, vllm_flash_attn=flash_module())
    with pytest.raises(ConfigError, match="needs raylm's own attention, but the compiled extension is not installed"):
        choose_backend("raylm", wanted)


def plain_varlen(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, block_table, fa_version):
    """One without biases."""


def old_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table=None):
    """The signature of releases up to 2.6."""


@pytest.mark.parametrize(
    ("wanted", "changes", "modules", "problem"),
    [
        ("flash_attn", {}, {}, "neither vllm_flash_attn nor vllm.vllm_flash_attn can be imported"),
        ("flash_attn", {"device": CPU}, {}, "it runs on CUDA only and the device is cpu"),
        ("flash_attn", {"dtype": torch.float32}, {}, "the dtype is float32; allowed: bfloat16, float16"),
        ("flash_attn", {"head_dim": 80}, {}, "the head size is 80; allowed: multiples of 32 up to 256"),
        ("flash_attn", {"head_dim": 288}, {}, "the head size is 288; allowed: multiples of 32 up to 256"),
        ("flash_attn", {"sinks": True}, {}, "it has no attention sinks, which this model's heads have"),
        ("flash_attn", {"block_size": 8}, {}, "cache.block_size is 8; allowed: multiples of 16"),
        (
            "flash_attn",
            {},
            {"vllm_flash_attn": flash_module(old_varlen)},
            "vllm_flash_attn is too old: it has no flash_attn_varlen_func that takes seqused_k and fa_version",
        ),
        (
            "flash_attn",
            {"alibi": True},
            {"vllm_flash_attn": flash_module(plain_varlen)},
            "vllm_flash_attn cannot run this model's linear biases: its flash_attn_varlen_func takes no alibi_slopes",
        ),
        (
            "flash_attn",
            {"alibi": True},
            {"vllm_flash_attn": flash_module(versions=(3,))},
            "vllm_flash_attn has no kernels for linear biases on this GPU (FlashAttention 2)",
        ),
        ("flash_attn", {"codes": True}, {}, "it does not read a cache of fp8 (cache.dtype) here"),
        ("raylm", {}, {}, "the compiled extension is not installed; to build it, in raylm's repository: `make ext`"),
    ],
)
def test_a_backend_that_cannot_work_is_refused(
    wanted: str,
    changes: dict[str, object],
    modules: dict[str, ModuleType],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, NOT_INSTALLED, **modules)
    fields = {name: getattr(USUAL, name) for name in Setting.__slots__}
    with pytest.raises(ConfigError) as caught:
        choose_backend(wanted, Setting(**{**fields, **changes}))
    assert str(caught.value) == f"runtime.attention {wanted!r} was asked for, but {problem}"


def test_an_old_package_does_not_hide_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = flash_module(old_varlen), flash_module()
    install(monkeypatch, NOT_INSTALLED, vllm_flash_attn=old, vllm=ModuleType("vllm"), vllm__vllm_flash_attn=new)
    backend, reason = choose_backend("flash_attn", USUAL)
    assert backend.attend.args == (new.flash_attn_varlen_func, 3)
    assert reason == "runtime.attention is flash_attn"


def test_torch_runs_on_anything() -> None:
    backend, _ = choose_backend("torch", Setting(CPU, torch.float32, head_dim=3, block_size=5))
    assert (backend.name, backend.supports_graphs) == ("torch", False)


def torch_backend() -> AttentionBackend[Any]:
    return choose_backend("torch", Setting(CPU, torch.float32, head_dim=64, block_size=16))[0]


@pytest.mark.parametrize("backend", [RAYLM, INVARIANT, torch_backend()], ids=["raylm", "invariant", "torch"])
@LENGTHS
def test_a_step_is_planned_once_for_layers_of_all_scores(
    backend: AttentionBackend[Any], lengths: list[tuple[int, int]]
) -> None:
    step = step_of(lengths)
    planned = backend.plan(step)
    for scores in (
        Scores(scale=0.2),
        Scores(scale=0.2, window=7),
        Scores(scale=0.1, window=1, soft_cap=3.0),
        Scores(scale=0.3, alibi_slopes=alibi_slopes(4), sinks=torch.randn(4)),
        Scores(scale=0.2),
    ):
        q, cache = some_heads(step)
        torch.testing.assert_close(backend.attend(q, cache, planned, scores), expected(q, cache, step, scores))


def test_what_a_graph_may_hold_plans_nothing() -> None:
    """A replayed graph sees what is in the step's tensors then, so a plan must not have read them."""
    step = step_of([(1, 1)])
    assert RAYLM.plan(step) is step and RAYLM.supports_graphs


@LENGTHS
def test_torch_reads_a_steps_lengths_when_it_plans(lengths: list[tuple[int, int]]) -> None:
    """On a GPU each look at them waits for the device."""
    backend, step = torch_backend(), step_of(lengths)
    q, cache = some_heads(step)
    planned = backend.plan(step)
    found = expected(q, cache, step, Scores(scale=0.2, window=7))
    step.query_start.zero_()
    step.seq_lens.zero_()
    torch.testing.assert_close(backend.attend(q, cache, planned, Scores(scale=0.2, window=7)), found)
