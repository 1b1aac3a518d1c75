"""The angles of every kind of rotary embedding equal those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from raylm.layers.rope_settings import RopeSettings
from raylm.layers.rotary import inverse_frequencies, rotary_table
from raylm.models.fields import Fields
from raylm.models.read_layers import rope_of

CPU = torch.device("cpu")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        (RopeSettings(1e4), {"rope_type": "default", "rope_theta": 1e4}),
        (RopeSettings(1e6, "linear", factor=8.0), {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}),
        (
            RopeSettings(
                5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
            ),
            {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3},
        ),
    ],
)
def test_table_equals_transformers(settings: RopeSettings, parameters: dict) -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=2000, rope_parameters=parameters
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), torch.arange(2000)[None])
    table = rotary_table(settings, head_dim=128, max_position=2000, device=CPU)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[:, :64], cos[0, :, :64], atol=2e-5, rtol=0)
    torch.testing.assert_close(table[:, 64:], sin[0, :, :64], atol=2e-5, rtol=0)


ORIGINAL = {"original_max_position_embeddings": 256}
LONG = {"short_factor": [1.0 + i / 40 for i in range(64)], "long_factor": [1.0 + i for i in range(64)], **ORIGINAL}


@pytest.mark.parametrize("length", [200, 900])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, **ORIGINAL},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False, **ORIGINAL},
        {"rope_type": "longrope", **LONG},
        {"rope_type": "longrope", "factor": 3.0, **LONG},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
)
def test_stretched_tables_equal_transformers(parameters: dict, length: int) -> None:
    """Of a model for 256 tokens, where sequences may have `length`: transformers looks at the longest that there is."""
    parameters = {"rope_theta": 1e4, **parameters}
    is_dynamic = parameters["rope_type"] == "dynamic"
    values = {"max_position_embeddings": 256 if is_dynamic else 1024, "rope_parameters": parameters}
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, **values)
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), torch.arange(length)[None])
    settings = rope_of(Fields(values, "config.json"), "full")
    assert settings.reach(values["max_position_embeddings"]) == (10240 if parameters.get("factor") == 40.0 else 1024)
    table = rotary_table(settings, head_dim=128, max_position=length, device=CPU)
    torch.testing.assert_close(table[:, :64], cos[0, :, :64], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(table[:, 64:], sin[0, :, :64], atol=2e-5, rtol=1e-5)


def test_factors_divide_each_frequency() -> None:
    plain = inverse_frequencies(RopeSettings(1e4), 8, 100)
    scaled = inverse_frequencies(RopeSettings(1e4, "factors", factors=(1.0, 2.0, 4.0, 8.0)), 8, 100)
    torch.testing.assert_close(scaled, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))
