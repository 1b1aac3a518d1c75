"""Engines of the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raylm import LLM, EngineConfig


def load(folder: Path, changes: dict[str, Any], *, max_model_len: int) -> LLM:
    """A small engine on the CPU; `changes` are settings, by section, over its own."""
    settings: dict[str, Any] = {
        "model": {"path": str(folder), "max_model_len": max_model_len},
        "cache": {"block_size": 4, "num_blocks": 400},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
        "runtime": {"device": "cpu"},
    }
    for section, values in changes.items():
        settings[section] = {**settings.get(section, {}), **values}
    return LLM(EngineConfig.model_validate(settings), progress=False)
