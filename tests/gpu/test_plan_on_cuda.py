"""What `raylm doctor --plan` says of a GPU is what an engine then finds there."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from raylm import LLM, EngineConfig
from raylm.bench.dummy import write_shape
from raylm.config.engine import ParallelConfig
from raylm.config.resolve import resolve
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.planning.gpus import GPUS
from raylm.planning.sizing import Sizing

NEAR = 0.03


@pytest.mark.parametrize(
    ("shape", "quantised", "changes"),
    [
        ("qwen3-0.6b", None, {}),
        ("llama-3.1-8b", None, {"scheduler": {"max_num_seqs": 256, "max_num_batched_tokens": 2048}}),
        ("llama-3.1-8b", None, {"scheduler": {"max_num_seqs": 512, "max_num_batched_tokens": 16384}}),
        ("llama-3.1-8b", None, {"cache": {"dtype": "fp8"}}),
        ("llama-3.1-8b", None, {"model": {"quantization": "fp8"}}),
        ("llama-3.1-8b", "awq", {}),
        ("llama-3.1-8b", "int8", {}),
        ("qwen3-30b-a3b", None, {}),
        ("qwen3-30b-a3b", None, {"model": {"quantization": "fp8"}}),
        ("gpt-oss-20b", None, {}),
        ("llama-3.1-8b", None, {"parallel": {"tensor": 2}}),
        ("qwen3-30b-a3b", None, {"parallel": {"tensor": 2}}),
        ("llama-3.1-8b", None, {"parallel": {"pipeline": 2}}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_the_cache_has_the_tokens_that_were_planned(shape, quantised, changes, tmp_path: Path):
    """Of dense models and mixtures, with windows and without, in 16 bits and as codes, on one GPU and on two."""
    name = torch.cuda.get_device_name()
    gpu = next((gpu for known, gpu in GPUS.items() if known in name.split()), None)
    if gpu is None:
        pytest.skip(f"no plan is made for {name}")
    if torch.cuda.device_count() < ParallelConfig(**changes.get("parallel", {})).num_workers:
        pytest.skip("there are no two CUDA devices")
    folder = write_shape(shape, tmp_path, quantised=quantised)
    model = {"path": str(folder), "load_format": "dummy", "max_model_len": 8192, **changes.get("model", {})}
    config = EngineConfig.model_validate({**changes, "model": model, "runtime": {"device": "cuda"}})
    arch = ArchConfig.from_source(locate(config.model.reference))
    plan = Sizing(resolve(config, "cuda"), arch, gpu, context=8192).plan(config.parallel)
    llm = LLM(config, progress=False)
    found = llm._engine.info.num_blocks
    llm.close()
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    assert plan.num_blocks == pytest.approx(found, rel=NEAR), (plan.step_bytes, plan.table_bytes, plan.cuda_bytes)
