"""Plans of GPUs against numbers that are known, and against the worker's own arithmetic."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raylm.bench.dummy import write_shape
from raylm.config.engine import EngineConfig, ParallelConfig
from raylm.config.resolve import resolve
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig, ExpertsSpec
from raylm.models.blocks import Build
from raylm.models.registry import model_class
from raylm.parallel.context import ParallelContext
from raylm.planning.gpus import GPUS, find_gpu
from raylm.planning.sizing import Sizing
from tests.support import checkpoints

LLAMA_8B = 16_060_522_496
"""Bytes of its 8,030,261,248 parameters in bfloat16."""


def arch_of(name: str, folder: Path) -> ArchConfig:
    return ArchConfig.from_source(locate(str(write_shape(name, folder))))


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> ArchConfig:
    return arch_of("llama-3.1-8b", tmp_path_factory.mktemp("8b"))


def sizing(arch: ArchConfig, gpu: str = "H200", context: int = 8192, **sections: object) -> Sizing:
    config = EngineConfig.model_validate({"model": {"path": "x"}, **sections})
    return Sizing(resolve(config, "cuda"), arch, find_gpu(gpu), context=context)


def test_llama_8b_on_one_gpu(llama_8b: ArchConfig) -> None:
    plan = sizing(llama_8b).plan(ParallelConfig())
    assert (plan.weight_bytes, plan.weight_bytes_gpu) == (LLAMA_8B, LLAMA_8B)
    assert (plan.kv_bytes_token, plan.kv_bytes_token_gpu) == (131_072, 131_072)
    assert plan.problem is None and plan.dtype == "bfloat16"
    assert plan.memory_bytes == int(0.9 * GPUS["H200"].memory_gib * 2**30)
    left = plan.memory_bytes - LLAMA_8B - plan.step_bytes - plan.table_bytes - plan.cuda_bytes
    assert plan.cache_bytes == left and plan.num_blocks == left // (16 * 131_072)
    assert plan.concurrency == (plan.num_blocks - 1) / 512 and plan.cache_tokens == (plan.num_blocks - 1) * 16
    # An H200 was found to have room for some 55,000 blocks beside this model.
    assert plan.num_blocks == pytest.approx(55_000, rel=0.02)
    # All that a step reads but the embedding, of which it reads a row: 128,256 * 4,096 numbers.
    assert plan.decode_tokens_s == pytest.approx(4.8e12 / (LLAMA_8B - 2 * 128_256 * 4096))


def test_an_fp8_cache_holds_twice_as_many_tokens(llama_8b: ArchConfig) -> None:
    wide, narrow = (sizing(llama_8b, cache={"dtype": dtype}).plan(ParallelConfig()) for dtype in ("auto", "fp8"))
    assert (wide.cache_dtype, narrow.cache_dtype) == ("bfloat16", "float8_e4m3fn")
    assert (narrow.kv_bytes_token, narrow.kv_bytes_token_gpu) == (65_536, 65_536)
    assert (narrow.weight_bytes, narrow.cache_bytes) == (wide.weight_bytes, wide.cache_bytes)
    assert narrow.num_blocks == pytest.approx(2 * wide.num_blocks, abs=1)
    # A batch whose requests are half as large to read.
    assert narrow.batch_tokens_s > 1.5 * wide.batch_tokens_s


FP8_BY_FP8 = (
    "fp8 with a scale for each 128 columns (activations rounded to fp8, a scale a row, in steps of over 64 tokens)"
)


@pytest.mark.parametrize(
    ("name", "format_name", "expert_bytes", "form"),
    [
        ("gpt-oss-20b", "mxfp4", 1088 / 2048, "mxfp4 with a scale for each 32 columns"),
        ("qwen3-30b-a3b", "fp8-blocks", 2112 / 2048, FP8_BY_FP8),
        ("qwen3-30b-a3b", "awq", 1088 / 2048, "int4 with a scale for each 128 columns"),
    ],
)
def test_experts_in_codes_take_their_bytes(
    name: str, format_name: str, expert_bytes: float, form: str, tmp_path: Path
) -> None:
    plain = arch_of(name, tmp_path / "plain")
    packed = ArchConfig.from_source(locate(str(write_shape(name, tmp_path / "packed", quantised=format_name))))
    one, codes = (sizing(arch).plan(ParallelConfig()) for arch in (plain, packed))
    assert codes.experts_kept_as == form and one.experts_kept_as is None
    rate = 1979 / 989 if form == FP8_BY_FP8 else 1
    assert codes.prefill_tokens_s == pytest.approx(rate * one.prefill_tokens_s, rel=0.01)
    assert codes.in_8_bits == (rate > 1)
    spec = plain.layers[0].mlp
    assert isinstance(spec, ExpertsSpec)
    sizes = [(2 * spec.size, plain.hidden_size), (plain.hidden_size, spec.size)]
    numbers, held = (
        plain.num_layers * spec.num_experts * sum(rows * (-(-columns // unit) * unit) for rows, columns in sizes)
        for unit in (1, 128)  # columns of patches
    )
    saved = 2 * numbers - expert_bytes * held
    # AWQ's linear layers are smaller as well.
    assert one.weight_bytes - codes.weight_bytes == pytest.approx(saved, rel=1e-3 if codes.kept_as is None else 0.1)
    if name.startswith("gpt"):
        whole, first = (sizing(arch).plan(ParallelConfig(tensor=2)) for arch in (plain, packed))
        rows = plain.num_layers * spec.num_experts * plain.hidden_size
        assert first.experts_kept_as == form
        assert first.weight_bytes_gpu - whole.weight_bytes_gpu == pytest.approx(
            # Of 22.5 patches the first rank has 12; a column of down has 2,880 rows, one of gate and of up as many.
            rows * 3 * (1536 * expert_bytes * (1 + 2 * 2944 / 2880) / 3 - 1440 * 2),
            rel=1e-3,
        )


@pytest.mark.parametrize(
    ("kind", "tokens", "sizes"),
    # gate and up and their activation, and gate's and up's weight; the activation; and with it its numbers of 8 bits
    [("awq", 8192, 3 * 8192 + 2 * 4096), ("awq", 1024, 1024), ("fp8-blocks", 8192, 1.5 * 8192)],
)
def test_products_of_codes_hold_what_their_kernels_return(kind: str, tokens: int, sizes: float, tmp_path: Path) -> None:
    arch = ArchConfig.from_source(locate(str(write_shape("llama-3.1-8b", tmp_path, quantised=kind))))
    scheduler = {"max_num_batched_tokens": tokens, "max_num_seqs": 1}
    plan = sizing(arch, scheduler=scheduler).plan(ParallelConfig())
    rotary = 131_072 * 128 * 4
    assert plan.step_bytes == 2 * (14_336 * sizes + 2 * 4096 * tokens) + rotary


def test_columns_in_activation_order_are_decoded_where_ranks_share_them(tmp_path: Path) -> None:
    plain, ordered = (
        ArchConfig.from_source(locate(str(write_shape("llama-3.1-8b", tmp_path / kind, quantised=kind))))
        for kind in ("awq", "gptq-ordered")
    )
    one, in_order = (sizing(arch).plan(ParallelConfig()) for arch in (plain, ordered))
    assert one.kept_as == "int4 with a scale for each 128 columns"
    assert in_order.kept_as == f"{one.kept_as} in activation order"
    assert in_order.weight_bytes == one.weight_bytes and in_order.prefill_tokens_s == one.prefill_tokens_s
    two, in_order = (sizing(arch).plan(ParallelConfig(tensor=2)) for arch in (plain, ordered))
    shared = 32 * 4096 * (4096 + 14_336)  # o_proj and down_proj
    assert in_order.weight_bytes_gpu - two.weight_bytes_gpu == shared / 2 * (2 - 1088 / 2048)


def test_a_step_reads_the_experts_that_its_tokens_go_to(tmp_path: Path) -> None:
    arch = arch_of("gpt-oss-20b", tmp_path)
    experts = 2 * 24 * 32 * (3 * 2880 * 2880 + 3 * 2880)
    embedding = 2 * 201_088 * 2880
    plan = sizing(arch).plan(ParallelConfig())
    # 20.9 billion parameters, 3.6 of which a token needs with the head: 4 of 32 experts.
    assert plan.weight_bytes == pytest.approx(2 * 20.9e9, rel=1e-2)
    needed = plan.weight_bytes - embedding - experts * 7 / 8
    assert needed == pytest.approx(2 * 3.6e9, rel=1e-2)
    assert plan.decode_tokens_s == pytest.approx(4.8e12 / needed)
    assert plan.prefill_tokens_s == pytest.approx(989e12 / (needed - embedding), rel=1e-3)
    # Nearly all are read in a step of 76 requests.
    keys = sum(min(layer.window or 8192, 8192) for layer in arch.layers) * 2 * 8 * 64 * 2
    read = plan.weight_bytes - embedding - experts * (7 / 8) ** plan.batch
    assert plan.batch_tokens_s == pytest.approx(plan.batch * 4.8e12 / (read + plan.batch * keys))


@pytest.mark.parametrize(("tensor", "kv_bytes"), [(2, 65_536), (8, 16_384), (16, 16_384)])
def test_tensor_ranks_split_weights_and_heads_and_copy_what_they_cannot_split(llama_8b, tensor, kv_bytes) -> None:
    plan = sizing(llama_8b).plan(ParallelConfig(tensor=tensor))
    assert plan.kv_bytes_token == 131_072 and plan.kv_bytes_token_gpu == kv_bytes
    assert plan.weight_bytes == LLAMA_8B
    context = ParallelContext(0, 0, tensor, 0, 1, torch.device("meta"))
    model = model_class(llama_8b.architecture)(Build(llama_8b, context, torch.bfloat16))
    assert plan.weight_bytes_gpu == sum(parameter.nbytes for parameter in model.parameters())
    assert LLAMA_8B / tensor < plan.weight_bytes_gpu < 1.03 * LLAMA_8B / tensor + 2 * 2 * 32 * 4096 * 1024


def test_stages_hold_their_layers_and_their_end_of_the_model(llama_8b: ArchConfig) -> None:
    plan = sizing(llama_8b).plan(ParallelConfig(pipeline=2))
    # Equal halves but for the last norm, which the stage with the head has.
    assert plan.weight_bytes_gpu == (LLAMA_8B - 2 * 4096) // 2 + 2 * 4096
    assert plan.kv_bytes_token_gpu == 65_536
    uneven = sizing(llama_8b).plan(ParallelConfig(pipeline=2, stage_layers=[24, 8]))
    assert uneven.kv_bytes_token_gpu == 131_072 * 24 // 32


def test_a_tied_embedding_is_held_at_both_ends(tmp_path: Path) -> None:
    arch = arch_of("qwen3-0.6b", tmp_path)
    one, two = (sizing(arch).plan(ParallelConfig(pipeline=pipeline)) for pipeline in (1, 2))
    embedding = 151_936 * 1024 * 2
    assert one.weight_bytes == 2 * 596_049_920 and one.kv_bytes_token == 114_688
    assert two.weight_bytes_gpu == (one.weight_bytes - embedding - 2048) // 2 + embedding + 2048
    assert one.decode_tokens_s == pytest.approx(4.8e12 / one.weight_bytes)


def test_what_does_not_fit_says_why_and_what_would(llama_8b: ArchConfig, tmp_path: Path) -> None:
    big = sizing(arch_of("llama-3.1-70b", tmp_path), "H100")
    attempts = big.attempts(1)
    assert list(attempts) == [1, 2] and attempts[2] is None
    assert "131.4 GiB of weights a GPU" in attempts[1] and "gpu_memory_utilization 0.9 of 79.1 GiB" in attempts[1]
    long = sizing(llama_8b, "L4", context=131_072)
    assert "less than one request of 131,072" in long.plan(ParallelConfig()).problem
    blocks = sizing(llama_8b, cache={"num_blocks": 60_000}).plan(ParallelConfig())
    assert blocks.num_blocks == 60_000 and "cache.num_blocks 60000 is more than the 55566" in blocks.problem


def test_windows_make_requests_smaller(tmp_path: Path) -> None:
    arch = ArchConfig.from_source(locate(str(checkpoints.gemma3(tmp_path))))
    config = {"cache": {"block_size": 4, "num_blocks": 101}, "scheduler": {"max_num_seqs": 4}}
    scheduler = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    plan = sizing(arch, context=128, **{**config, "scheduler": scheduler}).plan(ParallelConfig())
    # As the worker says of the same model and cache: 2.1 requests of 128 tokens.
    assert plan.concurrency == pytest.approx(100 / 48)
    assert plan.kv_bytes_token == 6 * 2 * 2 * 16 * 2


def test_what_cannot_be_split(llama_8b: ArchConfig) -> None:
    odd = dataclasses.replace(llama_8b, num_kv_heads=3, num_heads=6)
    with pytest.raises(ConfigError, match="num_key_value_heads is 3"):
        sizing(odd).plan(ParallelConfig(tensor=2))
    with pytest.raises(ConfigError, match="parallel.pipeline is 40, but the model has 32 layers only"):
        sizing(llama_8b).plan(ParallelConfig(pipeline=40))
    with pytest.raises(ConfigError, match="--context is 200000"):
        sizing(llama_8b, context=200_000)
    with pytest.raises(ConfigError, match="--gpu 'H2' is unknown; allowed: L4"):
        find_gpu("H2")


def test_what_drafts_takes_weights_and_cache(tmp_path: Path) -> None:
    target = checkpoints.llama(tmp_path / "target")
    paths = {
        "draft_model": checkpoints.qwen3(tmp_path / "draft", num_hidden_layers=2),
        "eagle3": checkpoints.eagle3(tmp_path / "head", target),
    }
    arch = ArchConfig.from_source(locate(str(target)))
    plain = sizing(arch, context=128).plan(ParallelConfig())
    # Tensors of 16 bits each; two of the head's are a map of 64 bits and one that is not loaded.
    for method, kv_bytes in {"draft_model": 2 * 2 * 2 * 32 * 2, "eagle3": 2 * 1 * 2 * 16 * 2}.items():
        plan = sizing(arch, context=128, speculation={"method": method, "model": str(paths[method])})
        found = plan.plan(ParallelConfig())
        tensors = load_file(paths[method] / "model.safetensors")
        map_bytes = tensors.pop("d2t").nbytes if method == "eagle3" else 0
        tensors.pop("t2d", None)
        assert found.weight_bytes - plain.weight_bytes == map_bytes + 2 * sum(x.numel() for x in tensors.values())
        assert found.kv_bytes_token - plain.kv_bytes_token == kv_bytes
        assert found.decode_tokens_s == plain.decode_tokens_s
        assert plan.plan(ParallelConfig(tensor=2)).kv_bytes_token_gpu == found.kv_bytes_token // 2
    mimo = ArchConfig.from_source(locate(str(checkpoints.mimo(tmp_path / "mimo"))))
    without, with_layer = (
        sizing(mimo, context=128, speculation={"method": method}).plan(ParallelConfig()) for method in ("none", "mtp")
    )
    assert with_layer.kv_bytes_token - without.kv_bytes_token == 2 * 2 * 16 * 2
    assert with_layer.weight_bytes > without.weight_bytes + 2 * 2 * 64 * 64
