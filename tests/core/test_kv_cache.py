"""Prefix caching, sharing, eviction, swapping and sliding windows, each in a case small enough to count by hand."""

from __future__ import annotations

from array import array

import pytest

from raylm.core.block_hash import HASHES, BlockKey, extend_keys, root_hash
from raylm.core.block_pool import BlockPool
from raylm.core.events import EventLog
from raylm.core.kv_cache import KVCacheManager, SwapCosts
from raylm.core.options import RequestOptions
from raylm.core.request import Request
from raylm.core.sampling import SamplingParams
from raylm.core.step import CacheLayout

BLOCK = 4


def make_cache(num_blocks=16, *, windows=(0,), hash_of=HASHES["xxhash"], **others) -> KVCacheManager:
    return KVCacheManager(CacheLayout(BLOCK, list(windows)), num_blocks=num_blocks, hash_of=hash_of, **others)


def make_request(tokens, *, salt="", num_groups=1) -> Request:
    request = Request(
        "r",
        list(tokens),
        SamplingParams(),
        seed=0,
        stop_ids=frozenset(),
        max_len=1000,
        options=RequestOptions(cache_salt=salt),
    )
    request.block_ids = [[] for _ in range(num_groups)]
    return request


def computed(cache, tokens, **others) -> Request:
    """A request whose tokens have all been computed, from what the cache had of them."""
    request = make_request(tokens, **others)
    cache.attach_prefix(request)
    assert cache.allocate(request, len(tokens) - request.num_computed) == []
    request.num_computed = len(tokens)
    cache.store_full(request)
    return request


def hit(cache, tokens, **others) -> int:
    """Tokens that a newcomer would find."""
    request = make_request(tokens, **others)
    cache.attach_prefix(request)
    found = request.num_computed
    cache.free(request)
    return found


def test_a_prefix_is_found_in_whole_blocks_and_never_to_its_last_token():
    cache = make_cache()
    computed(cache, range(10))
    assert hit(cache, range(10)) == 8
    assert hit(cache, [*range(9), 99]) == 8
    assert hit(cache, range(8)) == 4, "the last token is computed, so that something is sampled"
    assert hit(cache, range(9)) == 8
    assert hit(cache, range(1, 10)) == 0
    assert hit(cache, [*range(5), 99, 98, 97, 96]) == 4


def test_blocks_are_shared_while_in_use_and_found_after_their_end():
    cache = make_cache()
    first = computed(cache, range(9))
    free = cache.num_free
    second = computed(cache, range(9))
    assert second.block_ids[0][:2] == first.block_ids[0][:2]
    assert cache.num_free == free - 1
    cache.free(first)
    cache.free(second)
    assert cache.usage == 0
    assert hit(cache, range(9)) == 8


def test_the_least_recently_used_goes_first_and_of_a_request_its_tail():
    cache = make_cache(num_blocks=8)
    cache.free(computed(cache, range(12)))
    cache.free(computed(cache, range(100, 112)))
    # 7 blocks: one was never used, six are kept. Three more take that one and the tail of the first request.
    other = computed(cache, range(200, 212))
    assert hit(cache, range(13)) == 4
    assert hit(cache, range(100, 113)) == 12
    cache.free(other)


@pytest.mark.parametrize("name", ["xxhash", "sha256"])
def test_two_salts_never_share(name):
    cache = make_cache(hash_of=HASHES[name])
    cache.free(computed(cache, range(9), salt="a"))
    assert hit(cache, range(9), salt="a") == 8
    assert hit(cache, range(9), salt="b") == 0
    assert hit(cache, range(9)) == 0


def test_equal_hashes_of_different_tokens_are_no_hit():
    cache = make_cache(hash_of=lambda data: b"same")
    cache.free(computed(cache, range(5)))
    assert hit(cache, range(5)) == 4
    assert hit(cache, range(1, 6)) == 0


