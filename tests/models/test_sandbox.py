"""Chat templates of others: what they make and do is bounded; usual ones write what they always did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from implementations import COMPILED, child_environment

jinja2 = pytest.importorskip("jinja2")
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402 - after the choice to skip

from fastattn.models import ModelError  # noqa: E402
from fastattn.models._chat import ChatTemplate  # noqa: E402

LARGE, STEPS = r"it (makes|writes) more than \d+ characters", "it takes too many steps"
GONE, MISSING = "is not there", "No filter named"
DEEP = "RecursionError|SyntaxError|it has more than 32 lists"
MILLION = "{% set x = 'a' * 1000000 %}"
RANGE = "{% set r = range(100000) %}"


def doubled(step, first="{% set x = 'aaaaaaaaaa' %}", times=50):
    return first + f"{{% set x = {step} %}}" * times


HOSTILE = [
    ("{{ 'a' * 10**10 }}", LARGE),
    ("{{ 10**9 * 'ab' }}", LARGE),
    ("{{ [0] * 10**10 }}", LARGE),
    ("{% if ('a' * 10**10) == 'a' %}{% endif %}", LARGE),
    ("{% macro m(x='a' * 10**10) %}{% endmacro %}{{ m() }}", LARGE),
    ("{{ 10**(10**8) }}", "an integer of more than 128 bits"),
    ("{{ 10**10**10 }}", "an integer of more than 128 bits"),
    ("{{ 2**127 * 2**127 }}", "an integer of more than 128 bits"),
    ("{{ ('f' * 100000)|int(0, 16) }}", "an integer of more than 128 bits"),
    ("{{ " + "9" * 60_000 + " }}", "ValueError"),
    ("{{ '%1000000000d' % 1 }}", "it formats with"),
    ("{{ '%(a1)1000000000d' % {'a1': 1} }}", "it formats with"),
    ("{{ '%.*f' % (1000000000, 1.5) }}", "it formats with"),
    ("{{ '%1000000000d'|format(1) }}", "it formats with"),
    (MILLION + "{{ ('%s' * 1000) % x }}", LARGE),
    ("{{ '%1000000000d' is odd }}", "the test 'odd' takes no str"),
    ("{{ '%1000000000d' is divisibleby(1) }}", "takes no str"),
    ("{{ ['%1000000000d']|select('even')|list }}", "takes no str"),
    ("{{ '{:1000000000}'.format(1) }}", f"format {GONE}"),
    ("{{ '{a:{b}}'.format_map({'a': 1, 'b': 10**9}) }}", f"format_map {GONE}"),
    ("{{ 'a'.ljust(10**10) }}", f"ljust {GONE}"),
    ("{{ 'a'['center'](10**10) }}", f"center {GONE}"),
    ("{{ (1).to_bytes(10**10, 'big') }}", f"to_bytes {GONE}"),
    ("{{ 'a'.translate({97: 'b'}) }}", f"translate {GONE}"),
    ("{{ {}.fromkeys(r, 1) }}", f"fromkeys {GONE}"),
    ("{{ 'a'|center(10**10) }}", MISSING),
    ("{{ 1.5|round(10**9) }}", MISSING),
    ("{{ [1]|batch(10**9, 0)|list }}", MISSING),
    ("{{ [[1]]|sum(start=[]) }}", MISSING),
    ("{{ 'a'|attr('ljust')(10**10) }}", MISSING),
    ("{{ ['a']|map('center', 10**10)|list }}", MISSING),
    ("{% filter center(10**10) %}a{% endfilter %}", MISSING),
    ("{{ 'a\nb'|indent(10**10) }}", LARGE),
    (MILLION + "{{ ('b\n' * 10000)|indent(x) }}", LARGE),
    ("{{ messages|tojson(indent=10**9) }}", LARGE),
    (MILLION + "{{ messages|tojson(separators=(x, x)) }}", LARGE),
    (MILLION + "{{ x.replace('a', x) }}", LARGE),
    (MILLION + "{{ x.replace('', x) }}", LARGE),
    (MILLION + "{{ x|replace('a', x) }}", LARGE),
    (MILLION + "{{ x.join(x) }}", LARGE),
    (MILLION + "{{ messages|join(x) }}", LARGE),
    ("{{ ['a' * 9999]|map('replace', 'a', 'b' * 9999)|list }}", LARGE),
    ("{% filter replace('a', 'b' * 100000) %}" + "a" * 1000 + "{% endfilter %}", LARGE),
    (doubled("x ~ x") + "{{ x }}", LARGE),
    (doubled("x + x") + "{{ x }}", LARGE),
    (doubled("[x, x]") + "{{ x }}", f"{LARGE}|{STEPS}"),
    (doubled("(x, x)") + "{{ {x: 1} }}", f"{LARGE}|{STEPS}"),
    (doubled("{'a': x, 'b': x}") + "{{ x|tojson }}", f"{LARGE}|{STEPS}"),
    (doubled("dict(a=x, b=x)") + "{{ x|string }}", f"{LARGE}|{STEPS}"),
    ("{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60, LARGE),
    (doubled("namespace(a=x, b=x)", "{% set x = namespace() %}"), "a namespace for a value"),
    ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", "a namespace for a value"),
    ("{% set ns = namespace() %}{{ ns ~ '' }}", "a namespace for a value"),
    ("{% set ns = namespace() %}{{ messages[0][ns].x }}", "a namespace for a value"),
    ("{% set ns = namespace() %}{{ ns is lower }}", "the test 'lower' takes no Namespace"),
    ("{% set ns = namespace() %}{{ raise_exception(ns) }}", "a namespace for a value"),
    ("{% set ns = namespace(a=0) %}{% for i in range(99) %}{% set ns.a = [ns.a] %}{% endfor %}", DEEP),
    ("{{ range(10**12)|list }}", "Range too big"),
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", STEPS),
    (RANGE + "{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}", STEPS),
    (RANGE + "{% for a in r %}{% for b in r if false %}{% endfor %}{% endfor %}", STEPS),
    (RANGE + "{% for a in r recursive %}{{ loop(r) if loop.depth < 4 }}{% endfor %}", STEPS),
    (RANGE + "{% set y = r|list %}{% for a in r %}{% if a == y %}{% endif %}{% endfor %}", STEPS),
    (RANGE + MILLION + "{% for a in r %}{{ x in x }}{% endfor %}", STEPS),
    (RANGE + "{% for a in r %}" + "a" * 50_000 + "{% endfor %}", LARGE),
    (RANGE + "{% set y %}{% for a in r %}" + "a" * 50_000 + "{% endfor %}{% endset %}", LARGE),
    (RANGE + "{% set n = namespace(a='') %}{% for a in r %}{% set n.a = n.a ~ 'aaaa' %}{% endfor %}", STEPS),
    (RANGE + "{% for a in r %}{{ ''|indent(-10**15) }}{% for b in r %}{% endfor %}{% endfor %}", STEPS),
    ("{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}", DEEP),
    ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", DEEP),
    ("{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", STEPS),
    ("{{ ('a' * 1000000).rfind('ab' + 'a' * 400000) }}", STEPS),
    ("{{ ('b' * 1000000).strip('a' * 999999 ~ 'b') }}", STEPS),
    ("{{ ('b' * 1000000)|trim('a' * 999999 ~ 'b') }}", STEPS),
    ("{{ lipsum(n=10**9) }}", "'lipsum' is undefined"),
    ("{{ cycler('a').next() }}", "'cycler' is undefined"),
    ("{{ strftime_now('%c' * 1000) }}", "a time has 2000 characters; expected at most 64"),
    ("{% block a %}{{ self.a() }}{% endblock %}", f"line 1: block {GONE}"),
    ("{% include 'x' %}", f"line 1: include {GONE}"),
    ("a" * 70_000, "it has 70000 characters; expected at most 65536"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", DEEP),
    ("{{ 1" + " + 1" * 15_000 + " }}", DEEP),
    ("{{ 'a'" + "|e" * 20_000 + " }}", DEEP),
    ("{#" * 30_000, "TemplateSyntaxError"),
    ("{{" * 30_000, "TemplateSyntaxError|RecursionError"),
    ("{% if 1 %}" * 6000, "TemplateSyntaxError|RecursionError"),
]  # fmt: skip


def template(source, **values):
    return ChatTemplate(Path("chat_template.jinja"), source, False, values)


@pytest.mark.parametrize(("source", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_template_makes_and_does_is_bounded(source, message):
    """Most of these took all memory, or minutes and more."""
    with pytest.raises(ModelError, match=rf"^chat_template.jinja: the chat template fails, .*({message})"):
        template(source).render("", ("alpha", "bravo"))


CHILD = """
import resource, sys
import test_sandbox

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)

