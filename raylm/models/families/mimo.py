"""MiMo-7B: a Qwen2 with a layer for multi-token prediction (MTP), which speculative decoding drafts with."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.families.qwen import DEFAULTS, read_qwen2
from raylm.models.family import Family
from raylm.models.fields import Fields


def _read(fields: Fields) -> ArchConfig:
    name = "num_nextn_predict_layers"
    return replace(read_qwen2(fields), mtp_layers=fields.integer(name) if fields.get(name) else 0)


ARCHITECTURES = {
    "MiMoForCausalLM": Family(read=_read, defaults=DEFAULTS, model="raylm.models.mtp:MtpDecoder"),
}
