"""Calls of tools as a grammar: an answer that is calls, or free text in which calls keep to their tools.

The form of calls comes as data, since families write them in many ways: JSON objects, tags, Python's keyword arguments.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Literal

import msgspec

from raylm.grammar.charset import ANY, CharSet
from raylm.grammar.ebnf import EMPTY, Chars, Expr, Rules, Text, alt, maybe, repeat, seq
from raylm.grammar.fault import Fault
from raylm.grammar.json_reader import read_json
from raylm.grammar.json_rules import PYTHON_ESCAPE, define_json
from raylm.grammar.parameters import Arguments, ParameterTags, Writing
from raylm.grammar.special import SpecialTokens
from raylm.grammar.until import text_until

_MAX_NUMBER_DIGITS = 3
_LINE_ENDS = repeat(Text("\n"), 0, 2)
"""What families write between the thinking and a call."""


class CallTool(msgspec.Struct, frozen=True):
    """A tool that may be called.

    parameters: the JSON schema of the arguments, as JSON. strict: a schema that cannot be kept to is refused; without
    it any arguments are allowed then. place: of the schema, for what is wrong with it.
    """

    name: str
    parameters: str
    strict: bool = False
    place: str = ""


class CallsForm(msgspec.Struct, frozen=True, kw_only=True):
    """Which calls an answer may hold, and how they are written.

    Written whole: `section[0]`, then for each call `before_name`, the name, `after_name`, its arguments and `call_end`,
    with `separator` between calls, then `section[1]`. Marks that are special tokens of the model are matched as these.

    several: more than one call is allowed.
    numbered: the 0 that `after_name` has is the call's number.
    thinking: the begin mark, the end mark and what follows it, of thinking that may come before the calls.
    line_ends: up to two line ends may come before the first call.
    triggers: the answer is free text, in which calls begin with these texts. None: it is nothing but calls.
    at_start: with triggers, a call begins only where the answer begins with the first of them.
    excluded: with triggers, texts that the free text must not have.
    other_channels: with triggers, texts that may follow a trigger instead of a call.
    answer: the kind and the value of the structure that the answer has where it is no calls. answer_begin: what stands
        before it.
    """

    arguments: Literal["json", "tags", "python", "gemma"]
    tools: list[CallTool]
    before_name: str
    after_name: str
    call_end: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = ""
    tags: ParameterTags | None = None
    several: bool = True
    numbered: bool = False
    thinking: tuple[str, str, str] | None = None
    line_ends: bool = False
    triggers: list[str] | None = None
    at_start: bool = False
    excluded: list[str] = []
    other_channels: list[str] = []
    answer: tuple[str, str] | None = None
    answer_begin: str = ""


def calls_grammar(value: str, special: SpecialTokens) -> tuple[str, str]:
    """The kind and the text of the structure for a CallsForm, given as JSON; an `answer` of it is a part of the tag as
    it was given, a grammar or a format of a structural tag. Raises Fault."""
    try:
        form = msgspec.json.decode(value, type=CallsForm)
    except msgspec.DecodeError as error:
        raise Fault(f"the form of calls cannot be read: {error}") from None
    if not form.tools:
        raise Fault("calls need at least one tool")
    calls = _Calls(form, special)
    if form.answer is not None:
        return "structural_tag", _tag(calls.or_answer(form.answer))
    return ("grammar", calls.whole()) if form.triggers is None else ("structural_tag", _tag(calls.among_text()))


class _Calls:
    """The rules of one form; only one of its methods without underscore is called, once."""

    def __init__(self, form: CallsForm, special: SpecialTokens) -> None:
        self._form = form
        self._special = special
        self._rules = Rules()
        if form.arguments == "python":
            define_json(self._rules, escape=PYTHON_ESCAPE)
        else:
            define_json(self._rules)

    def whole(self) -> str:
        """The grammar of an answer that is calls, with thinking before it where that is allowed."""
        root = self._all_calls()
        if self._form.line_ends:
            root = seq(_LINE_ENDS, root)
        return self._rules.text(seq(self._thinking(), root))

    def or_answer(self, answer: tuple[str, str]) -> dict[str, object]:
        """The format of a structural tag: calls or an answer, with thinking before either where that is allowed."""
        kind, value = answer
        calls = seq(_LINE_ENDS, self._all_calls()) if self._form.line_ends else self._all_calls()
        part = json.loads(value)["format"] if kind == "structural_tag" else _part(value)
        if self._form.answer_begin:
            begin = Rules().text(self._special.mark(self._form.answer_begin))
            part = {"type": "sequence", "elements": [_part(begin), part]}
        either: dict[str, object] = {"type": "or", "elements": [_part(self._rules.text(calls)), part]}
        if self._form.thinking is None:
            return either
        thinking = Rules()
        behind = _LINE_ENDS if self._form.line_ends else EMPTY
        before = _part(thinking.text(seq(self._thought(thinking), behind)))
        return {"type": "sequence", "elements": [{"type": "optional", "content": before}, either]}

    def among_text(self) -> dict[str, object]:
        """The format of a structural tag: free text with calls in it."""
        form = self._form
        assert form.triggers, "calls in free text begin with something"
        if form.at_start:
            return self._at_start(form.triggers[0])
        rests = [(trigger, rest) for trigger in form.triggers if (rest := self._behind(trigger)) is not None]
        others = [trigger for trigger in form.triggers if trigger not in dict(rests)]
        tokens = self._special.ids
        is_token = rests[0][0] in tokens
        rules = [
            [tokens[trigger] if is_token else trigger, {"type": "grammar", "grammar": self._rules.text(rest)}]
            for trigger, rest in rests
            if (trigger in tokens) == is_token
        ]
        left = [tokens[one] if is_token else one for one in others if (one in tokens) == is_token]
        kind, excludes = ("token_dispatch", "exclude_tokens") if is_token else ("dispatch", "excludes")
        if not is_token:
            left += form.excluded
        return {"type": kind, "rules": rules, "loop": form.several or bool(form.other_channels), excludes: left}

    def _at_start(self, bracket: str) -> dict[str, object]:
        """Calls, or a text that begins with something else than calls do."""
        calls = self._all_calls()
        space = CharSet.text(" \t\r\n")
        first = Chars(ANY - space - CharSet.text(bracket))
        spaces = repeat(Chars(space), 0, None)
        rest = {"type": "any_text", "excludes": self._form.excluded}
        text = {"type": "sequence", "elements": [_grammar(seq(spaces, first)), rest]}
        return {"type": "or", "elements": [_part(self._rules.text(seq(spaces, calls))), text]}

    def _behind(self, trigger: str) -> Expr | None:
        """What must follow a trigger; None where no call begins with it."""
        form = self._form
        if form.section[0] and form.section[0].startswith(trigger):
            return self._calls(self._special.mark(form.section[0][len(trigger) :]), self._before_name)
        if trigger not in form.before_name:
            return None
        rest = self._special.mark(form.before_name.partition(trigger)[2])
        found = self._calls(EMPTY, rest, several=False, section=False)
        return alt([found, *map(self._special.mark, form.other_channels)])

    def _all_calls(self) -> Expr:
        return self._calls(self._special.mark(self._form.section[0]), self._before_name)

    @property
    def _before_name(self) -> Expr:
        return self._special.mark(self._form.before_name)

    def _calls(self, begin: Expr, first: Expr, *, several: bool = True, section: bool = True) -> Expr:
        """A call, or several, between `begin` and the section's end; `first` is what the first one has before its
        name."""
        form, mark = self._form, self._special.mark
        tools = alt([self._tool(index, tool) for index, tool in enumerate(form.tools)])
        call = self._rules.add("call", tools)
        several = several and form.several and not self._special.is_end(form.call_end)
        more = repeat(seq(mark(form.separator), self._before_name, call), 0, None) if several else EMPTY
        return seq(begin, first, call, more, mark(form.section[1]) if section else EMPTY)

    def _tool(self, index: int, tool: CallTool) -> Expr:
        """A call from the name on."""
        form, mark = self._form, self._special.mark
        end = mark(form.call_end)
        writing = Writing(form.arguments, form.tags, self._special)
        schema = read_json(tool.parameters, "the schema", parse_float=Decimal)
        try:
            # By itself first, for a fault may come to light in the grammar as a whole only.
            alone = Rules()
            define_json(alone)
            alone.text(seq(Text("("), Arguments(schema, alone, "t", writing).write(Text(")"))))
            arguments = Arguments(schema, self._rules, f"t{index}-", writing).write(end)
        except Fault as fault:
            if tool.strict:
                raise Fault(str(fault), tool.place) from None
            arguments = Arguments({"type": "object"}, self._rules, f"any{index}-", writing).write(end)
        return seq(Text(tool.name), self._after_name(), arguments)

    def _after_name(self) -> Expr:
        text = self._form.after_name
        if not self._form.numbered:
            return self._special.mark(text)
        before, _, after = text.partition("0")
        digits = repeat(Chars(CharSet.of([(0x30, 0x39)])), 1, _MAX_NUMBER_DIGITS)
        return seq(self._special.mark(before), digits, self._special.mark(after))

    def _thinking(self) -> Expr:
        return EMPTY if self._form.thinking is None else maybe(self._thought(self._rules))

    def _thought(self, rules: Rules) -> Expr:
        """Thinking, with its marks and what follows them."""
        assert self._form.thinking is not None, "thinking is allowed"
        begin, end, behind = self._form.thinking
        until = text_until(rules, "thinking", end, self._special)
        return seq(self._special.mark(begin), until, self._special.mark(behind))


def _grammar(expr: Expr) -> dict[str, object]:
    return _part(Rules().text(expr))


def _part(grammar: str) -> dict[str, object]:
    return {"type": "grammar", "grammar": grammar}


def _tag(form: dict[str, object]) -> str:
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
