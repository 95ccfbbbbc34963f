"""Chat templates of others: what they may call, and which values they read."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jinja2")

from fastattn.models import ModelError, _template
from fastattn.models._chat import ChatTemplate

PAIR = ("alpha", "bravo")


def template(source, **values):
    return ChatTemplate(Path("chat_template.jinja"), source, False, values)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% generation %}<{{ messages[0].content }}>{% endgeneration %}", "<alpha>"),
        ("{% generation %}{% set x = 1 %}{% endgeneration %}{{ x is defined }}", "False"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "query"),
        ("{{ ['<é>'] | tojson }}{{ strftime_now('%%') }}", '["<é>"]%'),
        ("{{ unk_token is defined }}{{ tools is none }}", "FalseTrue"),
        ("{{ '{:3}'.format(1) }}{{ 'a' | center(3) }}{{ 1.25 | round(1) }}", "  1 a 1.2"),
        ("{% set n = namespace(self=1) %}{% set n.x = dict(a=2) %}{{ n.self }}{{ n.x.a }}", "12"),
    ],
)  # fmt: skip
def test_what_a_template_writes(source, expected):
    assert template(source).render("", PAIR) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ dict.update(messages[0], role='x') }}", "{{ messages[0].update(role='x') }}",
        "{% set n = namespace() %}{% set n.__call__ = 1 %}", "{% set n = namespace(_x=1) %}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
    ],
)  # fmt: skip
def test_what_a_template_may_not_do(source):
    with pytest.raises(ModelError, match=r"^chat_template.jinja: the .* fails, (Security|Undefined)Error"):
        template(source).render("", PAIR)


def test_a_template_reads_only_values_of_python():
    """Methods of others may write files, as `tofile` does."""
    text = np.str_("alpha")
    assert template("{{ x.tofile is defined }}{{ x }}", x=text).render("", PAIR) == "Falsealpha"
    assert template("{{ messages[0].content.dump is defined }}").render("", (text, "")) == "False"
    assert template("{{ x }}", x=[np.bool_(True), (np.int8(3),)]).render("", PAIR) == "[True, (3,)]"
    with pytest.raises(TypeError, match=r"a value for the chat template is of type ndarray; expected texts"):
        template("", x={"y": np.zeros(2)}).render("", PAIR)


class Stop(Exception):
    """An error that no template raises."""


@pytest.mark.parametrize("error", [TimeoutError, Stop])
def test_an_error_of_a_signal_is_not_taken_for_a_templates(error, monkeypatch):
    def stopped(*args):
        raise error("time is up")

    monkeypatch.setattr(_template, "_raise", stopped)
    with pytest.raises(error, match=r"^time is up$"):
        template("{{ raise_exception('a') }}" + error.__name__).render("", PAIR)
    monkeypatch.setattr(_template, "compiled", stopped)
    with pytest.raises(error, match=r"^time is up$"):
        template("not compiled yet: " + error.__name__).render("", PAIR)


@pytest.mark.parametrize(
    "source", ["{% break %}", "{{ 'a' * 10**15 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_what_a_template_fails_with_is_its_own(source):
    with pytest.raises(ModelError, match=r"^chat_template.jinja: the chat template fails, "):
        template(source).render("", PAIR)


def test_an_error_that_a_template_writes_is_cut():
    with pytest.raises(ModelError) as raised:
        template("{{ raise_exception('a' * 100000) }}").render("", PAIR)
    assert len(str(raised.value)) < 1200
