"""raylm convert, from the command line."""

from __future__ import annotations

import json

from safetensors.torch import load_file

from raylm.cli import main
from tests.support import checkpoints


def test_what_was_written_is_one_line(tmp_path, capsys):
    plain, out = checkpoints.llama(tmp_path / "plain", num_hidden_layers=2), tmp_path / "out"
    assert main(["convert", str(plain), str(out), "--quantization", "int4", "--group-size", "32"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{out}: 14 matrices in int4, 7 tensors not quantised; 0.00 GB became 0.00 GB in ")
    assert told.count("\n") == 1
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section["config_groups"]["group_0"]["weights"]["group_size"] == 32


def test_the_type_of_what_is_not_quantised(tmp_path, capsys):
    plain, out = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1), tmp_path / "out"
    assert main(["convert", str(plain), str(out), "--quantization", "none", "--dtype", "float16"]) == 0
    assert "matrices" not in capsys.readouterr().out
    assert {str(tensor.dtype) for tensor in load_file(out / "model.safetensors").values()} == {"torch.float16"}
    assert main(["convert", str(plain), str(out), "--quantization", "none"]) == 2
    assert "out exists already" in capsys.readouterr().err
