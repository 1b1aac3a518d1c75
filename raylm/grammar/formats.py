"""Regular expressions of JSON Schema's string formats: what is generated for a format.

Each is valid by the format's RFC and by the validators in use (Python's, JavaScript's ajv and zod), so it is narrower
than what some of them take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LONG, _SHORT = r"(?:0[13578]|1[02])", r"(?:0[469]|11)"
_DAYS = rf"{_LONG}-(?:0[1-9]|[12][0-9]|3[01])|{_SHORT}-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
# Python's dates begin with the year 1.
_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = r"(?:0[48]|[2468][048]|[13579][26])"
_DATE = rf"(?:{_YEAR}-(?:{_DAYS})|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]{1,9})?"
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# Loops without counts: a count costs milliseconds in each step. So a label may be longer than the 63 characters of DNS.
_HOST = r"[A-Za-z0-9]+(?:[.-][A-Za-z0-9]+)*"
_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_DOMAIN = r"[A-Za-z0-9]+(?:(?:\.|-+)[A-Za-z0-9]+)*"
_LOCAL = rf"{_ATEXT}+(?:\.{_ATEXT}+)*"
# No fractions: RFC 3339 has none in a duration, and ajv refuses them.
# As many digits as pydantic can sum up: less than 2^32 seconds.
_MINUTES = r"[0-9]{1,6}M(?:[0-9]{1,8}S)?|[0-9]{1,8}S"
_HOURS = rf"[0-9]{{1,6}}H(?:{_MINUTES})?|{_MINUTES}"
_SPAN = r"[0-9]{1,4}Y(?:[0-9]{1,4}M)?(?:[0-9]{1,8}D)?|[0-9]{1,4}M(?:[0-9]{1,8}D)?|[0-9]{1,8}D"
_DURATION = rf"P(?:(?:{_SPAN})(?:T(?:{_HOURS}))?|T(?:{_HOURS})|[0-9]{{1,4}}W)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"


def _groups(most: int) -> str:
    """Up to so many groups of an IPv6 address."""
    return rf"(?:{_H16}(?::{_H16}){{0,{most - 1}}})?" if most > 1 else rf"(?:{_H16})?"


def _ipv6() -> str:
    """Eight groups, or fewer around one "::"."""
    rest = rf"(?::{_H16}|::)"
    for read in range(6, 0, -1):
        rest = rf"(?::{_H16}{rest}|::{_groups(7 - read)})"
    return rf"(?:{_H16}{rest}|::{_groups(7)})"


_IPV6 = _ipv6()
_ESCAPED = "%[0-9A-Fa-f]{2}"
_PCHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})"
_IN_PATH = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|{_ESCAPED})*"
_IN_QUERY = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|{_ESCAPED})*"
_PORT = r"(?:[1-5]?[0-9]{1,4}|6[0-4][0-9]{3})"
_USER = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_ESCAPED})+@"


def _uri_rest(user: str) -> str:
    """What follows a URI's scheme; `user` stands before its host.

    As few loops as it can be written with: each costs 0.05 s when it is compiled.
    """
    place = rf"{user}[A-Za-z0-9]+(?:[._-]-?[A-Za-z0-9]+)*(?::{_PORT})?"
    return rf"(?://(?:{place})?(?:/{_IN_PATH})?|/?{_PCHAR}{_IN_PATH}|/)(?:\?{_IN_QUERY})?(?:#{_IN_QUERY})?"


_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:{_uri_rest(f'(?:{_USER})?')}"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _CLOCK + _FRACTION + _ZONE,
    "date-time": f"{_DATE}T{_CLOCK}{_FRACTION}{_ZONE}",
    "duration": _DURATION,
    "email": f"{_LOCAL}@{_DOMAIN}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": rf"(?:{_IPV6}|::(?:[Ff]{{4}}:)?{_IPV4})",
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": _URI,
}
"""By the format's name."""
UNCHECKED_FORMATS = frozenset({"password"})
"""They say how a value is shown, not which are valid."""
_ZOD_LOCAL = r"(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]"
_ZOD_EMAIL = rf"{_ZOD_LOCAL}@(?:[A-Za-z0-9]+(?:-+[A-Za-z0-9]+)*\.)+[A-Za-z]{{2,}}"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,18}[A-Za-z0-9])?"


