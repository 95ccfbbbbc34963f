"""Chat templates against transformers' apply_chat_template."""

import json
from collections import OrderedDict
from enum import Enum

import numpy as np
import pytest
import tokenizers
import transformers

from fastattn.models._chat import conversation

USUAL = [
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}\n{% endfor %}",
    """{% macro tool(t, indent=2) %}{% if t is mapping %}{% for k, v in t.items() | sort %}
{{ k }}: {{ tool(v) }}{% endfor %}{% elif t is iterable and t is not string %}[{% for x in t -%}
{{ tool(x) }}{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ t }}{% endif %}{% endmacro %}
{% for t in tools %}{{ tool(t) }}{{ t | tojson(indent=4) }}{{ t | tojson }}{{ t.keys()
| list }}{% endfor %}""",
    """{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}
<|assistant|>
  {% generation %}
{{ m.content }}{% set said = m.role %}<|end|>
  {%- endgeneration %}
{{ said is defined }}{% break %}{% endfor %}{{ strftime_now('%Y %%') }}{% block end %}.{% endblock %}""",
]  # fmt: skip


class Role(str, Enum):
    USER = "user"


TOOLS = [{"name": "f", "parameters": {"type": "object", "required": ["a", "b"], "deep": [[1], {"x": None}]}}]
LONG = [("query", "<é>" * 9), ("document", "long " * 200_000)]
TALKS = [
    [{"role": role, "content": text} for role, text in pairs]
    for pairs in ([("query", "alpha"), ("document", "bravo xa")], LONG)
]


@pytest.fixture
def written(tmp_path):
    """Calls that write a conversation by a template: transformers' and ours."""

    def write(source, messages, **values):
        own = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, chat_template=source)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
        return (
            lambda: tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **values
            ),
            lambda: conversation(tmp_path, messages, values)[0],
        )

    return write


@pytest.mark.parametrize("source", USUAL, ids=range(len(USUAL)))
def test_templates_write_what_transformers_writes(source, written):
    for messages in TALKS:
        theirs, ours = written(source, messages, tools=TOOLS)
        assert ours() == theirs() != ""


def test_values_are_those_of_python(written):
    values = {
        "a": np.float32(0.5),
        "b": np.bool_(False),
        "c": (1, np.int64(2)),
        "d": OrderedDict(e=Role.USER),
    }
    theirs, ours = written(
        "{{ [a, b, c, d] }}{{ messages }}", [{"role": Role.USER, "content": "x"}], **values
    )
    assert ours() == theirs()