before = peak()
for source, _ in test_sandbox.HOSTILE:
    try:
        test_sandbox.template(source).render("", ("alpha", "bravo"))
    except test_sandbox.ModelError:
        print(end=".")
print(peak() - before)
"""


def test_what_a_template_makes_fits_into_little_memory():
    pytest.importorskip("resource")
    environment = child_environment() if COMPILED else child_environment(FASTATTN_BACKEND="numpy")
    environment["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
    command = [sys.executable, "-c", CHILD]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.count(".") == len(HOSTILE)
    assert int(run.stdout.strip(".")) < 200  # MB


def test_an_error_that_a_template_writes_is_cut():
    with pytest.raises(ModelError) as raised:
        template("{{ raise_exception('a' * 100000) }}").render("", ("alpha", "bravo"))
    assert len(str(raised.value)) < 1200


USUAL = [
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}\n{% endfor %}",
    """{%- set ns = namespace(found=false, last=messages|length - 1) %}
{%- for m in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if not ns.found and m.role == 'query' and m.content is string and not m.content.startswith('<') %}
{%- set ns.found = true %}{%- set ns.last = index %}{%- endif %}{%- endfor %}{{ ns.last }}{{ ns.found }}
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content.split('x')[-1].rstrip('\\n').lstrip() }}
{%- if loop.first %}{{ loop.previtem is defined }}{% elif loop.last %}{{ loop.length }}{%
endif %}{% endfor %}""",
    """{% macro tool(t, indent=2) %}{% if t is mapping %}{% for k, v in t.items() | sort %}
{{ k }}: {{ tool(v) }}{% endfor %}{% elif t is iterable and t is not string %}[{% for x in t -%}
{{ tool(x) }}{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ t }}{% endif %}{% endmacro %}
{% for t in tools %}{{ tool(t) }}{{ t | tojson(indent=4) }}{{ t | tojson }}{{ t.keys()
| list }}{% endfor %}""",
    """{% set texts = messages | map(attribute='content') | list %}{{ texts | join(', ') }}{{ texts }}
{{ messages | selectattr('role', 'equalto', 'document') | map(attribute='content') | first | upper }}
{{ texts | map('replace', 'a', 'b') | unique | join }}{{ '%s: %d' % ('a', 7) }}{{ '%05.1f' | format(2.5) }}
{{ texts[0].replace('a', 'xyz') ~ 3 ~ none ~ [1, 'b'] }}{{ 'a' * 3 }}{{ 7 // 2 }}{{ 7 % 4 }}
{{ 2 ** 10 }}{{ 2 ** -1 }}""",
    """{% for m in messages %}{% if loop.index is odd %}{{ m.content.replace('a', 'b', 1) }}{%
continue %}{% endif %}
{{ loop.cycle('x', 'y') }}{{ loop.changed(m.role) }}{{ 'a,b'.split(',') | reverse | list }}{% endfor %}
{% set block %}{{ messages[0].content }}!{% endset %}{{ block | length }}{{ block | indent(3, true) }}
{% macro wrap() %}<{{ caller('in') }}>{% endmacro %}{% call(x) wrap() %}{{ x }}{% endcall %}""",
    """{% for key, value in dict(a=1, b=[1, 2.5, true]).items() %}{{ key }}={{ value }}{% endfor %}
{{ {'a': {'b': (1,)}} }}
{{ missing is defined }}{{ missing | default('none') }}{{ messages[5] is defined }}{{ messages[0].nothing }}
{% filter upper %}a {{ messages[0].role }}{% endfilter %}{{ messages | length > 1 and 'x' in 'xyz' }}
{{ range(3) | list }}
{{ '<&>' | e }}{{ '<' | safe }}{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable
else x }}{% endfor %}""",
]  # fmt: skip


@pytest.mark.parametrize("source", USUAL, ids=range(len(USUAL)))
def test_templates_write_what_they_wrote_without_bounds(source):
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    tools = [
        {"name": "f", "parameters": {"type": "object", "required": ["a", "b"], "deep": [[1], {"x": None}]}}
    ]
    for pair in (("alpha", "bravo xa"), ("<é>" * 9, "long " * 200_000)):
        messages = [
            {"role": role, "content": text} for role, text in zip(("query", "document"), pair, strict=True)
        ]
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": False}
        expected = plain.from_string(source).render(given)
        assert template(source, tools=tools).render("", pair) == expected
        assert expected
