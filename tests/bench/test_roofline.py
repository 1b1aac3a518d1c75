"""What a step needs at least, and which kernel is of which kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from raylm.bench.dummy import write_shape
from raylm.bench.roofline import (
    OTHER,
    Need,
    Peaks,
    WeightItems,
    decode_shape,
    kind_of,
    kind_results,
    kinds_us,
    needs,
    prefill_shape,
)
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ArchConfig:
    return ArchConfig.from_source(locate(str(write_shape("llama-3.1-8b", tmp_path_factory.mktemp("shape") / "8b"))))


def test_a_token_reads_every_weight_but_the_embeddings(llama: ArchConfig) -> None:
    parameters = 8_030_261_248
    read = parameters - 128_256 * 4096 - 65 * 4096  # Norms are no products.
    needed = needs(llama, decode_shape(1, 1000), item=2)
    assert needed["products"].bytes == pytest.approx(2 * read, rel=1e-3)
    assert needed["products"].flops == 2 * read
    # Keys and values of 8 heads of 128 in 32 layers.
    assert needed["attention"].bytes == pytest.approx(1000 * 131_072, rel=0.01)
    assert needed["attention"].flops == 4 * 1000 * 4096 * 32


def test_rows_share_the_weights(llama: ArchConfig) -> None:
    one, many = (needs(llama, decode_shape(rows, 100), item=2) for rows in (1, 64))
    assert many["products"].bytes < 1.02 * one["products"].bytes
    assert all(many[kind].flops == 64 * one[kind].flops for kind in one)
    assert many["attention"].bytes == 64 * one["attention"].bytes


def test_tensor_ranks_share_all_but_what_every_one_norms(llama: ArchConfig) -> None:
    whole, half = (needs(llama, decode_shape(1, 1000), item=2, ranks=ranks) for ranks in (1, 2))
    assert half["products"].flops == whole["products"].flops / 2
    assert half["attention"].bytes == whole["attention"].bytes / 2
    assert half["activation"].bytes == whole["activation"].bytes / 2
    assert half["norms"] == whole["norms"]


def test_a_prompt_sees_half_of_its_square_and_samples_one_row(llama: ArchConfig) -> None:
    whole, halves = (needs(llama, prefill_shape(prompts, 4096), item=2) for prompts in (2, 1))
    assert whole["attention"].flops == 2 * halves["attention"].flops == 2 * 4 * 4096 * 32 * 4096 * 4097 / 2
    assert whole["sampling"].bytes == 2 * 2 * 128_256


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void raylm::cuda::(anonymous namespace)::skinny_linear_kernel<8>(int)", "products"),
        ("raylm::cuda::gated_linear_kernel<2>", "products"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("decode_attention_kernel<128>", "attention"),
        ("prefill_hopper_kernel", "attention"),
        ("rms_norm_any_kernel<float>", "norms"),
        ("peer_add_rms_norm_kernel", "sums over ranks"),
        ("few_layers_kernel", "layers in one kernel"),
        ("rope_store_kernel", "rotary and cache"),
        ("gated_kernel", "activation"),
        ("sample_kernel", "sampling"),
        ("Memcpy DtoH", OTHER),
    ],
)
def test_kernels_have_kinds(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_a_kernel_that_waits_within_its_time_counts_from_the_end_of_the_one_before() -> None:
    spans = [("gemm", 0.0, 10.0), ("rms_norm_kernel", 5.0, 7.0), ("Memcpy PtoP (Device -> Device)", 18.0, 5.0)]
    found = kinds_us([*spans, ("gemm", 20.0, 6.0)], steps=2)
    assert found == {"products": (8.0, 1.0), "norms": (1.0, 0.5)}


def test_a_kind_is_held_against_what_it_needs() -> None:
    needed = {"products": Need(8e6, 1e9), "norms": Need(1e6, 0.0), "activation": Need(1e9, 0.0)}
    peaks = Peaks(bytes_per_s=4e12, flops_per_s=1e15)
    products, norms, step = kind_results(
        {"norms": (1.0, 4.0), "products": (4.0, 3.0)}, needed, peaks, model="m", batch=1, step_us=6.0, layers=2
    )
    assert (products.kind, products.roofline_share, products.memory_idle_us) == ("products", 0.5, 2.0)
    assert (norms.kind, norms.roofline_share, norms.memory_idle_us) == ("norms", 0.25, 0.75)
    assert products.mb == 8 and norms.gflop == 0
    assert (step.kind, step.kernels, step.mb, step.memory_idle_us) == ("the step", 7.0, 9.0, 3.75)


def test_norms_may_be_part_of_sums_over_ranks() -> None:
    own = {"norms": (1.0, 1.0), "sums over ranks": (3.0, 3.0)}
    peaks = Peaks(bytes_per_s=4e12, flops_per_s=1e15)
    sums, norms, step = kind_results(own, {"norms": Need(4e6, 0.0)}, peaks, model="m", batch=1, step_us=4.0, layers=2)
    assert (sums.kind, sums.mb, sums.roofline_share) == ("sums over ranks", 3.0, 0.25)
    assert (norms.kind, norms.mb, norms.roofline_share, step.mb) == ("norms", 1.0, 0.25, 4.0)


def test_weights_of_the_layers_may_have_fewer_bytes_than_the_head(llama: ArchConfig) -> None:
    items = (WeightItems(item) for item in (None, 1))
    halves, bytes_each = (needs(llama, decode_shape(1, 100), item=2, weight_items=each)["products"] for each in items)
    head = 128256 * 4096
    assert halves.flops == bytes_each.flops
    assert bytes_each.bytes - 2 * head == pytest.approx((halves.bytes - 2 * head) / 2, rel=1e-2)


def test_experts_may_have_others_still(tmp_path: Path) -> None:
    arch = ArchConfig.from_source(locate(str(write_shape("gpt-oss-20b", tmp_path))))
    halves, codes = (
        needs(arch, decode_shape(1, 100), item=2, weight_items=WeightItems(expert=item))["products"]
        for item in (None, 0.5)
    )
    experts = 24 * 4 * 3 * 2880 * 2880  # four of a token
    assert halves.bytes - codes.bytes == pytest.approx(1.5 * experts, rel=1e-6) and halves.flops == codes.flops


def test_layers_in_one_kernel_leave_the_head(llama: ArchConfig) -> None:
    needed = needs(llama, decode_shape(1, 100), item=2)
    peaks = Peaks(bytes_per_s=4e12, flops_per_s=1e15)
    us = {"layers in one kernel": (3500.0, 1.0), "products": (250.0, 1.0)}
    layers, head, step = kind_results(us, needed, peaks, model="m", batch=1, step_us=3800.0, layers=32)
    assert head.mb == pytest.approx(2 * 4096 * 128256 / 1e6, rel=1e-2)
    everything = needed["products"].bytes + needed["attention"].bytes
    assert layers.mb + head.mb == step.mb == pytest.approx(everything / 1e6, rel=1e-3)


def test_an_activation_in_its_product_needs_nothing_of_its_own() -> None:
    needed = {"activation": Need(8e6, 0.0)}
    peaks = Peaks(bytes_per_s=4e12, flops_per_s=1e15)
    some, _ = kind_results({"activation": (2.0, 8.0)}, needed, peaks, model="m", batch=1, step_us=6.0, layers=32)
    assert some.mb == 2 and some.roofline_share == 0.25
