"""How long a step takes on the simulated device."""

from __future__ import annotations

import math
from typing import NamedTuple

from raylm.errors import ConfigError


class DeviceCost(NamedTuple):
    """Seconds of one step, linear in what it does: `fixed` (reading the weights, launching kernels), for each prefill
    token, for each decode row, and for each token of context whose keys and values it reads."""

    fixed: float
    prefill: float
    decode: float
    context: float

    def seconds(self, num_prefill: int, num_decode: int, num_context: int) -> float:
        return self.fixed + self.prefill * num_prefill + self.decode * num_decode + self.context * num_context


PRESETS = {
    # Fitted to vLLM 0.26 with Llama-3.1-8B in bfloat16 on one H200: 4.97 ms a token for one request, 5.87 for 32,
    # 13.6 for 256 (128 in, 256 or 512 out), and 41,410 tokens/s of prefill (4,096 in).
    "h200-8b": DeviceCost(4.85e-3, 23.5e-6, 22e-6, 31e-9)
}


def parse_cost(text: str) -> DeviceCost:
    """A preset's name, or `fixed_ms:prefill_us:decode_us:context_ns`. Raises ConfigError."""
    if text in PRESETS:
        return PRESETS[text]
    try:
        fixed_ms, prefill_us, decode_us, context_ns = (float(part) for part in text.split(":"))
    except ValueError:
        raise _refusal(text) from None
    cost = DeviceCost(fixed_ms / 1e3, prefill_us / 1e6, decode_us / 1e6, context_ns / 1e9)
    if not (cost.fixed > 0 and all(0 <= part < math.inf for part in cost)):
        raise _refusal(text)
    return cost


def _refusal(text: str) -> ConfigError:
    return ConfigError(
        f"--cost {text!r} must be {', '.join(PRESETS)} or fixed_ms:prefill_us:decode_us:context_ns, four numbers of at "
        "least 0, the first over 0, such as 4.85:23.5:22:31"
    )
