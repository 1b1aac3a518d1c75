"""JSON that stays one line for every reader."""

from __future__ import annotations

_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Unicode's line ends that JSON leaves raw; all others it escapes."""


def one_line(encoded: bytes) -> bytes:
    """The same JSON with Unicode's line ends escaped: some readers split lines at them too."""
    if encoded.isascii():
        return encoded
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded
