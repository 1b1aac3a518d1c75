"""What `raylm doctor --plan` says of a GPU is what an engine then finds there."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from raylm import LLM, EngineConfig
from raylm.bench.dummy import write_shape
from raylm.config.resolve import resolve
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.planning.gpus import GPUS
from raylm.planning.sizing import Sizing

NEAR = 0.03


@pytest.mark.parametrize(
    ("shape", "max_num_seqs", "max_num_batched_tokens"),
    [("qwen3-0.6b", 1024, 8192), ("llama-3.1-8b", 256, 2048), ("llama-3.1-8b", 512, 16384)],
)
def test_the_cache_has_the_tokens_that_were_planned(shape, max_num_seqs, max_num_batched_tokens, tmp_path: Path):
    name = torch.cuda.get_device_name()
    gpu = next((gpu for known, gpu in GPUS.items() if known in name.split()), None)
    if gpu is None:
        pytest.skip(f"no plan is made for {name}")
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(write_shape(shape, tmp_path)), "load_format": "dummy", "max_model_len": 8192},
            "scheduler": {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens},
            "runtime": {"device": "cuda"},
        }
    )
    arch = ArchConfig.from_source(locate(config.model.reference))
    plan = Sizing(resolve(config, "cuda"), arch, gpu, context=8192).plan(config.parallel)
    llm = LLM(config, progress=False)
    found = llm._engine.info.num_blocks
    llm.close()
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    assert plan.num_blocks == pytest.approx(found, rel=NEAR), (plan.step_bytes, plan.cuda_bytes)