def test_a_known_prefix_is_not_hashed_again():
    calls = []

    def counting(data: bytes) -> bytes:
        calls.append(data)
        return HASHES["xxhash"](data)

    cache = make_cache(hash_of=counting)
    request = make_request(range(13))
    for _ in range(3):
        cache.attach_prefix(request)
        cache.free(request)
    assert len(calls) == 4, "the root and three blocks"


def test_keys_depend_on_everything_before_them():
    hash_of = HASHES["xxhash"]
    roots = {root_hash(hash_of, model=m, adapter=a, salt=s) for m in "ab" for a in "ab" for s in "ab"}
    assert len(roots) == 8
    keys = []
    extend_keys(keys, [1] * 8, block_size=BLOCK, root=b"root", hash_of=hash_of)
    assert keys[0].hash != keys[1].hash
    assert keys[1].parent == keys[0].hash
    assert keys[0].num_tokens == BLOCK


@pytest.mark.parametrize("name", HASHES)
def test_extra_bytes_of_a_block_count_from_it_on(name):
    def keys_of(tokens, extra):
        keys: list[BlockKey] = []
        # In two calls, as a sequence grows.
        for count in (6, len(tokens)):
            extend_keys(keys, tokens[:count], block_size=BLOCK, root=b"root", hash_of=HASHES[name], extra=extra)
        return keys

    def shared(extra, other) -> list[bool]:
        pairs = zip(keys_of([1] * 13, extra), keys_of([1] * 13, other), strict=True)
        equal = [(one.hash == two.hash, one == two) for one, two in pairs]
        assert all(hashes == keys for hashes, keys in equal)
        return [hashes for hashes, _ in equal]

    assert shared({1: b"cat"}, {1: b"cat"}) == [True, True, True]
    assert shared({1: b"cat"}, {1: b"dog"}) == shared({1: b"cat"}, {}) == [True, False, False]
    assert shared({2: b"cat"}, {1: b"cat"}) == [True, False, False]
    assert shared({}, None) == shared({3: b"cat"}, {}) == [True, True, True]
    # Bytes that look like a token are none: a block has as many tokens as any.
    assert keys_of([1] * 8, {0: bytes(4)})[0].hash != keys_of([*[1] * 4, 0, *[1] * 3], {})[0].hash
    for key in keys_of([1] * 8, {1: b"cat"}):
        assert key.num_tokens == BLOCK and key.tokens == array("I", [1] * BLOCK).tobytes()


def test_a_block_is_found_with_its_own_extra_bytes_only():
    pool = BlockPool(4)
    keys: list[BlockKey] = []
    # Equal hashes: what was hashed decides.
    for image in (b"cat", b"dog"):
        found: list[BlockKey] = []
        extend_keys(found, [1] * 4, block_size=BLOCK, root=b"", hash_of=lambda data: b"same", extra={0: image})
        keys += found
    pool.store(0, pool.take(1)[0], keys[0])
    assert pool.find(0, keys[0]) == 1 and pool.find(0, keys[1]) is None


def test_without_prefix_caching_nothing_is_found():
    cache = make_cache(hash_of=None)
    cache.free(computed(cache, range(9)))
    assert hit(cache, range(9)) == 0


def test_a_fork_copies_only_the_block_that_it_writes_into():
    cache = make_cache()
    parent = computed(cache, range(10))
    child = make_request(range(10))
    cache.fork(parent, child, 9)
    assert child.block_ids == parent.block_ids
    copies = cache.allocate(child, 1)
    assert copies == [(parent.block_ids[0][2], child.block_ids[0][2])]
    assert child.block_ids[0][:2] == parent.block_ids[0][:2]


def test_the_last_holder_of_a_forked_block_writes_in_place():
    cache = make_cache()
    parent = computed(cache, range(10))
    child = make_request(range(10))
    cache.fork(parent, child, 9)
    cache.free(parent)
    assert cache.allocate(child, 1) == []


