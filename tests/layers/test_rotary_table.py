"""The angles of every kind of rotary embedding equal those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from raylm.layers.rope_settings import RopeSettings
from raylm.layers.rotary import inverse_frequencies, rotary_table

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


def test_factors_divide_each_frequency() -> None:
    plain = inverse_frequencies(RopeSettings(1e4), 8)
    scaled = inverse_frequencies(RopeSettings(1e4, "factors", factors=(1.0, 2.0, 4.0, 8.0)), 8)
    torch.testing.assert_close(scaled, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))
