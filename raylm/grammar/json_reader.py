"""Reading the JSON of a structure: whatever is wrong with it is a Fault."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from raylm.grammar.fault import Fault


def read_json(text: str, what: str, *, parse_float: Callable[[str], object] = float) -> object:
    """The value of a JSON text, called `what` in a Fault. `parse_float` makes numbers with a point or an exponent."""
    try:
        return json.loads(text, parse_float=parse_float, parse_int=_integer, parse_constant=_no_constant)
    except RecursionError:
        raise Fault(f"{what} nests too deep to be read") from None
    except json.JSONDecodeError as error:
        raise Fault(f"{what} is not valid JSON: {error}") from None
    except (ValueError, ArithmeticError):
        raise Fault(f"{what} holds a number that cannot be read") from None


def _integer(text: str) -> int:
    limit, num_digits = sys.get_int_max_str_digits(), len(text.lstrip("-"))
    if num_digits > limit > 0:
        raise Fault(f"an integer has {num_digits} digits, at most {limit} are allowed")
    return int(text)


def _no_constant(name: str) -> object:
    raise Fault(f"{name} is not valid JSON")
