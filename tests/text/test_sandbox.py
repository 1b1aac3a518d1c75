"""Templates that attack: each is stopped, by the limit that it is for, and none reaches Python's internals.

(Where a template would run on for ever, the test's own time limit says so.)
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from jinja2.exceptions import SecurityError

from raylm.errors import RequestRejected
from raylm.text import budget
from raylm.text.budget import Limits, TooMuch
from raylm.text.chat import ChatTemplate
from raylm.text.sandbox import Sandbox

LIMITS = Limits(seconds=60.0, chars=2**20)
DOUBLED = "{% set a = [1, 1] %}" + "{% set a = [a, a] %}" * 40
HUGE = 10**9

TOO_LARGE = {
    "repetition": f"{{{{ 'a' * {HUGE} }}}}",
    "repeated list": f"{{{{ ([1] * {HUGE}) | length }}}}",
    "power": f"{{{{ 10 ** {HUGE} }}}}",
    "power that is set": f"{{% set x = 10 ** {HUGE} %}}",
    "squares": "{% set a = 3 ** 20000 %}" + "{% set a = a * a %}" * 40,
    "concatenation": "{% set a = 'aaaaaaaa' %}" + "{% set a = a ~ a %}" * 40,
    "addition": "{% set a = 'aaaaaaaa' %}" + "{% set a = a + a %}" * 40,
    "list addition": "{% set x = [[1, 2, 3]] %}" + "{% set x = x + x %}" * 60,
    "center": f"{{{{ 'a' | center({HUGE}) }}}}",
    "center by name": f"{{{{ 'a' | center(width={HUGE}) }}}}",
    "mapped center": f"{{{{ ['a'] | map('center', {HUGE}) | list }}}}",
    "filter block": f"{{% filter center({HUGE}) %}}a{{% endfilter %}}",
    "center while compiling": f"{{% autoescape 'a' | center({HUGE}) %}}{{% endautoescape %}}",
    "method center": f"{{{{ 'a'.center({HUGE}) }}}}",
    "method zfill": f"{{{{ 'a'.zfill({HUGE}) }}}}",
    "method of Markup": f"{{{{ ('a' | safe).center({HUGE}) }}}}",
    "splat": f"{{{{ 'a'.center(*[{HUGE}]) }}}}",
    "tabs": f"{{{{ ('\t' * 1000).expandtabs({HUGE}) }}}}",
    "replace": "{% set a = 'a' * 100000 %}{{ a | replace('a', a) }}",
    "method replace": "{% set a = 'a' * 100000 %}{{ a.replace('a', a) }}",
    "join": "{{ (['a'] * 50000) | join('x' * 100000) }}",
    "joined attribute": "{{ ([{'a': 'x' * 100000}] * 1000) | join('', attribute='a') }}",
    "method join": "{{ ('x' * 100000).join(range(99999) | map('string')) }}",
    "percent width": f"{{{{ '%{HUGE}d' % 1 }}}}",
    "percent star": f"{{{{ '%*d' % ({HUGE}, 1) }}}}",
    "filter format": f"{{{{ '%{HUGE}d' | format(1) }}}}",
    "filter format star": f"{{{{ '%*d' | format({HUGE}, 1) }}}}",
    "format width": f"{{{{ '{{:{HUGE}}}'.format(1) }}}}",
    "format width from a field": f"{{{{ '{{:{{w}}}}'.format(1, w={HUGE}) }}}}",
    "format precision": f"{{{{ '{{:.{HUGE}f}}'.format(1.5) }}}}",
    "format_map": f"{{{{ '{{a:{HUGE}}}'.format_map({{'a': 1}}) }}}}",
    "indent": "{{ ('\n' * 100000) | indent(10000) }}",
    "indent by a text": "{{ ('a\n' * 100000) | indent('x' * 100000) }}",
    "json indent": f"{{{{ [[1]] | tojson(indent={HUGE}) }}}}",
    "json separators": "{{ range(1000) | list | tojson(separators=('a' * 100000, 'b')) }}",
    "batch": f"{{{{ [1] | batch({HUGE}, 'x') | list }}}}",
    "slice": f"{{{{ [1] | slice({HUGE}) | list }}}}",
    "round": f"{{{{ 1.5 | round({HUGE}, 'ceil') }}}}",
    "int": "{{ ('f' * 100000) | int(base=16) }}",
    "characters": "{{ ('a' * 1000000) | list }}",
    "slow filter": "{{ ('a ' * 100000) | wordwrap }}",
    "printed tree": DOUBLED + "{{ a }}",
    "compared trees": DOUBLED + DOUBLED.replace("a", "b").replace("bb", "ab") + "{{ a == b }}",
    "JSON of a tree": DOUBLED + "{{ a | tojson }}",
    "tree of objects": "{% set a = {'x': 1} %}" + "{% set a = {'x': a, 'y': a} %}" * 40,
    "tree by dict": "{% set a = {'x': 1} %}" + "{% set a = dict(x=a, y=a) %}" * 40,
    "tree by map": "{% set a = [1] %}" + "{% set a = [q, q] | map('default', a) | list %}" * 40,
    "tree by arguments": "{% set n = namespace(a=(1, 2)) %}{% macro f() %}{% set n.a = varargs %}{% endmacro %}"
    + "{{ f(n.a, n.a) }}" * 40,
    "tree by named arguments": "{% set n = namespace(a=(1, 2)) %}{% macro f() %}{% set n.a = kwargs %}{% endmacro %}"
    + "{{ f(x=n.a, y=n.a) }}" * 40,
    "tree of namespaces": "{% set a = namespace() %}" + "{% set a = namespace(x=a, y=a) %}" * 40 + "{{ a }}",
    "ring of namespaces": "{% set a = namespace() %}{% set a.x = a %}{{ a }}",
    "hashed tuples": "{% set a = (1, 1) %}" + "{% set a = (a, a) %}" * 60 + "{{ {a: 1} }}",
    "prompt": "{% for i in range(99999) %}" + "t" * 10_000 + "{% endfor %}",
    "kept text": "{% set x %}{% for i in range(99999) %}" + "t" * 10_000 + "{% endfor %}{% endset %}",
    "slices": "{% set a = 'a' * 1000000 %}" + "{% set b = a[1:] %}" * 100,
    "copies": "{% set a = 'a' * 1000000 %}" + "{% set b = a.upper() %}" * 100,
    "date": "{{ strftime_now('%Y' * 1000) }}",
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_would_be_too_large_is_never_made(name):
    with pytest.raises(TooMuch, match="characters|bits|at most|more than|too many values"):
        Sandbox(TOO_LARGE[name]).run({}, LIMITS)


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that skip": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "filters": "{% for a in range(99999) %}{{ range(99999) | select('lt', 0) | list }}{% endfor %}",
    "sums": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "callers": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 18 + "x" + "{% endcall %}" * 18,
    "recursive loop": "{% for a in [range(9)] recursive %}{% if loop.depth < 40 %}{{ loop([a, a]) }}{% endif %}"
    "{% endfor %}",
}  # fmt: skip


class Clock:
    """A second passes with every look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("name", ENDLESS)
