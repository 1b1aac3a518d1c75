"""Speculative decoding, the host's side: who proposes drafts, and how many of them a step verifies.

A proposer guesses a request's next tokens. A step computes the guesses (here: drafts) beside the request's last known
token, samples every position, and keeps the drafts that equal the sampled tokens. So the output never depends on the
drafts; only the time does (Leviathan et al., arXiv:2211.17192).
"""

from raylm.core.speculation.drafter import RequestDrafter, make_drafter
from raylm.core.speculation.lengths import DraftLengths
from raylm.core.speculation.ngram import NgramProposer
from raylm.core.speculation.proposer import Drafts, Proposer
from raylm.core.speculation.replay import ReplayProposer
from raylm.core.speculation.speculation import Speculation
from raylm.core.speculation.suffix import SuffixProposer

__all__ = [
    "DraftLengths",
    "Drafts",
    "RequestDrafter",
    "NgramProposer",
    "Proposer",
    "ReplayProposer",
    "Speculation",
    "SuffixProposer",
    "make_drafter",
]
