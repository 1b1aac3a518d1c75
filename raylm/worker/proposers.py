"""Drafts made on the device, by a model beside the target: a draft model, an EAGLE-3 head, or the target's MTP layer.

A proposer computes the tokens that the target computes, at the same positions and in the same cache slots: `absorb`
after a step. So block tables, shared prefixes, forks, swapping and preemption hold for its keys and values as for
the target's. A step that verifies drafts has them made when it begins, by `draft`, which runs ahead from the row's last
known token. Drafts are the likeliest tokens; they change the time that tokens take, never the tokens.

An EAGLE-3 head and an MTP layer read the token behind each position too. So in a block that requests share, their last
position may have been computed for another request's next token: such a draft may be worse, and costs nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from raylm.layers.attention import AttentionMetadata, KVCache, LayerInput
from raylm.layers.attention_backends import AttentionBackend
from raylm.models.decoder import DecoderModel
from raylm.models.eagle3 import Eagle3Head
from raylm.models.mtp import MtpDecoder
from raylm.models.taps import HiddenTaps


class Rows(Protocol):
    """The requests' rows on the device, as a proposer reads them; RequestTable has them. The last row is padding."""

    token_ids: Tensor
    """int32 [rows, tokens]: drafts are written behind a row's known tokens."""
    block_table: Tensor
    """int32 [groups, rows, columns]."""
    num_known: Tensor
    """int64 [rows]."""
    arrivals: Tensor
    """As AttentionMetadata has them."""
    block_size: int


class StepTokens(NamedTuple):
    """What the target has computed in a step, on the device: T tokens of S sequences."""

    token_ids: Tensor
    token_rows: Tensor
    positions: Tensor
    """Of each token: itself, its row and its position, int64 [T]."""
    rows: Tensor
    """int64 [S]: the row of each sequence. The padding row may be there several times."""
    attention: AttentionMetadata
    """Of the cache group whose blocks keep every token."""


