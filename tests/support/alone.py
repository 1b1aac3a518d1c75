"""One sequence's logits, computed in many ways: what runtime.deterministic makes equal to the bit."""

from __future__ import annotations

import torch

from raylm.models.decoder import DecoderModel
from tests.models.paged import PagedRun

NAME = "own"


def prompt_of(number: int, length: int, vocab_size: int) -> list[int]:
    """The tokens of one sequence of several, all of them different."""
    random = torch.Generator().manual_seed(number)
    return torch.randint(vocab_size, (length,), generator=random).tolist()


class Alone:
    """A sequence of a model, whose logits [length, vocab_size] each method computes over a cache of its own."""

    def __init__(self, model: DecoderModel, length: int, *, num_blocks: int, block_size: int = 16) -> None:
        self._model, self._length = model, length
        self._vocab_size = model.arch.vocab_size
        self._sizes = {"num_blocks": num_blocks, "block_size": block_size}
        self._tokens = prompt_of(0, length, self._vocab_size)

    def whole(self) -> torch.Tensor:
        """In one step, with nothing beside it."""
        return self.in_chunks(self._length)

    def in_chunks(self, size: int, *, others: int = 0) -> torch.Tensor:
        """In chunks, beside so many sequences, of another length each, that decode a token in each step."""
        run = self._run()
        lengths = {f"other {i}": 1 + 5 * i % 61 for i in range(others)}
        if others:
            run.step({name: self._other(i, length) for i, (name, length) in enumerate(lengths.items())})
        found = []
        for first in range(0, self._length, size):
            beside = {name: [7] for name in list(lengths)[: others // 2]}
            behind = {name: [8] for name in list(lengths)[others // 2 :]}
            own = {NAME: self._tokens[first : first + size]}
            found.append(run.step({**beside, **own, **behind})[NAME])
        return torch.cat(found)

    def decoded(self, prompt: int, *, others: int = 0) -> torch.Tensor:
        """`prompt` tokens in one step, beside other prompts, and then a token in each step."""
        run = self._run()
        names = {f"other {i}": 3 + 7 * i % 41 for i in range(others)}
        chunks = {name: self._other(i, length) for i, (name, length) in enumerate(names.items())}
        found = [run.step({**chunks, NAME: self._tokens[:prompt]})[NAME]]
        for token in self._tokens[prompt:]:
            found.append(run.step({NAME: [token], **{name: [9] for name in names}})[NAME])
        return torch.cat(found)

    def _other(self, number: int, length: int) -> list[int]:
        return prompt_of(1 + number, length, self._vocab_size)

    def _run(self) -> PagedRun:
        return PagedRun(self._model, dtype=self._model.dtype, **self._sizes)