class Piece(NamedTuple):
    """A part of a format's text. A part without a longest match can end at most `slack` characters after any place."""

    source: str
    slack: int = 0


PIECES: Mapping[str, tuple[Piece, ...]] = {
    _HOST: (Piece(_HOST, 1),),
    FORMATS["email"]: (Piece(_LOCAL, 1), Piece("@"), Piece(_HOST, 1)),
    _URI: (Piece("[A-Za-z][A-Za-z0-9+.-]{0,14}:"), Piece(_uri_rest(""), 2)),
    _ZOD_EMAIL: (
        Piece(r"[A-Za-z0-9_+-]+(?:[.'][A-Za-z0-9_+-]+)*", 1),
        Piece(rf"@(?:{_LABEL}\.){{1,3}}[A-Za-z]{{2,10}}"),
    ),
}
"""The formats without a longest text, in parts for a text of limited length: a little narrower than the format."""


def _of_zod() -> dict[tuple[str, str], str]:
    """What is generated for a format together with the pattern that zod 4's toJSONSchema writes beside it."""
    day = (
        r"(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])"
        r"-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))"
    )
    byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
    found = {
        ("date", f"^{day}$"): _DATE,
        ("ipv4", rf"^(?:{byte}\.){{3}}{byte}$"): _IPV4,
        ("ipv6", _ZOD_IPV6): _IPV6,
        ("duration", _ZOD_DURATION): _DURATION,
        **{("email", pattern): _ZOD_EMAIL for pattern in _ZOD_EMAILS},
    }
    hour, second = r"(?:[01]\d|2[0-3]):[0-5]\d", r":[0-5]\d"
    clocks = {
        rf"{hour}(?:{second}(?:\.\d+)?)?": _CLOCK + _FRACTION,
        rf"{hour}{second}(?:\.\d+)?": _CLOCK + _FRACTION,
        f"{hour}{second}": _CLOCK,
        **{rf"{hour}{second}\.\d{{{digits}}}": rf"{_CLOCK}\.[0-9]{{{digits}}}" for digits in range(1, 10)},
    }
    offsets = (r"([+-]\d{2}:\d{2})", f"([+-]{hour})")
    zones = {"Z": "Z", "Z|": "Z"} | {f"Z{bars}{offset}": _ZONE for bars in ("|", "||") for offset in offsets}
    for clock, our_clock in clocks.items():
        for zone, our_zone in zones.items():
            found["date-time", f"^{day}T(?:{clock}(?:{zone}))$"] = f"{_DATE}T{our_clock}{our_zone}"
    hexes, variant = "[0-9a-fA-F]", "[89abAB]"
    zero, ones = ("-".join(digit * count for count in (8, 4, 4, 4, 12)) for digit in "0f")
    for version in ("[1-8]", *"12345678"):
        uuid = f"{hexes}{{8}}-{hexes}{{4}}-{version}{hexes}{{3}}-{variant}{hexes}{{3}}-{hexes}{{12}}"
        ends = ("",) if len(version) == 1 else (f"|{zero}", f"|{zero}|{ones}")
        found |= {("uuid", f"^({uuid}{end})$"): uuid + end for end in ends}
    found["uuid", f"^({hexes}{{8}}-{hexes}{{4}}-{hexes}{{4}}-{hexes}{{4}}-{hexes}{{12}})$"] = FORMATS["uuid"]
    return found


_ZOD_EMAILS = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
)
_ZOD_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
_ZOD_H16 = "[0-9a-fA-F]{1,4}"
_ZOD_IPV6 = (
    rf"^(({_ZOD_H16}:){{7}}{_ZOD_H16}|({_ZOD_H16}:){{1,7}}:|({_ZOD_H16}:){{1,6}}:{_ZOD_H16}"
    + "".join(rf"|({_ZOD_H16}:){{1,{7 - most}}}(:{_ZOD_H16}){{1,{most}}}" for most in range(2, 6))
    + rf"|{_ZOD_H16}:((:{_ZOD_H16}){{1,6}})|:((:{_ZOD_H16}){{1,7}}|:))$"
)
OF_ZOD: Mapping[tuple[str, str], str] = _of_zod()
"""By the format's name and zod's pattern: texts that are valid by both."""
SOURCES = tuple(dict.fromkeys([*FORMATS.values(), *OF_ZOD.values()]))
