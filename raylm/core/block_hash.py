"""Names for prefixes: each full block is hashed together with the hash of the block before it.

Besides tokens, a name covers what holds for a whole sequence (root_hash: the model, an adapter, a salt) and extra bytes
of single blocks (extend_keys: what media stand at placeholder tokens).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from struct import iter_unpack
from typing import NamedTuple

from xxhash import xxh3_128_digest

from raylm.config.engine import BlockHash

Hash = Callable[[bytes], bytes]
_TOKEN_BYTES = 4


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


HASHES: dict[BlockHash, Hash] = {"xxhash": xxh3_128_digest, "sha256": _sha256}


class BlockKey(NamedTuple):
    """A full block's name. `content` is what was hashed: the parent's hash, the block's tokens, then `num_extra` extra
    bytes."""

    hash: bytes
    content: bytes
    parent: bytes
    num_extra: int = 0

    @property
    def tokens(self) -> bytes:
        """Four bytes each."""
        return self.content[len(self.parent) : len(self.content) - self.num_extra]

    @property
    def num_tokens(self) -> int:
        return (len(self.content) - len(self.parent) - self.num_extra) // _TOKEN_BYTES


def root_hash(hash_of: Hash, *, model: str, adapter: str, salt: str, epoch: int = 0) -> bytes:
    """The parent of a sequence's first block: what must be equal besides the tokens, for all blocks of a sequence.
    `adapter` names an adapter and its version, "" for none. `epoch` counts the times that the cache was reset."""
    return hash_of(repr((model, adapter, salt, epoch)).encode())


class PrefixForm(NamedTuple):
    """How an engine names its blocks: with this, and the epoch, anybody can name those of a prompt.

    model: the model's path, as root_hash takes it. group: the cache group whose blocks say how much of a prefix is
    there: the first that keeps all positions.
    """

    model: str
    block_size: int
    block_hash: BlockHash
    group: int

    def root(self, *, adapter: str, salt: str, epoch: int) -> bytes:
        return root_hash(HASHES[self.block_hash], model=self.model, adapter=adapter, salt=salt, epoch=epoch)


def chain(token_ids: Sequence[int], parent: bytes, *, block_size: int, hash_of: Hash) -> list[bytes]:
    """The hashes alone of the full blocks of `token_ids`, of which the first follows `parent`."""
    data, size = array("I", token_ids).tobytes(), block_size * _TOKEN_BYTES
    blocks = iter_unpack(f"{size}s", data[: len(data) // size * size])
    return [parent := hash_of(parent + block) for (block,) in blocks]


def extend_keys(
    keys: list[BlockKey],
    token_ids: list[int],
    *,
    block_size: int,
    root: bytes,
    hash_of: Hash,
    extra: Mapping[int, bytes] | None = None,
) -> None:
    """Add the keys of the full blocks of `token_ids` that `keys` lacks.

    extra[i] names what block i holds that its tokens do not tell, such as the digest of an image whose placeholder
    tokens begin or go on there. It counts for block i and all blocks behind it; blocks before it are shared.
    """
    first, last = len(keys), len(token_ids) // block_size
    if first >= last:
        return
    data = array("I", token_ids[first * block_size : last * block_size]).tobytes()
    size = block_size * _TOKEN_BYTES
    parent = keys[-1].hash if keys else root
    for start in range(0, len(data), size):
        more = extra.get(len(keys), b"") if extra else b""
        content = parent + data[start : start + size] + more
        digest = hash_of(content)
        keys.append(BlockKey(digest, content, parent, len(more)))
        parent = digest
