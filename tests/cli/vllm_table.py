"""The table of options in docs/from-vllm.md, from the tables that the code uses.

python -m tests.cli.vllm_table        writes it
"""

from __future__ import annotations

from pathlib import Path

from raylm.config.engine_keys import engine_keys
from raylm.config.vllm_names import ANYWAY, NAMES, REFUSED, flag
from raylm.config.vllm_objects import OBJECTS

PATH = Path(__file__).resolve().parents[2] / "docs" / "from-vllm.md"
_BEGIN, _END = "<!-- python -m tests.cli.vllm_table -->", "<!-- end -->"


def table() -> str:
    """All of vLLM's names that mean something here, by the alphabet."""
    rows: dict[str, str] = {}
    for name, renamed in NAMES.items():
        key = engine_keys()[renamed.key]
        note = f"; {renamed.note}" if renamed.note else ""
        rows[flag(name)] = f"`{flag(key.name)}` (`{key.section}.{key.key}`){note}"
    for name, option in OBJECTS.items():
        fields = [f"`{field}` is `{flag(key)}`" for field, key in option.fields.items()]
        fields += [f"`{field}`: {reason}" for field, reason in option.anyway.items()]
        rows[flag(name)] = f"a JSON object: {'; '.join(fields)}"
    rows |= {flag(name): f"changes nothing: {reason}" for name, reason in ANYWAY.items()}
    rows |= {flag(name): f"refused: {reason}" for name, reason in REFUSED.items()}
    lines = [f"| `{name}` | {rows[name]} |" for name in sorted(rows)]
    return "\n".join(["| vLLM's | here |", "| --- | --- |", *lines])


def text() -> str:
    """The whole page, with the table as it should be."""
    page = PATH.read_text(encoding="utf-8")
    before, rest = page.split(_BEGIN)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