def test_a_forked_block_that_can_be_found_is_copied_even_by_its_last_holder():
    cache = make_cache()
    parent = computed(cache, range(12))
    child = make_request(range(10))
    cache.fork(parent, child, 9)
    cache.free(parent)
    assert len(cache.allocate(child, 1)) == 1
    assert hit(cache, range(13)) == 12


def test_a_sliding_window_gives_back_what_it_has_left():
    cache = make_cache(num_blocks=40, windows=(0, 6))
    request = make_request(range(20), num_groups=2)
    assert cache.allocate(request, 20) == []
    request.num_computed = 20
    cache.allocate(request, 1)
    full, sliding = request.block_ids
    assert 0 not in full
    assert sliding[:3] == [0, 0, 0], "positions 0 to 14 are out of a window of 6 that ends at 20"
    assert all(sliding[3:])


def test_gemma_3_holds_a_quarter_of_the_memory_for_its_windows():
    # 18 layers: 15 with a window of 512, 3 full; in blocks of 3 layers, or of all 18 as one kind.
    grouped = CacheLayout(16, [0, 512, 512, 512, 512, 512]).blocks_for(8192, chunk=512) * 3
    alike = CacheLayout(16, [0]).blocks_for(8192, chunk=512) * 18
    assert grouped / alike < 0.29


def test_a_prefix_with_a_window_needs_only_the_window_before_its_end():
    cache = make_cache(num_blocks=40, windows=(6,))
    request = computed(cache, range(20))
    cache.allocate(request, 1)
    request.num_computed = 21
    cache.free(request)
    # The first blocks were given back first, but nobody took them yet: all are found.
    assert hit(cache, range(20)) == 16
    taken = make_request(range(900, 930))
    assert cache.allocate(taken, 30 * BLOCK) == []
    cache.free(taken)
    assert hit(cache, range(21)) in (16, 20)


def test_swapping_is_chosen_by_its_cost():
    assert not SwapCosts().prefers_swap(1000, 1)
    costs = SwapCosts(block_bytes=1000, prefill_tokens_per_s=100.0, swap_bytes_per_s=10_000.0)
    # 10 blocks: 2 s to copy out and in. 100 tokens take 1 s to compute, 300 take 3 s.
    assert not costs.prefers_swap(100, 10)
    assert costs.prefers_swap(300, 10)


def test_swapped_blocks_come_back():
    costs = SwapCosts(1, 1.0, 1e9)
    cache = make_cache(num_host_blocks=3, swap_costs=costs)
    request = computed(cache, range(10))
    device = request.block_ids[0]
    out = cache.swap_out(request)
    assert [block for block, _ in out] == device
    assert request.block_ids == [[]]
    assert request.num_computed == 10
    back = cache.swap_in(request, 4, reserve=0)
    assert [host for host, _ in back] == [host for _, host in out]
    assert [block for _, block in back] == request.block_ids[0][:3]
    assert len(request.block_ids[0]) == 4
    assert cache.swap_out(computed(cache, range(50, 66))) is None, "4 blocks do not fit in 3"


def test_events_tell_what_can_be_found():
    events = EventLog()
    cache = make_cache(num_blocks=5, events=events)
    cache.free(computed(cache, range(9)))
    batch = events.take()
    assert [event.kind for event in batch.events] == ["stored", "stored"]
    assert batch.events[1].parent_hash == batch.events[0].block_hash
    assert events.take() is None
    computed(cache, range(50, 66))
    second = events.take()
    assert second.first == 2
    assert [event.kind for event in second.events] == ["removed", "removed"] + ["stored"] * 4
    snapshot = events.snapshot()
    assert snapshot.next == 8
    assert len(snapshot.stored) == 4
    cache.forget_prefixes()
    assert [event.kind for event in events.take().events] == ["cleared"]
    assert events.snapshot().stored == []
    assert hit(cache, range(50, 66)) == 0
