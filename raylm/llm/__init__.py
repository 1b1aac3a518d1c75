"""A model in this process, without HTTP: LLM for lists of prompts, LLMEngine step by step, AsyncLLM for event loops."""

from raylm.llm.async_llm import AsyncLLM
from raylm.llm.engine import LLMEngine, Metric
from raylm.llm.inputs import Message, Prompt
from raylm.llm.offline import LLM
from raylm.llm.results import Completion, Logprob, Output, RequestMetrics

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "LLMEngine",
    "Logprob",
    "Message",
    "Metric",
    "Output",
    "Prompt",
    "RequestMetrics",
]
