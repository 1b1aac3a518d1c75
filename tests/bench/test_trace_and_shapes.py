"""Shapes that load, and what a trace of a GPU's work says."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from raylm.bench.dummy import write_dummy, write_shape
from raylm.bench.experts import experts_touched
from raylm.bench.shapes import SHAPES
from raylm.bench.trace import Span, Traced, Work, draw_trace, read_trace, run_work, short_name, summarize, trace_steps
from raylm.config.engine import EngineConfig, ParallelConfig
from raylm.engine.factory import offline_engine
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.text.processor import TextProcessor
from tests.support import checkpoints


@pytest.mark.parametrize(("name", "layers", "heads"), [("llama-3.1-8b", 32, 32), ("qwen3-0.6b", 28, 16)])
def test_a_shape_is_a_model_with_a_tokenizer(name: str, layers: int, heads: int, tmp_path: Path) -> None:
    source = locate(str(write_shape(name, tmp_path / name)))
    arch = ArchConfig.from_source(source)
    assert (arch.num_layers, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (layers, heads, 8, 128)
    assert arch.dtype == "bfloat16" and set(arch.eos_token_ids) == {SHAPES[name]["eos_token_id"]}
    text = TextProcessor.load(source)
    assert len(text.encode("abc")) == 3


def test_an_unknown_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no shape 'gpt-5'; there are: llama-3\.1-8b, llama-3\.1-70b, gpt-oss-20b, qwen3-0\.6b, qwen3-30b-a3b$",
    ):
        write_shape("gpt-5", tmp_path)


def event(name: str, start: float, length: float, cat: str = "kernel") -> dict[str, object]:
    return {"name": name, "ts": start, "dur": length, "cat": cat}


def test_idle_time_is_what_no_kernel_covers() -> None:
    events = [
        event("void at::native::add<float>(int)", 40.0, 20.0),
        event("copy", 10.0, 10.0, "gpu_memcpy"),
        event("cudaLaunchKernel", 0.0, 99.0, "cuda_runtime"),
        event("void at::native::add<float>(int)", 50.0, 20.0),
        event("mul", 70.0, 40.0),
    ]
    spans = read_trace({"traceEvents": events})
    assert [span.name for span in spans][0] == "copy" and len(spans) == 4
    result = summarize(spans, model="m", batch=3, steps=2, seconds=1e-4)
    # From 10 to 110, nothing from 20 to 40; two kernels overlap from 50 to 60.
    assert result.gpu_idle_share == pytest.approx(0.2)
    assert (result.us_per_step, result.us_per_step_profiled) == pytest.approx((50, 50))
    assert result.kernels_per_step == 2
    assert list(result.kernels_us.items()) == [("add<float>", 20.0), ("mul", 20.0), ("copy", 5.0)]


def test_nothing_traced_is_all_idle() -> None:
    assert summarize([], model="m", batch=1, steps=1, seconds=1.0).gpu_idle_share == 1.0


def test_names_lose_what_does_not_fit_a_table() -> None:
    assert short_name("void raylm::cuda::(anonymous namespace)::norm<float, 4>(int, float*)") == "norm<float, 4>"
    assert len(short_name("k<" + "x" * 200 + ">(int)")) == 60


def test_a_trace_is_drawn(tmp_path: Path) -> None:
    spans = [Span(f"k{i % 12}", 10.0 * i, 7.0) for i in range(100)]
    result = summarize(spans, model="m", batch=1, steps=5, seconds=1e-3)
    path = tmp_path / "trace.png"
    draw_trace([Traced(result, [], spans)] * 2, path)
    assert path.stat().st_size > 10_000


def test_without_a_gpu_there_is_nothing_to_trace(tmp_path: Path) -> None:
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(write_dummy(tmp_path)), "load_format": "dummy"},
            "runtime": {"device": "cpu"},
            "scheduler": {"max_num_seqs": 4},
        }
    )
    with pytest.raises(ConfigError, match="runs on cpu"):
        trace_steps(config, [1], Work(2, 8))
    with pytest.raises(ConfigError, match="batch of 5 is over scheduler.max_num_seqs 4"):
        trace_steps(config, [5], Work(2, 8))
    stages = config.model_copy(update={"parallel": ParallelConfig(pipeline=2)})
    with pytest.raises(ConfigError, match=r"looks at one worker, with parallel\.pipeline 2 a stage"):
        trace_steps(stages, [1], Work(2, 8))


def test_experts_that_a_step_goes_to_are_counted(tmp_path: Path) -> None:
    folder = checkpoints.FAMILIES["mixtral"](tmp_path)
    config = EngineConfig.model_validate(
        {"model": {"path": str(folder), "max_model_len": 64}, "runtime": {"device": "cpu"}}
    )
    one, many = experts_touched(config, [1, 12], Work(steps=2, prompt_len=4))
    assert one.touched == 2 and one.share == pytest.approx(1) and one.experts == 6
    assert 2 < many.touched <= 6 and many.at_random == pytest.approx(6 * (1 - (2 / 3) ** 12))


def test_all_requests_decode_however_long_their_prompts_took(tmp_path: Path) -> None:
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(checkpoints.FAMILIES["llama"](tmp_path)), "max_model_len": 48},
            "runtime": {"device": "cpu"},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 32},
        }
    )
    engine = offline_engine(config, progress=False)
    try:
        done = run_work(engine, 5, Work(steps=2, prompt_len=16), salt=0, watch=nullcontext())
        assert done.steps == 2 and done.steps_of_prompts >= 3
        with pytest.raises(ConfigError, match=r"requests ended before 30 steps: raise model\.max_model_len"):
            run_work(engine, 5, Work(steps=30, prompt_len=16), salt=0, watch=nullcontext())
    finally:
        engine.shutdown()


def test_a_model_without_experts_has_none_to_count(tmp_path: Path) -> None:
    folder = write_dummy(tmp_path / "dummy")
    with pytest.raises(ConfigError, match="bench experts counts experts, but dummy has none"):
        experts_touched(EngineConfig.model_validate({"model": {"path": str(folder)}}), [1], Work(1, 4))
