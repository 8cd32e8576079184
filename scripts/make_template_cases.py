#!/usr/bin/env python3
"""Writes tests/data/templates/cases.json: templates, inputs and the answers of Jinja2 as Hugging Face sets it up.

Three kinds of cases: the features that small engines get wrong, the templates in tests/data/templates/*.jinja with
many conversations, and random templates from a grammar (the seed is printed and stored). An answer is the rendered
text, or null where Jinja2 raises. Run it again after a change of the grammar; the C++ test reads the file.

    .venv/bin/python scripts/make_template_cases.py [--seed N] [--random N] [--out FILE]
"""
import argparse
import json
import pathlib
import platform
import random
import sys
from datetime import datetime, timezone

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "templates"
NOW = 1753660800  # 2025-07-28 00:00:00 UTC; the test runs with TZ=UTC


class Generation(jinja2.ext.Extension):
    """{% generation %}: transformers records where its text lies; the text itself is printed unchanged."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_print"), [], [], body).set_lineno(line)

    def _print(self, caller):
        return caller()


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(fmt):
        return datetime.fromtimestamp(NOW, timezone.utc).replace(tzinfo=None).strftime(fmt)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def answer(env, template, context):
    """The text, None for an error, or False for what has no stable answer."""
    try:
        text = env.from_string(template).render(**context)
        text.encode("utf-8")
    except (RecursionError, MemoryError, UnicodeEncodeError):
        return False
    except Exception:
        return None
    return False if " at 0x" in text or len(text) > 20_000 else text


# -- The features of the case list, by hand. --

MS = [{"role": r, "content": r.upper()} for r in "abc"]
FEATURES = [
    "{% set x = 1 %}{% for i in [1,2] %}{% set x = x + i %}{% endfor %}{{ x }}",
    "{% for a in [] %}{{ a }}{% else %}EMPTY{% endfor %}",
    "{% for a in ['x','y','z'] if a != 'y' %}{{ loop.index }}{{ a }}{% endfor %}",
    "A\n  {%- if true %}\n  B\n  {%- endif %}\n  {% if true %}\n    C\n  {% endif %}\nD",
    "x\n", "x\n\n", "\n", "",
    "[{{ nope }}][{{ nope is defined }}][{{ {}['nope'] is none }}]", "{{ nope.x }}", "{{ nope['x'] }}", "{{ nope() }}",
    "{{ ms[-1].role }} {{ ms[1:][0].role }} {{ ms[:-1]|length }}",
    "{%- macro f(a, b=2) -%}{{ a }}-{{ b }}{%- endmacro -%}{{ f(1) }} {{ f(1, b=5) }}",
    "{% set z %}hi {{ 1 }}{% endset %}[{{ z }}]", "{{ 7 // 2 }} {{ 7 / 2 }} {{ 7 % 3 }} {{ 2 ** 3 }}",
    "{{ '\U0001f600'|length }} {{ 'h\u00e9\u00e9'|length }}",
    "{{ 'abc'.startswith(('x','a')) }} {{ 'xxhix'.strip('x') }} {{ 'aXa'.replace('a','b',1) }}",
    "{{ {'a':[1,2],'b':{}} | tojson(indent=2) }}",
    "{% for a in ['x','y'] %}{{ loop.first }}{{ loop.last }}{{ loop.revindex0 }};{% endfor %}",
    "{{ ms|map(attribute='role')|join(',') }} {{ ms|selectattr('role','equalto','b')|list|length }}",
    # Scopes: a name that a scope assigns is its local from the start.
    "{% for i in [1] %}{{ x }}{% endfor %}{% set x = 2 %}{{ x }}",
    "{% macro f() %}{{ y }}{% endmacro %}{{ f() }}{% set y = 3 %}{{ f() }}",
    "{% if false %}{% set s = 1 %}{% endif %}[{{ s }}]", "{% if true %}{% set s = 1 %}{% endif %}[{{ s }}]",
    "{% for i in [1,2] %}{% if i == 1 %}{% set s = i %}{% endif %}[{{ s }}]{% endfor %}",
    "{% for i in range(3) %}{{ t }}{% set t = i %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for i in range(5) if ns.n < 2 %}{% set ns.n = ns.n + 1 %}{{ i }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
    "{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}{{ a }}",
    "{% set a, b = 1, 'x' %}{{ b }}{{ a }}", "{% set ns = namespace() %}{% set ns.a, q = 1, 2 %}{{ ns.a }}{{ q }}",
    "{% set x.y = 1 %}", "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for a, b in [1, 2] %}{% endfor %}", "{% for loop in [1] %}{% endfor %}",
    # Loops.
    "{% for i in range(6) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in [1] %}{% continue %}{% else %}else{% endfor %}", "{% break %}",
    "{% for i in range(3) %}{{ loop.previtem }}<{{ i }}>{{ loop.nextitem }} {% endfor %}",
    "{% for i in range(4) if i is odd %}{{ loop.length }}{{ loop.revindex }}{{ loop.last }}{% endfor %}",
    "{% for i in ms|map(attribute='role') %}{{ loop.length }}{{ i }}{{ loop.last }}{% endfor %}",
    "{% for i in range(3) %}{{ loop.cycle('a','b') }}{{ loop.changed(i // 2) }}{% endfor %}",
    "{% for n in tree recursive %}{{ n.v }}{% if n.c %}({{ loop(n.c) }}){% endif %}{{ loop.depth }}{% endfor %}",
    "{% for i in [1,2] %}{% for j in [1,2] %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}",
    # Macros and call blocks.
    "{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, 3, z=4) }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}", "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(b=2) }}",
    "{% macro f(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, 2) }}[{{ f() }}]",
    "{% macro f(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) f(7) %}{{ y + 1 }}{% endcall %}",
    "{% macro f() %}x{% endmacro %}{% call f() %}y{% endcall %}",
    "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f is callable }}",
    "{% filter upper %}a{{ 1 }}b{% endfilter %}{% filter replace('a', 'b')|trim %} aa {% endfilter %}",
    "{% set x | upper %}abc{% endset %}{{ x }}",
    # Text handling.
    "{% raw %}{{ x }}{% endraw %}|{#- c -#} |{# c #}\n|", "  {%- raw -%}  a  {%- endraw -%}  b", "a\r\nb\rc",
    "  {%+ if true %}  x{%+ endif %}\n y", "{% if true %}\n\n a\n{% endif %}\n\nb", "\t{# c #}\n x",
    "{{ 'a\\n\\t\\x41\\u00e9\\101\\q' }}", "{{ 'a' 'b' }}", "{{ \"it's\" }}", "{{ ['it\\'s', '\"', 'a\"\\'b\\n\u00e9\\x7f'] }}",
    # Python's way with values.
    "{{ [1, 2.0, none, true, 'x', (1,), {}] }}", "{{ 1e16 }} {{ 1e15 }} {{ 0.0001 }} {{ 0.00001 }} {{ 1.5e300 }} {{ -0.0 }}",
    "{{ 1 / 3 }} {{ 10 / 5 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ 2 ** -1 }} {{ 2 ** 0.5 }}",
    "{{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' < 'b' }} {{ [1,2] < [1,3] }} {{ 1 < 2 < 3 }} {{ none == undefined_name }}",
    "{{ 1 < 'a' }}", "{{ 'a' + 1 }}", "{{ 'a' ~ 1 ~ none ~ 2.0 }}", "{{ 'ab' * 3 }} {{ [1] * 2 }} {{ [1] + [2] }}",
    "{{ -2 ** 2 }} {{ 2 ** 3 ** 2 }} {{ not 1 == 2 }} {{ 1 if false }}x {{ 'a' if 0 else 'b' if 0 else 'c' }}",
    "{{ 'a' in 'abc' }} {{ 1 in [1] }} {{ 'k' in {'k': 1} }} {{ 2 not in (1, 2) }}", "{{ 1 in 'abc' }}",
    "{{ 'abc'[::-1] }} {{ 'abcdef'[1:5:2] }} {{ [1,2,3][::-2] }} {{ 'abc'[5:] }} {{ 'h\u00e9y'[1] }} {{ 'abc'[9] }}",
    "{% set v = none %}{{ v[1:] }}", "{{ {}.a.b }}", "{{ {'items': 1}.items() }} {{ {'items': 1}['items'] }}", "{{ [].append(1) }}",
    "{{ {}.update }}|{{ ''.__class__ }}|{{ [].__len__() }}", "{{ ''.__class__.__mro__ }}",
    "{% if ms|selectattr('role', 'equalto', 'zzz') %}generators are true{% endif %}",
    "{% set g = ms|map(attribute='role') %}{{ g|join }}{{ g|join }}", "{{ ms|map(attribute='role')|length }}",
    "{{ range(5)|list }} {{ range(2, 10, 3)|list }} {{ range(3)|length }} {{ range(10)[-1] }}", "{{ range(200000) }}",
    "{{ dict(a=1, **{'b': 2}) }} {{ dict([('x', 1)]) }}", "{{ '%s|%5d|%-5s|%05.1f|%r|%%' % ('a', 3, 'b', 2.25, 'q') }}",
    "{{ '{} {1}'.format(1, 2) }}", "{{ '{0}-{name:>5}-{0!r}'.format('a', name='b') }} {{ '{:05.2f}|{:,}'.format(3.14159, 1234567) }}",
    "{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a b c'.split(' ', 1) }} {{ 'a b c'.rsplit(none, 1) }}",
    "{{ 'Hello World'.title() }} {{ \"it's a-b\"|title }} {{ \"it's\".title() }} {{ 'hELLO'|capitalize }}",
    "{{ '<a>'|e }} {{ '<a>'|safe }} {{ ('<'|safe) + '<' }} {{ ('<'|safe) ~ '<' }}",
    "{{ 'x'|nofilter }}", "{% if false %}{{ 'x'|nofilter }}{% endif %}ok", "{{ 1 is notest }}",
    "{{ [3,1,2]|sort }} {{ ['b','A','c']|sort }} {{ ['b','A']|sort(case_sensitive=true) }} {{ [1,3,2]|sort(reverse=true) }}",
    "{{ {'b': 1, 'A': 2}|dictsort }} {{ {'b': 1, 'a': 2}|dictsort(by='value') }} {{ ms|sort(attribute='content')|first }}",
    "{{ '3'|int + 1 }} {{ 'x'|int }} {{ '1.9'|int }} {{ 'x'|int(7) }} {{ '2.5'|float }} {{ 2.5|round }} {{ 3.14159|round(2) }} {{ 2.1|round(0, 'ceil') }}",
    "{{ [1,1,2]|unique|list }} {{ ['a','A']|unique|list }} {{ [1,2,3]|sum }} {{ [1,5,3]|max }} {{ ['b','a']|min }} {{ []|max }}",
    "{{ 'a\nb\n\nc'|indent }}|{{ 'a\nb'|indent(2, true) }}|{{ 'a\n\nb'|indent('> ', blank=true) }}",
    "{{ [1,2,3,4,5]|batch(2, 0)|list }} {{ [1,2,3,4,5]|slice(2)|list }} {{ [1,2,3]|reverse|list }} {{ 'abc'|reverse }}",
    "{{ {'a': 'x\u00e9\"<>&\\'\\n', 'b': [1.0, none, true]} | tojson }} {{ '\u00e9'|tojson(ensure_ascii=true) }}",
    "{{ {'b': 1, 'a': [1]}|tojson(indent=4, separators=(',', ':'), sort_keys=true) }} {{ nope|tojson }}",
    "{{ nope|default('d') }} {{ ''|default('d') }} {{ ''|default('d', true) }} {{ none|d('x') }} {{ none|d('x', true) }}",
    "{{ 1 is integer }} {{ true is integer }} {{ true is number }} {{ 1.0 is float }} {{ 'a' is sequence }} {{ {} is mapping }} "
    "{{ nope is sequence }} {{ nope is iterable }} {{ none is none }} {{ 4 is divisibleby 2 }} {{ 3 is in [3] }} {{ 'A' is upper }}",
    "{{ 9223372036854775807 }} {{ 9223372036854775807 - 1 }}", "{{ raise_exception('no!') }}", "{{ strftime_now('%d %b %Y') }}",
    "{% generation %}{% set q = 1 %}a{{ q }}{% endgeneration %}[{{ q }}]", "{{ ms.0.role }}", "{{ (1, 2).0 }}", "{{ 1.5.x }}",
    # Syntax errors.
    "{{ }}", "{{ 1 +", "{% if %}{% endif %}", "{% if 1 %}", "{% endif %}", "{% for %}", "{% nosuch %}", "{{ 'abc }}", "{# x",
    "{% raw %}", "{{ (1 }}", "{{ 1) }}", "{{ a b }}", "{{ a. }}", "{{ 1 ? 2 }}", "{% macro f(a=1, b) %}{% endmacro %}",
    "{% set 1 = 2 %}", "{{ f(a=1, 2) }}", "{% call f %}{% endcall %}", "{{ 1 is is }}", "{% set true = 1 %}",
]
FEATURE_CONTEXT = {
    "ms": MS, "x": 5, "y": "outer", "tree": [{"v": 1, "c": [{"v": 2, "c": []}, {"v": 3, "c": [{"v": 4, "c": []}]}]}, {"v": 5}]}


# -- Conversations for the templates in tests/data/templates. --

TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "Weather \u2014 \"now\" & <later>",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "A city's name"},
            "unit": {"type": "string", "enum": ["c", "f"], "default": None},
            "days": {"type": "integer", "minimum": 0, "maximum": 9007199254740993}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


def call(name, arguments, i=0):
    return {"id": f"call{i:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def conversations():
    user = lambda text: {"role": "user", "content": text}
    bot = lambda text, **more: {"role": "assistant", "content": text, **more}
    system = {"role": "system", "content": "You are terse.\nVery."}
    tool = lambda text, i=0: {"role": "tool", "content": text, "tool_call_id": f"call{i:05d}", "name": "get_weather"}
    return [
        [user("Hi")], [system, user("Hi")], [user("Hi"), bot("Hello!"), user("\u4f60\u597d \U0001f600 <|im_end|> {{ x }}")],
        [system, user("  spaces  "), bot("\n\nlead"), user("")], [system], [], [bot("first")], [user("a"), user("b")],
        [user("w?"), bot("", tool_calls=[call("get_weather", {"city": "Z\u00fcrich", "days": 3, "x": [1.5, None, True]})]),
         tool("{\"t\": 21}"), bot("It is 21."), user("Thanks")],
        [system, user("w?"), bot("let me see", tool_calls=[call("get_weather", {"city": "A"}), call("stop", {}, 1)]),
         tool("1"), tool("2", 1)],
        [user("q"), bot("<think>\nhmm\n</think>\n\nanswer"), user("r"), bot("plain", reasoning_content="because")],
        [user("<tool_response>x</tool_response>"), bot("y")], [{"role": "developer", "content": "d"}, user("u")],
        [user("w?"), bot("", tool_calls=[call("get_weather", "not json")]), tool("a"), user("b")],
        [system, user("1"), bot("2"), user("3"), bot("4"), user("5"), bot("6 ")],
    ]


def contexts():
    out = []
    for i, messages in enumerate(conversations()):
        for tools in ([None, TOOLS] if i in (0, 1, 3, 8, 9, 10, 13) else [None]):
            for add in (True, False):
                c = {"messages": messages, "add_generation_prompt": add, "bos_token": "<s>", "eos_token": "</s>"}
                if tools or i % 2:
                    c["tools"] = tools
                if i % 3 == 0:
                    c["enable_thinking"] = add
                if i % 5 == 0:
                    c["documents"] = [{"title": "T", "text": "body\nof text"}]
                    c["date_string"] = "26 Jul 2024"
                out.append(c)
    return out


# -- Random templates. --

VARIABLES = {
    "i": 7, "j": -3, "f": 2.5, "s": "Hello, World", "t": "  a-b_c\n\td  ", "u": "na\u00efve \u4f60 \U0001f600 <b>&'\"",
    "e": "", "n": None, "yes": True, "no": False, "l": [3, 1, 2], "w": ["b", "a", "C", "a"], "d": {"a": 1, "b": [1, 2], "c": "x"},
    "m": MS, "o": {}, "z": [], "q": [[1, "a"], [2, "b"]],
}
INTS, STRS, LISTS = ["i", "j", "0", "1", "2", "-1", "10"], ["s", "t", "u", "e", "'a'", "'b,c'", "\"x y\""], ["l", "w", "q", "z", "m"]


class Grammar:
    def __init__(self, rng):
        self.r = rng
        self.locals = []

    def pick(self, *options):
        return self.r.choice(options)

    def any(self, d):
        kinds = [self.integer, self.string, self.sequence, self.boolean, self.mapping, self.real, self.string]
        return self.r.choice(kinds)(d)

    def atom(self):
        if self.locals and self.r.random() < 0.4:
            return self.r.choice(self.locals)
        return self.r.choice(list(VARIABLES) + ["nope", "none", "true", "1", "'k'", "0.5", "[]", "{}"])

    def integer(self, d):
        if d <= 0:
            return self.r.choice(INTS + self.locals[-1:])
        a, b = lambda: self.integer(d - 1), lambda: self.integer(d - 2)
        return self.pick(
            lambda: f"({a()} {self.pick('+', '-', '*', '//', '%')} {b()})", lambda: f"{self.sequence(d - 1)}|length",
            lambda: f"{self.string(d - 1)}|int", lambda: f"{self.string(d - 1)}.{self.pick('find', 'count')}('a')",
            lambda: f"({a()})|abs", lambda: f"-{self.pick('i', 'j', '3')}", lambda: f"[{a()}, {b()}]|{self.pick('max', 'min', 'sum', 'first', 'last')}",
            lambda: f"({a()} if {self.boolean(d - 1)} else {b()})", lambda: f"({a()} ** {self.pick('0', '1', '2')})")()

    def real(self, d):
        return self.pick(
            lambda: "f", lambda: f"({self.integer(d - 1)} / {self.pick('4', '8', 'i', '-2')})", lambda: f"(f {self.pick('*', '+', '-', '//', '%')} {self.integer(d - 1)})",
            lambda: f"{self.integer(d - 1)}|float", lambda: f"(f * {self.integer(0)})|round({self.pick('0', '1', '2')})", lambda: "1e15", lambda: "0.1 + 0.2")()

    def string(self, d):
        if d <= 0:
            return self.r.choice(STRS)
        a = lambda: self.string(d - 1)
        method = lambda: self.pick(
            "strip()", "lstrip()", "rstrip()", "strip(' a')", "upper()", "lower()", "title()", "capitalize()", "replace('a', 'XX')",
            "replace('', '-')", "replace('b', '', 1)", "split('a')[0]", "split()[-1]", "rsplit(',', 1)[0]", "join(['x', 'y'])",
            "center(14, '*')", "ljust(9)", "rjust(9)", "zfill(8)", "removeprefix('H')", "removesuffix('d')", "swapcase()",
            "partition(',')[2]", "rpartition('-')[0]", "splitlines()|join('/')", "format(1, 2)", "lstrip('H ')")
        filt = lambda: self.pick(
            "trim", "upper", "lower", "title", "capitalize", "replace('a', 'b')", "reverse", "string", "indent(2)", "indent(1, true)",
            "truncate(5)", "truncate(4, true, '.')", "center(12)", "e", "list|join('.')", "default('dd')", "default('dd', true)", "tojson",
            "wordcount", "first", "last", "trim('H d')")
        return self.pick(
            lambda: f"{self.postfixable(a())}.{method()}", lambda: f"({a()})|{filt()}", lambda: f"({a()} ~ {self.any(d - 1)})", lambda: f"({a()} + {a()})",
            lambda: f"{self.postfixable(a())}[{self.slice()}]", lambda: f"{self.sequence(d - 1)}|join({self.pick('', repr(', '), repr('-'))})",
            lambda: f"({self.any(d - 1)})|string", lambda: f"({self.any(d - 1)})|tojson", lambda: f"({self.mapping(d - 1)})|tojson(indent={self.pick('0', '2', '4', 'none')})",
            lambda: f"'%s-%s' % ({self.any(d - 1)}, {self.any(d - 1)})", lambda: f"'{{}}:{{!r}}'.format({self.any(d - 1)}, {self.any(d - 2)})",
            lambda: f"({a()} * {self.pick('0', '2', '-1')})", lambda: f"({a()} if {self.boolean(d - 1)} else {a()})", lambda: f"('%05d|%.2f' % ({self.integer(d - 1)}, f))")()

    @staticmethod
    def postfixable(text):
        return text if text.replace("_", "").isalnum() or (text[0] == "'" and text[-1] == "'" and text.count("'") == 2) else f"({text})"

    def slice(self):
        part = lambda: self.pick("", "", "0", "1", "2", "-1", "-2", "5")
        return self.pick(lambda: f"{part()}:{part()}", lambda: f"{part()}:{part()}:{self.pick('', '1', '2', '-1', '-2')}", lambda: self.pick("0", "-1", "1", "9"))()

    def sequence(self, d):
        if d <= 0:
            return self.r.choice(LISTS)
        a = lambda: self.sequence(d - 1)
        filt = lambda: self.pick(
            "list", "sort|list", "reverse|list", "unique|list", "map('string')|list", "map('upper')|list", "map(attribute='role')|list", "select|list",
            "reject('none')|list", "select('string')|list", "select('in', w)|list", "selectattr('role')|list", "selectattr('role', 'equalto', 'a')|list",
            "rejectattr('role', 'in', ['a', 'b'])|list", "batch(2)|list", "batch(2, 'x')|list", "slice(2)|list", "sort(reverse=true)", "sort(attribute='role')",
            "map('tojson')|list", "map('int', default=5)|list", "map(attribute='zzz', default='-')|list", "select('>', 1)|list", "map('length')|list")
        return self.pick(
            lambda: f"[{', '.join(self.any(d - 2) for _ in range(self.r.randrange(4)))}]", lambda: f"({a()})|{filt()}", lambda: f"({a()} + {a()})",
            lambda: f"{self.postfixable(a())}[{self.slice()}]", lambda: f"range({self.pick('3', '1, 6, 2', '5, 0, -2', '0')})|list", lambda: f"({self.mapping(d - 1)}).{self.pick('keys', 'values', 'items')}()|list",
            lambda: f"({self.mapping(d - 1)})|{self.pick('items|list', 'dictsort', 'list')}", lambda: f"{self.postfixable(self.string(d - 1))}.split({self.pick('', repr(','), repr('a'))})",
            lambda: f"({self.any(d - 1)}, {self.any(d - 2)})", lambda: f"({a()} * {self.pick('2', '0')})")()

    def mapping(self, d):
        if d <= 0:
            return self.pick("d", "o", "m[0]", "m[-1]")
        pairs = lambda: ", ".join(f"{self.pick(repr('a'), repr('k'), '1', 's', 'none')}: {self.any(d - 1)}" for _ in range(self.r.randrange(4)))
        return self.pick(lambda: "{" + pairs() + "}", lambda: "{" + pairs() + "}", lambda: f"dict(a={self.any(d - 1)}, b={self.any(d - 2)})", lambda: f"dict(d, z={self.any(d - 1)})")()

    def boolean(self, d):
        if d <= 0:
            return self.pick("yes", "no", "n", "e", "z", "l", self.atom())
        a = lambda: self.any(d - 1)
        test = lambda: self.pick(
            "defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "true", "false", "mapping", "sequence", "iterable", "callable",
            "odd", "even", "divisibleby 3", "divisibleby(2)", "in [1, 'a']", "eq 1", "equalto('a')", "lower", "upper", "ne none", "gt 1", "sameas none")
        return self.pick(
            lambda: f"({self.pick('', 'not ')}{a()} is {self.pick('', 'not ')}{test()})", lambda: f"({self.integer(d - 1)} {self.pick('<', '<=', '>', '>=', '==', '!=')} {self.integer(d - 1)})",
            lambda: f"({a()} {self.pick('==', '!=')} {a()})", lambda: f"({self.string(d - 1)} {self.pick('in', 'not in')} {self.pick(self.string, self.sequence)(d - 1)})",
            lambda: f"({self.boolean(d - 1)} {self.pick('and', 'or')} {a()})", lambda: f"not {self.boolean(d - 1)}", lambda: f"{self.postfixable(self.string(d - 1))}.{self.pick('startswith', 'endswith')}({self.pick(repr('H'), '(' + repr('a') + ', ' + repr('d') + ')')})",
            lambda: f"(1 < {self.integer(d - 1)} <= 9)", lambda: f"({self.atom()} {self.pick('<', '+', 'in', '==')} {self.atom()})", lambda: f"{self.postfixable(self.string(d - 1))}.{self.pick('isdigit', 'isalpha', 'isspace', 'islower', 'isupper', 'isalnum')}()")()

    def access(self):
        base = self.atom()
        return base + self.r.choice([".a", "['a']", "[0]", "[-1]", ".role", ".get('a', 'dflt')", ".get('zz')", ".zzz", "[0].role", ".items()|list", "|length", "['b']"])

    # Statements.

    def tag(self, text):
        return "{%" + self.r.choice(["", "", "-", "+"]) + " " + text + " " + self.r.choice(["", "", "-", "+"]) + "%}"

    def text(self):
        return self.r.choice(["", " ", "\n", "x", "  \n  ", "\n\n", "a b\n", "  ", "<|im|>\n", "\t", "{", "#}", "\u00e9 "])

    def output(self, d):
        e = self.any(d) if self.r.random() < 0.75 else self.access()
        return "{{" + self.r.choice(["", "-"]) + " " + e + " " + self.r.choice(["", "-"]) + "}}"

    def block(self, d, n=3):
        scope = len(self.locals)
        parts = []
        for _ in range(self.r.randrange(1, n + 1)):
            parts += [self.text(), self.statement(d)]
        del self.locals[scope:]
        return "".join(parts) + self.text()

    def body(self, d, *names):
        self.locals += names
        text = self.block(d, 2)
        del self.locals[len(self.locals) - len(names):]
        return text

    def statement(self, d):
        if d <= 0 or self.r.random() < 0.35:
            return self.output(self.r.randrange(3))
        name = f"v{self.r.randrange(4)}"
        loop = lambda: self.r.choice(["index", "index0", "first", "last", "length", "revindex", "revindex0", "previtem", "nextitem", "depth"])
        choice = self.r.randrange(11)
        if choice == 0:
            text = self.tag(f"if {self.boolean(2)}") + self.body(d - 1)
            if self.r.random() < 0.4:
                text += self.tag(f"elif {self.boolean(1)}") + self.body(d - 1)
            if self.r.random() < 0.5:
                text += self.tag("else") + self.body(d - 1)
            return text + self.tag("endif")
        if choice in (1, 2, 3):
            test = f" if {self.r.choice([name + ' is ' + self.r.choice(['string', 'odd', 'defined', 'none', 'mapping']), self.boolean(1)])}" if self.r.random() < 0.3 else ""
            inside = "{{ loop." + loop() + " }}" if self.r.random() < 0.6 else ""
            leave = self.tag("if " + self.boolean(1)) + self.tag(self.r.choice(["break", "continue"])) + self.tag("endif") if self.r.random() < 0.2 else ""
            text = self.tag(f"for {name} in {self.sequence(2)}{test}") + inside + self.body(d - 1, name) + leave
            if self.r.random() < 0.3:
                text += self.tag("else") + self.body(d - 1)
            return text + self.tag("endfor")
        if choice == 4:
            text = self.tag(f"set {name} = {self.any(2)}")
            self.locals.append(name)
            return text
        if choice == 5:
            text = self.tag(f"set {name}{self.r.choice(['', ' | upper', ' | trim'])}") + self.body(d - 1) + self.tag("endset")
            self.locals.append(name)
            return text
        if choice == 6:
            call_args = self.r.choice(["", self.any(1), f"{self.any(1)}, b={self.any(1)}", f"b={self.any(1)}", "1, 2, 3", "**d", "*l"])
            text = self.tag(f"macro {name}(a, b={self.any(1)})") + self.body(d - 1, "a", "b") + self.r.choice(["", "{{ varargs }}", "{{ kwargs }}"]) + self.tag("endmacro")
            return text + "{{ " + f"{name}({call_args})" + " }}"
        if choice == 7:
            return self.tag(f"filter {self.r.choice(['upper', 'trim', 'replace(' + repr('a') + ', ' + repr('b') + ')', 'indent(2)', 'title'])}") + self.body(d - 1) + self.tag("endfilter")
        if choice == 8:
            return self.tag(f"with {name} = {self.any(1)}") + self.body(d - 1, name) + self.tag("endwith")
        if choice == 9:
            ns = self.tag(f"set ns = namespace(x={self.any(1)})") + self.tag(f"for {name} in {self.sequence(1)}") + self.tag(f"set ns.{self.r.choice('xy')} = {self.any(1)}")
            return ns + self.body(d - 1, name, "ns.x") + self.tag("endfor") + "{{ ns.x }}{{ ns.y }}"
        macro = self.tag(f"macro {name}(a=1)") + "<{{ caller(a) }}>" + self.tag("endmacro")
        return macro + self.tag(f"call(c) {name}({self.any(1)})") + self.body(d - 1, "c") + self.tag("endcall")


def random_cases(env, seed, count):
    """Half of the wanted cases are one expression, half are templates; about one in eight may be an error."""
    rng = random.Random(seed)
    cases, seen, errors = [], set(), 0
    while len(cases) < count:
        g = Grammar(rng)
        template = g.output(rng.randrange(1, 4)) if rng.random() < 0.5 else g.block(rng.randrange(1, 4))
        if template in seen or len(template) > 600:
            continue
        seen.add(template)
        text = answer(env, template, VARIABLES)
        if text is False or (text is not None and len(text) > 1500):
            continue
        if text is None:
            if errors * 8 > len(cases):
                continue
            errors += 1
        cases.append([template, text])
    return cases


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=20250728)
    parser.add_argument("--random", type=int, default=3000)
    parser.add_argument("--out", default=str(DATA / "cases.json"))
    args = parser.parse_args()
    env = environment()
    files = {p.name: p.read_text(encoding="utf-8") for p in sorted(DATA.glob("*.jinja"))}
    chats = contexts()
    out = {
        "made_with": f"jinja2 {jinja2.__version__}, Python {platform.python_version()}", "seed": args.seed, "now": NOW,
        "feature_context": FEATURE_CONTEXT, "features": [[t, answer(env, t, FEATURE_CONTEXT)] for t in FEATURES],
        "chats": chats, "files": {name: [answer(env, text, c) for c in chats] for name, text in files.items()},
        "random_context": VARIABLES, "random": random_cases(env, args.seed, args.random)}
    for template, text in out["features"]:
        if text is False:
            sys.exit(f"no stable answer for {template!r}")
    pathlib.Path(args.out).write_text(json.dumps(out, ensure_ascii=False, separators=(",", ":")).replace('],["', '],\n["') + "\n", encoding="utf-8")
    print(f"seed {args.seed}: {len(out['features'])} features, {len(files)} files x {len(chats)} chats, {len(out['random'])} random, "
          f"{pathlib.Path(args.out).stat().st_size} bytes")


if __name__ == "__main__":
    main()
