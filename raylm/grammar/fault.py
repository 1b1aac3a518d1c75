"""What is wrong with a schema, a regex or a grammar, and where."""

from __future__ import annotations


class Fault(Exception):
    """A structure that cannot be kept to. `place` is where in it: "#/properties/a" in a schema, "position 5" in a
    regex, "" for the whole."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(f"{place}: {message}" if place else message)
        self.place = place
