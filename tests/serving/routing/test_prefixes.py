"""The index of what engines have cached, against the plainest one there is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.core.block_hash import HASHES, BlockKey, PrefixForm, chain, extend_keys
from raylm.core.events import BlockEvent, EventBatch, EventLog, EventSnapshot
from raylm.core.kv_cache import KVCacheManager
from raylm.core.options import RequestOptions
from raylm.core.request import Request
from raylm.core.sampling import SamplingParams
from raylm.core.step import CacheLayout
from raylm.serving.routing.prefixes import Naming, PrefixIndex, PromptKeys

FORM = PrefixForm("model", 4, "xxhash", 0)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=160)
"""Few different tokens, so that prompts share beginnings."""


def keys_of(prompt: list[int], *, epoch: int = 0, salt: str = "", adapter: str = "", limit: int = 1000) -> PromptKeys:
    return PromptKeys(prompt, Naming(FORM, epoch), adapter=adapter, salt=salt, limit=limit)


def stored(prompt: list[int], *, epoch: int = 0, group: int = 0) -> list[BlockEvent]:
    root = FORM.root(adapter="", salt="", epoch=epoch)
    hashes = chain(prompt, root, block_size=4, hash_of=HASHES["xxhash"])
    return [BlockEvent("stored", each, root, 4, group) for each in hashes]


def common(prompt: list[int], other: list[int]) -> int:
    """Whole blocks at the beginning of a prompt, but for its last token, that another one has too."""
    count = 0
    while (count + 1) * 4 < len(prompt) and prompt[: count * 4 + 4] == other[: count * 4 + 4]:
        count += 1
    return count if len(other) >= count * 4 else len(other) // 4


@given(prompts, st.text(max_size=3), st.integers(0, 3))
def test_blocks_are_named_as_engines_name_them(prompt, salt, epoch):
    root = FORM.root(adapter="", salt=salt, epoch=epoch)
    engine: list[BlockKey] = []
    extend_keys(engine, prompt, block_size=4, root=root, hash_of=HASHES["xxhash"])
    assert chain(prompt, root, block_size=4, hash_of=HASHES["xxhash"]) == [key.hash for key in engine]
    mine = keys_of(prompt, salt=salt, epoch=epoch)
    for count in (1, 3, 100):
        mine.reach(count)
        assert mine.keys == [key.hash[:8] for key in engine[: min(count, (len(prompt) - 1) // 4)]]


@given(prompts, st.lists(st.lists(prompts, max_size=4), min_size=1, max_size=4))
def test_a_prompt_matches_what_it_has_in_common_with_what_is_there(prompt, engines):
    indexes = []
    for held in engines:
        index = PrefixIndex(FORM, limit=10_000)
        index.apply(EventSnapshot(0, [event for each in held for event in stored(each)]))
        indexes.append(index)
    expected = [max((common(prompt, each) for each in held), default=0) for held in engines]
    keys = keys_of(prompt)
    assert keys.matched(indexes) == expected
    assert len(keys.keys) == min((len(prompt) - 1) // 4, max(expected) + 192)
    for limit in (1, 17):
        assert keys_of(prompt, limit=limit).matched(indexes) == [min(each, limit) for each in expected]


class Cache:
    """A real cache of few blocks, and an index that follows it."""

    def __init__(self, windows: list[int]) -> None:
        self.log = EventLog()
        self.cache = KVCacheManager(
            CacheLayout(4, windows), num_blocks=24, hash_of=HASHES["xxhash"], model="model", events=self.log
        )
        self.form = FORM._replace(group=windows.index(0))
        self.index = PrefixIndex(self.form, limit=10_000)
        self.index.apply(self.log.snapshot())
        self.epoch = 0

    def request(self, prompt: list[int]) -> Request:
        return Request(
            "r", prompt, SamplingParams(), seed=0, stop_ids=frozenset(), max_len=500, options=RequestOptions()
        )

    def serve(self, prompt: list[int]) -> None:
        request = self.request(prompt)
        request.block_ids = [[] for _ in self.cache.layout.windows]
        self.cache.attach_prefix(request)
        if self.cache.allocate(request, len(prompt) - request.num_computed) is not None:
            request.num_computed = len(prompt)
            self.cache.store_full(request)
        self.cache.free(request)

    def follow(self) -> None:
        if (batch := self.log.take()) is not None:
            self.index.apply(batch)


@settings(deadline=None)
@given(st.lists(st.one_of(prompts, st.none()), max_size=12), prompts, st.sampled_from([[0], [8, 0]]))
def test_what_is_matched_is_what_the_engine_would_find(history, prompt, windows):
    """Evictions and resets and all, where no window has closed over a part that only some groups have."""
    real = Cache(windows)
    for each in history:
        if each is None:
            real.cache.forget_prefixes()
            real.epoch += 1
        else:
            real.serve(each[:80])
        real.follow()
    assert real.index.naming.epoch == real.epoch
    keys = PromptKeys(prompt, real.index.naming, adapter="", salt="", limit=1000)
    [count] = keys.matched([real.index])
    found = real.cache.num_cached(real.request(prompt)) // 4
    assert count == found if windows == [0] else count >= found
    other = PromptKeys(prompt, real.index.naming, adapter="", salt="another", limit=1000)
    assert other.matched([real.index]) == [0]


def test_memory_is_bounded_and_a_snapshot_begins_anew():
    index = PrefixIndex(FORM, limit=5)
    first, second = stored([1] * 16), stored([2] * 16)
    index.apply(EventSnapshot(0, first))
    index.apply(EventBatch(4, second))
    assert len(index) == 5
    index.apply(EventBatch(8, [event._replace(kind="removed") for event in first]))
    assert keys_of([2] * 17).matched([index]) == [1]
    index.apply(EventBatch(12, second[1:]))
    assert keys_of([2] * 17).matched([index]) == [4]
    index.apply(EventSnapshot(0, first))
    assert keys_of([2] * 17).matched([index]) == [0] and keys_of([1] * 17).matched([index]) == [4]
    index.forget()
    assert len(index) == 0 and keys_of([1] * 17).matched([index]) == [0]


def test_blocks_of_other_groups_do_not_count():
    index = PrefixIndex(FORM, limit=100)
    index.apply(EventBatch(0, stored([1] * 16, group=1)))
    assert keys_of([1] * 17).matched([index]) == [0]


def test_what_was_sent_counts_until_its_time_is_over_or_the_cache_is_reset():
    index = PrefixIndex(FORM, limit=6)
    keys = keys_of([1] * 40)
    keys.reach(100)
    index.expect(keys.keys[:4], now=0.0, seconds=10.0)
    index.expect(keys.keys[:4], now=5.0, seconds=10.0)
    assert keys.matched([index]) == [4]
    index.expire(12.0)
    assert keys.matched([index]) == [4], "it was sent once more"
    index.expire(15.0)
    assert keys.matched([index]) == [0] and index.num_expected == 0
    index.expect(keys.keys, now=20.0, seconds=10.0)
    assert index.num_expected == 6, "the limit holds for it too"
    index.expect(keys.keys, now=25.0, seconds=10.0)
    index.expire(30.0)
    assert index.num_expected == 6 and keys.matched([index]) == [6], "those that were there have their time anew"
    index.apply(EventBatch(0, [BlockEvent("cleared", b"", b"", 0, 0)]))
    assert index.num_expected == 0 and index.naming.epoch == 1
