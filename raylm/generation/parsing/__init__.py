"""Tool calls and reasoning in a model's text: formats as data, one streaming reader for all of them."""

from raylm.generation.parsing.families import ModelFormat, model_format
from raylm.generation.parsing.formats import CallFormat, ReasoningFormat
from raylm.generation.parsing.reader import OutputReader, OutputReading

__all__ = ["CallFormat", "ModelFormat", "OutputReader", "OutputReading", "ReasoningFormat", "model_format"]
