"""Tokenizers shared by the tests of raylm.text."""

from __future__ import annotations

import pytest

from raylm.config.source import ModelSource, locate
from raylm.text.processor import TextProcessor


@pytest.fixture(scope="session")
def smollm_source(demo: None) -> ModelSource:
    return locate("smollm2-135m")


@pytest.fixture(scope="session")
def smollm(smollm_source, tmp_path_factory) -> TextProcessor:
    """SmolLM2's own tokenizer and chat template."""
    return TextProcessor.load(smollm_source, cache_dir=tmp_path_factory.mktemp("tokenizers"))
