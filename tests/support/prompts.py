"""Random prompts that often share a beginning."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.support.fakes import VOCAB

stems = ([1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16], [1, 2, 3, 4, 20, 21, 22, 23, 24, 25])
tails = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=8)
prompts = st.builds(lambda stem, length, tail: stem[:length] + tail, st.sampled_from(stems), st.integers(0, 15), tails)