def test_what_would_never_end_is_stopped(name, monkeypatch):
    monkeypatch.setattr(budget, "time", Clock())
    with pytest.raises(TooMuch, match="takes more than 60 s"):
        Sandbox(ENDLESS[name]).run({}, LIMITS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ [''] | map(attribute='__class__') | first }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ self.__init__ }}",
        "{% macro f() %}{% endmacro %}{{ f._func }}",
        "{% for x in [1] %}{{ loop._iterable }}{% endfor %}",
        "{{ namespace(a=1)._Namespace__attrs }}",
    ],
)
def test_internals_are_not_there(source):
    shown = ""
    with suppress(SecurityError):
        shown = Sandbox(source).run({}, LIMITS)
    assert shown == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ 'a'.encode() }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{{ ('{0}' | safe).format(1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ namespace(_a=1) }}",
        "{{ cycler(1, 2).items[0] }}",
    ],
)
def test_only_what_templates_need_can_be_called(source):
    with pytest.raises(SecurityError):
        Sandbox(source).run({"messages": [{"role": "user"}]}, LIMITS)


@pytest.mark.parametrize("source", ["{% include '/etc/hosts' %}", "{% import 'x' as y %}", "{% extends 'x' %}"])
def test_no_file_is_read(source):
    with pytest.raises(TypeError, match="no loader"):
        Sandbox(source).run({}, LIMITS)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block x %}{{ self.x() }}{% endblock %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "not " * 20_000 + "1 }}",
        "{{ " + "[" * 150 + "]" * 150 + " }}",
        "{{ lipsum(1000000) }}",
        "{{ range(1000000000) }}",
    ],
)
def test_whatever_a_template_raises_is_a_rejection(source):
    with pytest.raises(RequestRejected, match="the model's chat template (fails|refuses|is not valid)") as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' * 3 + 'b' ~ 1 }} {{ 2 ** 3 * 2 + 7 % 4 }} {{ '%s-%03d' % ('a', 7) }}", "aaab1 19 a-007"),
        ("{{ '{0}-{a:>4}'.format('x', a='y') }} {{ '{a!r}'.format_map({'a': 'b'}) }}", "x-   y 'b'"),
        ("{{ [1, 2][1:] + [3] }} {{ 'abc'[::-1] }} {{ {'a': [1, x]} }}", "[2, 3] cba {'a': [1, 5]}"),
        ("{{ ['a', 'b'] | join('-') }} {{ [{'a': 1}, {'a': 2}] | join('+', attribute='a') }}", "a-b 1+2"),
        ("{{ [1, 2] | sum }} {{ [{'a': 1}] | sum(attribute='a', start=2) }} {{ [3, 1] | sort | first }}", "3 3 1"),
        ("{{ range(4) | map('string') | select('ne', '2') | map('upper') | list }} {{ [] | map('upper') | list }}",
         "['0', '1', '3'] []"),
        ("{{ range(5) | batch(2, 'x') | list }} {{ range(4) | slice(2) | list }}", "[[0, 1], [2, 3], [4, 'x']] "
         "[[0, 1], [2, 3]]"),
        ("{% for x in 'ab' %}{{ loop.index }}/{{ loop.length }}{{ x }}{{ '' if loop.last else ',' }}{% endfor %}",
         "1/2a,2/2b"),
        ("{% for x in range(9) if x % 4 == 0 %}{{ loop.index }}{{ loop.nextitem }};{% endfor %}", "14;28;3;"),
        ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for x in q %}{% else %}e{% endfor %}",
         "a1e"),
        ("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }} {{ dict(a=1).get('a') }}", "2 1"),
        ("{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, 3, c=4) }}",
         "12(3,){'c': 4}"),
        ("{% set t = cycler('a', 'b') %}{{ t.next() }}{{ t.next() }}{% set j = joiner() %}{{ j() }}{{ j() }}", "ab, "),
        ("{{ '<' | e }} {{ ('<' | safe) + '<' }} {% autoescape true %}<{{ '<' }}{% endautoescape %}",
         "&lt; <&lt; <&lt;"),
        ("{{ {'b': [1, 'ä<'], 'a': none} | tojson }}", '{"b": [1, "ä<"], "a": null}'),
        ("{{ [1, {'a': 2}] | tojson(indent=1) }}", '[\n 1,\n {\n  "a": 2\n }\n]'),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}c{% endset %}{{ x }}", "ABc"),
        ("{{ ' a b '.split() }} {{ 'a-b'.split('-')[-1].lstrip('x') }} {{ '-'.join(['a', 'b']) }}", "['a', 'b'] b a-b"),
    ],
)  # fmt: skip
def test_what_is_not_much_is_as_it_was(source, expected):
    assert Sandbox(source).run({"x": 5}, LIMITS) == expected


def test_a_run_says_nothing_of_the_one_before():
    box = Sandbox("{% for i in range(9) %}{{ 'a' * 100 }}{% endfor %}")
    limits = Limits(60.0, 1000)
    assert {box.run({}, limits) for _ in range(100)} == {"a" * 900}
