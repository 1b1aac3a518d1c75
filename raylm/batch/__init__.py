"""Batch inference on Ray Data: files by `python -m raylm.batch`, datasets by `processor`."""

from raylm.batch.pipeline import Processor, processor

__all__ = ["Processor", "processor"]
