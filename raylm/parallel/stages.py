"""What pipeline stages pass on: hidden states to the next stage, sampled tokens from the last one to all others.

Each direction has a communicator of its own, and its sends a stream. A stage goes on to its next step while what it
made is on its way, and a send that waits for its receiver holds up nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class StageLinks:
    """One rank's links to the ranks of other stages that have its tensor rank.

    Receives wait on the device's stream, not on the host; on a CPU they wait.
    """

    def __init__(
        self, ranks: Sequence[int], stage: int, *, onward: ProcessGroup, back: ProcessGroup, device: torch.device
    ) -> None:
        """`ranks` are the ranks of all stages, first to last; `onward` and `back` are groups of these."""
        self._device = device
        make = _CudaLink if device.type == "cuda" else _HostLink
        if stage > 0:
            self._from_before = make(onward, ranks[stage - 1])
        if stage < len(ranks) - 1:
            self._to_next = make(onward, ranks[stage + 1])
        is_last = stage == len(ranks) - 1
        self._tokens = [make(back, rank) for rank in (ranks[:-1] if is_last else ranks[-1:])]

    def send_hidden(self, hidden: Tensor) -> None:
        """To the next stage. Nobody may write into `hidden` any more."""
        self._to_next.send(hidden)

    def receive_hidden(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """From the stage before: [num_tokens, hidden_size]."""
        return self._from_before.receive((num_tokens, hidden_size), dtype, self._device)

    def send_tokens(self, token_ids: Tensor) -> None:
        """From the last stage to all others: int64 [count]. Nobody may write into it any more."""
        for link in self._tokens:
            link.send(token_ids)

    def receive_tokens(self, count: int) -> Tensor:
        """At any stage but the last: int64 [count], in the order in which they were sent."""
        return self._tokens[0].receive((count,), torch.int64, self._device)


class _CudaLink:
    """One peer over NCCL: sends are on a stream beside the one that computes."""

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._stream = torch.cuda.Stream()

    def send(self, x: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            dist.send(x, self._peer, group=self._group)
        x.record_stream(self._stream)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        # In the stream that computes, so that it begins when what is queued there is done. A receive that waits for its
        # sender beside a step holds multiprocessors, and a kernel made for all of them then takes twice its time.
        x = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(x, self._peer, group=self._group)
        return x


class _HostLink:
    """One peer over gloo: sends are kept until they are through, at most one for each stage."""

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._depth = dist.get_world_size(group)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        # gloo says that a send is through only to who waits for it. The peer takes the oldest in time: no stage is more
        # steps ahead of another than there are stages.
        if len(self._sent) == self._depth:
            self._sent.popleft()[0].wait()
        work = dist.isend(x, self._peer, group=self._group)
        assert work is not None, "a rank sends to another one"
        self._sent.append((work, x))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(x, self._peer, group=self._group)
        return x