class DeviceProposer(ABC):
    """Drafts for rows of a table; `caches` are the keys and values of its layers, `group` is the cache group of their
    blocks, which must keep every token."""

    IS_LAZY: ClassVar[bool] = False
    """Whether a step of decodes may be absorbed later, up to the row's next drafts: all but the token before its last
    known one, which `draft` computes anew."""

    def __init__(self, rows: Rows, caches: list[KVCache], *, group: int) -> None:
        self._rows = rows
        self._caches = caches
        self._group = group

    @abstractmethod
    def absorb(self, step: StepTokens) -> None:
        """Compute a step's tokens, once the table holds what the step sampled and the counts that follow from it."""

    @abstractmethod
    def draft(self, rows: Tensor, counts: Tensor, most: int, *, max_seq_len: int) -> None:
        """Write drafts into the table: counts[i] of them (int64 [S], at most `most`) behind the known tokens of row
        rows[i] (int64 [S]).

        Their blocks must be in the table for as many tokens as the step computes that verifies them. A row must have
        sampled a token, and been absorbed since. `max_seq_len`: tokens of no row's sequence are more, drafts
        included.
        """

    def _ahead(self, rows: Tensor, max_seq_len: int) -> _Ahead:
        columns = -(-max_seq_len // self._rows.block_size)
        blocks = self._rows.block_table[self._group, :, :columns].index_select(0, rows)
        return _Ahead(blocks, self._rows.block_size, max_seq_len, self._rows.arrivals)

    def _write(self, rows: Tensor, counts: Tensor, drafts: list[Tensor]) -> None:
        """Put drafts [S] each into the cells of rows, in order, the first counts[i] of them."""
        token_ids, known = self._rows.token_ids, self._rows.num_known.index_select(0, rows)
        padding, width = len(token_ids) - 1, token_ids.shape[1]
        for number, tokens in enumerate(drafts):
            cells = known + number
            writes = (counts > number) & (cells < width)
            # What is not written goes to the padding row's first cell, which keeps what it has.
            values = torch.where(writes, tokens.int(), token_ids[padding, 0])
            token_ids.index_put_((torch.where(writes, rows, padding), torch.where(writes, cells, 0)), values)


class _Ahead:
    """Tokens of some sequences, up to their last known one and past it."""

    def __init__(self, blocks: Tensor, block_size: int, max_seq_len: int, arrivals: Tensor) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._max_seq_len = max_seq_len
        self._arrivals = arrivals
        self._query_start = torch.arange(len(blocks) + 1, dtype=torch.int32, device=blocks.device)

    def pairs_at(self, positions: Tensor, real: Tensor) -> tuple[Tensor, AttentionMetadata]:
        """As `at`, for two tokens a sequence: the one before the position and the one there, [2 S]. The position of a
        `real` one is over 0."""
        positions = torch.where(real, positions.clamp(1, self._max_seq_len - 1), 1)
        pairs = torch.stack((positions - 1, positions), dim=1)
        slots = self._slots(pairs, real.unsqueeze(1)).flatten()
        lengths = (positions + 1).int()
        return pairs.flatten(), self._meta(self._query_start * 2, lengths, slots, 2)

    def at(self, positions: Tensor, real: Tensor) -> tuple[Tensor, AttentionMetadata]:
        """Positions within the limits and the metadata of one token at each, [S]; one that is not `real` goes to the
        padding block, and sees one token."""
        positions = positions.clamp(0, self._max_seq_len - 1)
        slots = self._slots(positions.unsqueeze(1), real.unsqueeze(1)).flatten()
        lengths = torch.where(real, positions + 1, 1).int()
        return positions, self._meta(self._query_start, lengths, slots, 1)

    def _slots(self, positions: Tensor, real: Tensor) -> Tensor:
        """Slots of positions [S, n]; those that are not real are in the padding block."""
        blocks = self._blocks.gather(1, positions // self._block_size).long()
        return torch.where(real, blocks, 0) * self._block_size + positions % self._block_size

    def _meta(self, query_start: Tensor, lengths: Tensor, slots: Tensor, query_len: int) -> AttentionMetadata:
        most = self._max_seq_len
        return AttentionMetadata(query_start, lengths, self._blocks, slots, query_len, most, self._arrivals)


class DraftModelProposer(DeviceProposer):
    """A smaller model of the same tokenizer. It can absorb tokens whenever it likes, for it needs nothing else."""

    IS_LAZY = True

    def __init__(
        self, model: DecoderModel, rows: Rows, caches: list[KVCache], *, group: int, target_vocab_size: int
    ) -> None:
        super().__init__(rows, caches, group=group)
        self._model = model
        # Models of one tokenizer may pad their vocabularies to different sizes.
        self._vocab_size = min(model.arch.vocab_size, target_vocab_size)

    def absorb(self, step: StepTokens) -> None:
        self._run(step.token_ids, step.positions, step.attention)

    def draft(self, rows: Tensor, counts: Tensor, most: int, *, max_seq_len: int) -> None:
        ahead = self._ahead(rows, max_seq_len)
        last = self._rows.num_known.index_select(0, rows) - 1
        positions, meta = ahead.pairs_at(last, counts > 0)
        known = self._rows.token_ids[rows.repeat_interleave(2), positions].long()
        drafts = [self._likeliest(self._run(known, positions, meta)[1::2])]
        for number in range(1, most):
            positions, meta = ahead.at(last + number, counts > number)
            drafts.append(self._likeliest(self._run(drafts[-1], positions, meta)))
        self._write(rows, counts, drafts)

    def _likeliest(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)[:, : self._vocab_size].argmax(dim=-1)

    def _run(self, tokens: Tensor, positions: Tensor, meta: AttentionMetadata) -> Tensor:
        planned = self._model.attention.plan(meta)
        step = [LayerInput(positions, cache, planned) for cache in self._caches]
        hidden: Tensor = self._model(tokens.clamp(max=self._model.arch.vocab_size - 1), step)
        return hidden


class HeadProposer(DeviceProposer):
    """A head over the target's hidden states. At a position it reads the state there and the token one position on, so
    the first draft comes from the state that `absorb` has kept of the last position before a row's last known token,
    each other one from the one before. `absorb` itself only writes keys and values: a third of the head's weights."""

    def __init__(
        self,
        rows: Rows,
        caches: list[KVCache],
        taps: HiddenTaps,
        attention: AttentionBackend,
        *,
        group: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """`attention` is what the head's layer attends by."""
        super().__init__(rows, caches, group=group)
        self._taps = taps
        self._plan = attention.plan
        shape = (len(rows.token_ids), hidden_size)
        self._states = torch.zeros(shape, dtype=dtype, device=rows.token_ids.device)
        """What the head reads of each row at its last position that counts."""

    @abstractmethod
    def _fuse(self, hidden: Tensor) -> Tensor:
        """The head's states from what the taps hold, both [T, ...]."""

    @abstractmethod
    def _run(self, token_ids: Tensor, states: Tensor, step: LayerInput) -> tuple[Tensor, Tensor]:
        """Normed states, and states for the position behind, [T, hidden_size] each; token_ids are one position on."""

    @abstractmethod
    def _remember(self, token_ids: Tensor, states: Tensor, step: LayerInput) -> None:
        """Write the keys and values that `_run` would."""

    @abstractmethod
    def _likeliest(self, normed: Tensor) -> Tensor:
        """The likeliest tokens, [S]."""

    def absorb(self, step: StepTokens) -> None:
        token_ids = self._rows.token_ids
        following = token_ids[step.token_rows, (step.positions + 1).clamp_(max=token_ids.shape[1] - 1)].long()
        fused = self._fuse(self._taps.take(len(step.token_ids)))
        self._remember(following, fused, LayerInput(step.positions, self._caches[0], step.attention))
        start = step.attention.query_start.long()
        first, last = start[:-1], start[1:] - 1
        # Drafts that were rejected come after the last position that counts.
        accepted = first + self._rows.num_known.index_select(0, step.rows) - 2 - step.positions.index_select(0, first)
        index = torch.minimum(torch.maximum(accepted, first), last)
        self._states.index_copy_(0, step.rows, fused.index_select(0, index))

    def draft(self, rows: Tensor, counts: Tensor, most: int, *, max_seq_len: int) -> None:
        ahead = self._ahead(rows, max_seq_len)
        last = self._rows.num_known.index_select(0, rows) - 1
        tokens, states = self._rows.token_ids[rows, last].long(), self._states.index_select(0, rows)
        drafts = []
        for number in range(most):
            positions, meta = ahead.at(last - 1 + number, counts > number)
            normed, states = self._run(tokens, states, LayerInput(positions, self._caches[0], self._plan(meta)))
            tokens = self._likeliest(normed)
            drafts.append(tokens)
        self._write(rows, counts, drafts)


class Eagle3Proposer(HeadProposer):
    """An EAGLE-3 head; the taps are those of its target layers."""

    def __init__(
        self, head: Eagle3Head, rows: Rows, caches: list[KVCache], taps: HiddenTaps, *, group: int, dtype: torch.dtype
    ) -> None:
        hidden_size = head.arch.hidden_size
        super().__init__(rows, caches, taps, head.attention, group=group, hidden_size=hidden_size, dtype=dtype)
        self._head = head

    def _fuse(self, hidden: Tensor) -> Tensor:
        return self._head.fuse(hidden)

    def _run(self, token_ids: Tensor, states: Tensor, step: LayerInput) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._head(token_ids, states, step)
        return found

    def _remember(self, token_ids: Tensor, states: Tensor, step: LayerInput) -> None:
        self._head.remember(token_ids, states, step)

    def _likeliest(self, normed: Tensor) -> Tensor:
        return self._head.draft(normed)


class MtpProposer(HeadProposer):
    """The target's own MTP layer; the tap is that of its last norm."""

    def __init__(self, model: MtpDecoder, rows: Rows, caches: list[KVCache], taps: HiddenTaps, *, group: int) -> None:
        size, dtype = model.arch.hidden_size, model.dtype
        super().__init__(rows, caches, taps, model.attention, group=group, hidden_size=size, dtype=dtype)
        self._model = model

    def _fuse(self, hidden: Tensor) -> Tensor:
        return hidden

    def _run(self, token_ids: Tensor, states: Tensor, step: LayerInput) -> tuple[Tensor, Tensor]:
        embedded = self._model.embed_tokens(token_ids)
        normed = self._model.mtp.predict(embedded, states, step)
        return normed, normed

    def _remember(self, token_ids: Tensor, states: Tensor, step: LayerInput) -> None:
        embedded = self._model.embed_tokens(token_ids)
        self._model.mtp.remember(embedded, states, step)

    def _likeliest(self, normed: Tensor) -> Tensor:
        return self._model.logits(normed).argmax(dim=-1)
