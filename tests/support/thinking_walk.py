"""thinking_token_budget, said of one row and token by token."""

from __future__ import annotations

from raylm.core.thinking import ThinkingSection


def forced_token(generated: list[int], section: ThinkingSection, budget: int) -> int | None:
    """What must follow the generated tokens; None where anything may."""
    begin, end = list(section.begin), list(section.end)
    start, since = (0, 0) if section.begun else (None, 0)
    for count in range(1, len(generated) + 1):
        before = generated[:count]
        if before[-len(end) :] == end:
            start, since = None, count
        elif start is None and begin and before[since:][-len(begin) :] == begin:
            start = count
    if start is None or len(generated) - start < budget:
        return None
    full = start + budget
    said = max(n for n in range(min(len(end) - 1, budget) + 1) if generated[full - n : full] == end[:n])
    return end[min(said + len(generated) - full, len(end) - 1)]
