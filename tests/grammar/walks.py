"""Random texts that a grammar allows: what a model that knows nothing would generate."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from raylm.core.structure import StructuredOutput
from raylm.grammar import binding
from raylm.grammar.translate import translate

PIECES = (b'": ', b'", "', b'{"', b'"}', b"abc", b"\xe2\x82", b"123", b"],", b"\n  ", b"true", b'":', b"\\n", b"name")
TOKENS = [*(bytes([value]) for value in range(256)), *PIECES, b""]
"""Every byte, pieces across what the grammars' rules are cut at, and the token that ends a text."""
END = len(TOKENS) - 1
_CLOSING = {b'"', b"}", b"]", b",", b'"}', b'":'}

_vocabulary = binding.vocabulary(TOKENS, len(TOKENS), [END])
_compiler = binding.Compiler(_vocabulary)


def compiled(structure: StructuredOutput) -> binding.Compiled:
    return _compiler.compile(translate(structure))


def takes(grammar: binding.Compiled, text: str, *, whole: bool = False) -> bool:
    """Whether a grammar takes a text as a beginning, or as all of it."""
    matcher: Any = binding.matcher(grammar, [0])
    return bool(matcher.accept_string(text, False) and (not whole or matcher.accept_token(0, False)))


def allowed(matcher: binding.Matcher) -> list[int]:
    """The tokens that may come next."""
    mask = np.zeros((1, -(-len(TOKENS) // 32)), np.int32)
    matcher.fill_next_token_bitmask(mask, 0, False)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[: len(TOKENS)]).tolist()


def texts(grammar: binding.Compiled, count: int, *, seed: int = 0, limit: int = 600) -> list[bytes]:
    """Texts that came to their end within `limit` tokens, of so many walks; each token was one that the mask allows."""
    rng = random.Random(seed)
    found = (_walk(grammar, rng, limit) for _ in range(count))
    return [text for text in found if text is not None]


def _walk(grammar: binding.Compiled, rng: random.Random, limit: int) -> bytes | None:
    matcher = binding.matcher(grammar, [END])
    text = b""
    for turn in range(limit):
        tokens = allowed(matcher)
        assert tokens, f"nothing may follow {text!r}"
        closing = [token for token in tokens if TOKENS[token] in _CLOSING]
        if END in tokens and (len(tokens) == 1 or rng.random() < 0.5):
            return text
        token = rng.choice(closing if closing and rng.random() < min(0.9, 0.1 + turn / 100) else tokens)
        if token == END:
            return text
        assert matcher.accept_token(token, False), f"{TOKENS[token]!r} was allowed behind {text!r}"
        text += TOKENS[token]
    return None
