"""raylm doctor --plan as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raylm.cli import main
from tests.support import checkpoints
from tests.support.quantised import change_config


def plan(capsys, *words):
    code = main(["doctor", "--plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_plan_of_a_shape(capsys):
    code, found = plan(capsys, "llama-3.1-8b", "--gpu", "H200", "--context", "4096")
    assert code == 0 and found["problem"] is None
    assert (found["weight_bytes"], found["kv_bytes_token"]) == (16_060_522_496, 131_072)
    assert (found["context"], found["attempts"]) == (4096, {"1": None})
    assert found["gpu"]["memory_gib"] == 139.8


def test_a_quantised_model_is_planned_as_its_decoded_weights(capsys, tmp_path):
    path = checkpoints.llama(tmp_path / "llama")
    _, plain = plan(capsys, str(path), "--gpu", "L4", "--dtype", "bfloat16")
    change_config(path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    _, found = plan(capsys, str(path), "--gpu", "L4", "--dtype", "bfloat16")
    stored = "gptq (integers of 4 bits, groups of 128)"
    assert plain["quantisation"] is None and found == {**plain, "quantisation": stored}
    assert main(["doctor", "--plan", str(path), "--gpu", "L4", "--dtype", "bfloat16"]) == 0
    assert f"(stored as {stored}, decoded to bfloat16)" in capsys.readouterr().out
    assert main(["doctor", str(path), "--json"]) == 0
    (choice,) = [each for each in json.loads(capsys.readouterr().out)["choices"] if each["name"] == "stored weights"]
    assert choice["value"] == stored and "they take the memory of float32" in choice["reason"]


def test_linear_layers_in_fp8_take_half(capsys, tmp_path):
    _, plain = plan(capsys, "llama-3.1-8b", "--gpu", "H200")
    _, found = plan(capsys, "llama-3.1-8b", "--gpu", "H200", "--quantization", "fp8")
    rows, values = 32 * (6144 + 4096 + 28672 + 4096), 32 * 218_103_808
    assert plain["kept_as"] is None and found["kept_as"] == "FP8"
    assert found["weight_bytes"] == plain["weight_bytes"] - values + 4 * rows
    assert found["prefill_tokens_s"] == pytest.approx(2 * plain["prefill_tokens_s"], rel=0.01)
    assert main(["doctor", "--plan", "llama-3.1-8b", "--gpu", "H200", "--quantization", "fp8"]) == 0
    assert "GB a GPU (linear layers in FP8)" in capsys.readouterr().out
    path = checkpoints.llama(tmp_path / "llama")
    for words, expected in (([], "FP8"), (["--weights", "decoded"], None)):
        change_config(path, quantization_config={"quant_method": "fbgemm_fp8"})
        _, found = plan(capsys, str(path), "--gpu", "H100", "--dtype", "bfloat16", *words)
        assert found["kept_as"] == expected
    _, found = plan(capsys, str(path), "--gpu", "A100-80", "--dtype", "bfloat16")
    assert found["kept_as"] is None
    assert main(["doctor", "--plan", "llama-3.1-8b", "--gpu", "L4", "--quantization", "fp8"]) == 2
    assert "model.quantization is fp8, which needs a Hopper GPU" in capsys.readouterr().err


def test_linear_layers_in_int4_take_a_quarter(capsys, tmp_path):
    path = checkpoints.llama(tmp_path, hidden_size=512, intermediate_size=1024)
    _, plain = plan(capsys, str(path), "--gpu", "H200", "--dtype", "bfloat16")
    change_config(path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    _, found = plan(capsys, str(path), "--gpu", "H200", "--dtype", "bfloat16")
    form = "int4 with a scale for each 128 columns"
    assert found["kept_as"] == form and found["weight_bytes"] < plain["weight_bytes"]
    assert found["prefill_tokens_s"] == pytest.approx(plain["prefill_tokens_s"], rel=0.01)  # the same products
    assert main(["doctor", "--plan", str(path), "--gpu", "H200", "--dtype", "bfloat16"]) == 0
    expected = f"(linear layers in {form}, as stored: awq (integers of 4 bits, groups of 128); all others in bfloat16)"
    assert expected in capsys.readouterr().out


def test_the_doctor_says_what_is_quantised_while_it_is_loaded(capsys, tmp_path):
    assert main(["doctor", str(checkpoints.llama(tmp_path)), "--quantization", "fp8", "--json"]) == 0
    (choice,) = [each for each in json.loads(capsys.readouterr().out)["choices"] if each["name"] == "quantization"]
    assert choice["value"] == "fp8" and "quantised while they are loaded" in choice["reason"]


@pytest.mark.usefixtures("demo")
def test_names_are_known_in_any_case_and_a_serve_file_has_an_engine(capsys, tmp_path):
    _, found = plan(capsys, "LLaMA-3.1-8B", "--gpu", "h200")
    assert found["weight_bytes"] == 16_060_522_496
    _, found = plan(capsys, "deployments/llm.yaml", "--gpu", "L4")
    assert found["model"] == "smollm2-135m" and found["weight_bytes"] == 2 * 134_515_008


def test_gpus_are_shared_out_and_a_dtype_counts(capsys):
    _, found = plan(capsys, "llama-3.1-8b", "--gpu", "h100", "--gpus", "4", "--pipeline", "2", "--dtype", "float32")
    assert (found["tensor"], found["pipeline"], found["prefill_tokens_s"]) == (2, 2, None)
    assert found["weight_bytes"] == 2 * 16_060_522_496 and found["kv_bytes_token_gpu"] == 2 * 131_072 // 4


@pytest.mark.usefixtures("demo")
def test_a_plan_of_an_engine_file_and_of_a_gguf_file(capsys, tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("model: {path: llama-3.1-8b}\nparallel: {pipeline: 2, stage_layers: [31, 1]}\n")
    _, found = plan(capsys, str(path), "--gpu", "A100-40")
    assert found["pipeline"] == 2 and found["kv_bytes_token_gpu"] == 131_072 * 31 // 32
    _, found = plan(capsys, "smollm2-135m", "--gpu", "L4")
    assert found["weight_bytes"] == 2 * 134_515_008 and found["kv_bytes_token"] == 23_040


@pytest.mark.usefixtures("demo")
def test_a_plan_of_a_gguf_file_counts_patches(capsys):
    _, found = plan(capsys, "smollm2-135m", "--gpu", "H200")
    # 576 and 1,536 columns are 5 and 12 patches; embedding and norms are bfloat16.
    patches = 30 * ((960 + 576 + 3072) * 5 + 576 * 12) // 16 * 1280
    assert found["weight_bytes"] == patches + 2 * (49_152 + 61) * 576
    assert found["kept_as"] == "affine4 with a scale for each 32 columns"
    for words in (("--weights", "decoded"), ("--dtype", "float16"), ("--deterministic",)):
        _, found = plan(capsys, "smollm2-135m", "--gpu", "H200", *words)
        assert found["weight_bytes"] == 2 * 134_515_008 and found["kept_as"] is None, words


def test_what_does_not_fit_is_exit_code_1(capsys):
    assert main(["doctor", "--plan", "llama-3.1-70b", "--gpu", "H100"]) == 1
    out = capsys.readouterr().out
    assert "does not fit        131.4 GiB of weights a GPU" in out
    assert "tensor 2            is the smallest that fits" in out
    assert main(["doctor", "--plan", "llama-3.1-70b", "--gpu", "H100", "--tensor", "2"]) == 0
    out = capsys.readouterr().out
    assert "141.11 GB in all, 70.56 GB a GPU" in out and "tensor 1            131.4 GiB" in out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "doctor --plan needs a MODEL and --gpu NAME"),
        (["llama-3.1-8b"], "doctor --plan needs a MODEL and --gpu NAME"),
        (["llama-3.1-8b", "--gpu", "TPU"], "--gpu 'TPU' is unknown; allowed: L4, "),
        (["./nothing/here", "--gpu", "L4"], "model.path './nothing/here' does not exist"),
        (["llama-9", "--gpu", "L4"], "or a shape (llama-3.1-8b, llama-3.1-70b, gpt-oss-20b, qwen3-0.6b"),
        (["deployments/multi-model.yaml", "--gpu", "L4"], "is a Serve config file with 2 models"),
        (["llama-3.1-8b", "--gpu", "L4", "--gpus", "3", "--tensor", "2"], "--gpus is 3, but tensor 2 times pipeline 1"),
        (["llama-3.1-8b", "--gpu", "L4", "--tensor", "3"], "num_attention_heads is 32, which parallel.tensor 3"),
    ],
)
def test_a_mistake_is_one_line(words, problem, capsys):
    assert main(["doctor", "--plan", *words]) == 2
    assert problem in capsys.readouterr().err


COLUMNS = "| model | GPU | T | weights a GPU | KV bytes a token | GiB of cache | tokens of cache | requests | decode |"


def row(found) -> str:
    """The line of docs/deploy.md that a plan makes."""
    cells = [
        found["model"], found["gpu"]["name"], found["tensor"], f"{found['weight_bytes_gpu'] / 1e9:.2f} GB",
        f"{found['kv_bytes_token_gpu']:,}", f"{found['cache_bytes'] / 2**30:.1f}", f"{found['cache_tokens']:,}",
        f"{found['concurrency']:.1f}", f"{found['decode_tokens_s']:,.0f}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def test_the_documented_plans_are_what_it_prints(capsys):
    lines = Path("docs/deploy.md").read_text(encoding="utf-8").splitlines()
    start = lines.index(COLUMNS) + 2
    rows = [line for line in lines[start : start + 20] if line.startswith("| ")]
    assert len(rows) >= 12
    for line in rows:
        model, gpu, tensor = line.strip("| ").split(" | ")[:3]
        code, found = plan(capsys, model, "--gpu", gpu, "--tensor", tensor)
        assert (code, row(found)) == (0, line)
