"""raylm: LLM serving native to Ray. Importing this package imports neither torch nor ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raylm.config.engine import EngineConfig
    from raylm.core.sampling import SamplingParams
    from raylm.core.structure import StructuredOutput
    from raylm.llm import LLM, AsyncLLM, LLMEngine
    from raylm.text.chat_options import ChatOptions

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatOptions",
    "EngineConfig",
    "LLMEngine",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]

_HOME = {
    "LLM": "raylm.llm",
    "AsyncLLM": "raylm.llm",
    "LLMEngine": "raylm.llm",
    "ChatOptions": "raylm.text.chat_options",
    "EngineConfig": "raylm.config.engine",
    "SamplingParams": "raylm.core.sampling",
    "StructuredOutput": "raylm.core.structure",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'raylm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
