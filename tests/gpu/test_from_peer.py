"""Weights from a live worker's GPU: NCCL between two processes, and a second engine that starts beside a busy one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoints
import pytest
import torch
from prompts import prompts_of
from spawned import Ranks

from raylm.config.engine import EngineConfig
from raylm.core.sampling import SamplingParams
from raylm.engine.engine import Engine
from raylm.errors import TransferError
from raylm.parallel import nccl
from raylm.parallel.nccl import Communicator

LIMIT_S = 60.0
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn]
