"""What the cache holds back: slots of blocks that requests have and that hold no token of theirs."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from raylm.core.sampling import SamplingParams
from tests.support.engines import make_engine
from tests.support.fakes import FakeExecutor

_BLOCK = 16


@pytest.mark.parametrize("num_blocks", [600, 4000], ids=["under pressure", "with room"])
def test_requests_of_chats_waste_less_than_4_percent(num_blocks: int) -> None:
    """Prompts and answers as long as ShareGPT's on average (arXiv:2309.06180: 161 and 338 tokens), 32 at a time."""
    executor = FakeExecutor(num_blocks=num_blocks, block_size=_BLOCK, max_model_len=4096)
    engine = make_engine(executor, window=2, max_num_seqs=32, budget=512, prefix_caching=False)
    draw, shares = random.Random(0), []
    for number in range(60):
        prompt = [draw.randrange(1, 40) for _ in range(1 + min(2000, int(draw.expovariate(1 / 161))))]
        params = SamplingParams(
            temperature=0, max_tokens=1 + min(2000, int(draw.expovariate(1 / 338))), ignore_eos=True
        )
        engine.add([str(number)], prompt, params)
    scheduler = engine._scheduler
    while engine.has_work:
        engine.step()
        cache = scheduler._cache
        held = (cache.num_usable - cache.num_free) * _BLOCK
        used = sum(request.num_computed for request in scheduler._running)
        if len(scheduler._running) > 8:
            shares.append((held, used))
    waste = 1 - sum(used for _, used in shares) / sum(held for held, _ in shares)
    assert mean(held for held, _ in shares) > 300 * _BLOCK, "few blocks were in use"
    assert 0 < waste < 0.04
    if num_blocks == 600:
        assert engine.stats().num_preemptions > 0
    engine.shutdown()
