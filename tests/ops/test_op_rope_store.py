"""raylm::rope_store."""

from __future__ import annotations

import pytest
import torch

from raylm import ops
from tests.ops.op_reference import DTYPES, close, rms_norm, rotary

pytestmark = pytest.mark.operators("rope_store")

BLOCK_SIZE = 4
NUM_BLOCKS = 6
POSITIONS = [0, 1, 31, 7, 7]
SLOTS = [5, 0, 13, 22, 7]


def _table(max_position: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.arange(max_position)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _arguments(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, *, norm: bool, dtype=torch.float32, device="cpu"
) -> dict[str, object]:
    """By name, in the operator's order: heads of one fused projection, caches that hold -1."""
    generator = torch.Generator().manual_seed(3)
    num_tokens, total = len(POSITIONS), num_heads + 2 * num_kv_heads
    fused = torch.randn(num_tokens, total, head_dim, generator=generator).to(device, dtype)
    q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    weights = (torch.randn(2, head_dim, generator=generator) + 1).to(device, dtype)
    cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim), -1.0, dtype=dtype, device=device)
    return {
        "q": q,
        "k": k,
        "v": v,
        "q_weight": weights[0] if norm else None,
        "k_weight": weights[1] if norm else None,
        "eps": 1e-5,
        "positions": torch.tensor(POSITIONS, device=device),
        "cos_sin": _table(32, rotary_dim).to(device),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "slot_mapping": torch.tensor(SLOTS, device=device),
    }


def _rotated(x: torch.Tensor, weight: torch.Tensor | None, args: dict[str, object]) -> torch.Tensor:
    return rotary(x.double() if weight is None else rms_norm(x, weight, 1e-5), args["positions"], args["cos_sin"])


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [
        (4, 2, 128, 128),
        (9, 3, 64, 64),
        (4, 1, 256, 256),
        (2, 2, 80, 80),
        (3, 1, 192, 192),
        (3, 1, 80, 20),
        (3, 1, 128, 64),
        (2, 1, 6, 6),
        (1, 1, 18, 8),
    ],
)
def test_matches_reference(op, device, norm, dtype, num_heads, num_kv_heads, head_dim, rotary_dim):
    args = _arguments(num_heads, num_kv_heads, head_dim, rotary_dim, norm=norm, dtype=dtype, device=device)
    q, v = args["q"], args["v"].clone()
    expected_q, expected_k = _rotated(q, args["q_weight"], args), _rotated(args["k"], args["k_weight"], args)
    assert op("rope_store")(*args.values()) is None
    close(q, expected_q, scale=4)
    assert torch.equal(args["v"], v)
    k_cache, v_cache = (args[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    close(k_cache[SLOTS], expected_k, scale=4)
    assert torch.equal(v_cache[SLOTS], v)
    untouched = sorted(set(range(NUM_BLOCKS * BLOCK_SIZE)) - set(SLOTS))
    assert (k_cache[untouched] == -1).all() and (v_cache[untouched] == -1).all()


def test_many_tokens(op, device):
    """More than one thread block, the last of them not full."""
    num_tokens = 133
    fused = torch.randn(num_tokens, 5, 128, generator=torch.Generator().manual_seed(4)).to(device)
    q, k, v = fused.split([3, 1, 1], dim=1)
    args = _arguments(3, 1, 128, 128, norm=True, device=device)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(5))[:num_tokens].to(device)
    cache = torch.zeros(50, BLOCK_SIZE, 1, 128, device=device)
    args |= {"q": q, "k": k, "v": v, "slot_mapping": slots, "k_cache": cache, "v_cache": cache.clone()}
    args["positions"] = torch.arange(num_tokens, device=device) % 32
    expected_q, expected_k = _rotated(q, args["q_weight"], args), _rotated(k, args["k_weight"], args)
    op("rope_store")(*args.values())
    close(q, expected_q, scale=4)
    close(args["k_cache"].flatten(0, 1)[slots], expected_k, scale=4)
    assert torch.equal(args["v_cache"].flatten(0, 1)[slots], v)


def test_caches_may_be_interleaved(op, device):
    """Keys and values of one block next to each other: the caches are strided views of one tensor."""
    args = _arguments(2, 2, 64, 64, norm=False, device=device)
    both = torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, 2, 64, device=device)
    args |= {"k_cache": both[:, 0], "v_cache": both[:, 1]}
    expected = _rotated(args["k"], None, args)
    op("rope_store")(*args.values())
    close(both[:, 0].flatten(0, 1)[SLOTS], expected)
    assert torch.equal(both[:, 1].flatten(0, 1)[SLOTS], args["v"])


def test_no_tokens(op, device):
    args = _arguments(2, 1, 64, 64, norm=True, device=device)
    for name in ("q", "k", "v", "positions", "slot_mapping"):
        args[name] = args[name][:0]
    op("rope_store")(*args.values())


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 6])
def test_a_slot_outside_the_cache_is_skipped(needs_cuda_extension, head_dim):
    """As a padded step of a CUDA graph has it: nothing is stored, the other tokens are."""
    args = _arguments(2, 1, head_dim, head_dim, norm=True, device="cuda")
    args["slot_mapping"] = torch.tensor([5, -1, 13, NUM_BLOCKS * BLOCK_SIZE, 7], device="cuda")
    torch.ops.raylm.rope_store(*args.values())
    for name in ("k_cache", "v_cache"):
        stored = (args[name].flatten(0, 1) != -1).any(-1).any(-1)
        assert stored.nonzero().flatten().tolist() == [5, 7, 13]


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_opcheck(norm):
    torch.library.opcheck(torch.ops.raylm.rope_store.default, tuple(_arguments(2, 1, 64, 64, norm=norm).values()))


def test_bad_arguments_are_named(needs_extension):
    args = _arguments(2, 1, 64, 64, norm=True)

    def fails(match: str, **changed: object) -> None:
        with pytest.raises(RuntimeError, match=match):
            ops.rope_store(*(args | changed).values())

    fails(
        r"rope_store: slot_mapping\[1\] is 24, must be at least 0 and below 24",
        slot_mapping=torch.tensor([1, 24, 0, 2, 3]),
    )
    fails(r"rope_store: positions\[0\] is 32", positions=torch.full((5,), 32))
    fails("rope_store: q_weight and k_weight must be given both or neither", k_weight=None)
    fails("rope_store: q_weight has size 63 in dimension 0, must have 64", q_weight=torch.ones(63))
    fails("rope_store: k_weight is bfloat16, must be float32", k_weight=torch.ones(64).bfloat16())
    fails("rope_store: k_cache is float16, must be float32", k_cache=args["k_cache"].half())
    fails("rope_store: v has size 4 in dimension 0, must have 5", v=args["v"][:4])
