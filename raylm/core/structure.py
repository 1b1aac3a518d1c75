"""Structured output: the form that the text of an answer must have."""

from __future__ import annotations

from dataclasses import dataclass

from raylm.errors import RequestRejected

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar", "structural_tag", "tool_calls")
READY_KINDS = ("grammar", "structural_tag")
"""The kinds that an engine takes; the text side turns the others into them."""
MAX_STRUCTURE_BYTES = 1 << 20
MAX_BEGIN_AFTER = 64


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of an answer; every field is checked when the object is made.

    kind: "json_object" (any JSON object), "json_schema", "regex" (the whole answer matches it), "choice" (one of
        several strings), "grammar" (EBNF in the dialect of llama.cpp's GBNF, whose first rule is "root") or
        "structural_tag" (xgrammar's: free text with constrained parts) or "tool_calls" (calls of tools as a model's
        family writes them: raylm.grammar.calls).
    value: the schema, regex, grammar, tag or form of calls as text; of a choice the JSON list of its strings; of a
        json_object "".
    begin_after: token ids. The grammar begins after the first place where the answer holds them in a row; before it the
        answer is free. Empty: the grammar begins at once.

    Raises RequestRejected, naming the field, the value and the limit.
    """

    kind: str
    value: str = ""
    begin_after: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestRejected(
                f"structure.kind must be one of {', '.join(KINDS)}, got {self.kind!r:.300}", param="structure"
            )
        if not isinstance(self.value, str):
            raise RequestRejected(f"structure.value must be a string, got {self.value!r:.300}", param="structure")
        size = _num_bytes(self.value)
        if size > MAX_STRUCTURE_BYTES:
            raise RequestRejected(
                f"structure.value has {size} bytes, at most {MAX_STRUCTURE_BYTES} are allowed", param="structure"
            )
        if self.kind == "json_object" and self.value:
            raise RequestRejected("structure.value must be empty where kind is json_object", param="structure")
        if self.kind != "json_object" and not self.value:
            raise RequestRejected(f"structure.value must not be empty where kind is {self.kind}", param="structure")
        object.__setattr__(self, "begin_after", _tokens(self.begin_after))

    @property
    def is_ready(self) -> bool:
        """True where an engine takes it as it is."""
        return self.kind in READY_KINDS


def _num_bytes(value: str) -> int:
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        raise RequestRejected(
            "structure.value holds half of a surrogate pair, which is no character", param="structure"
        ) from None


def _tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_BEGIN_AFTER:
        raise RequestRejected(
            f"structure.begin_after must be a list of at most {MAX_BEGIN_AFTER} token ids, got {value!r:.300}",
            param="structure",
        )
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise RequestRejected(
                f"structure.begin_after must hold token ids from 0 to {2**31 - 1}, got {token!r:.300}",
                param="structure",
            )
    return tuple(map(int, value))
