"""Chat templates give the text that transformers gives, and cannot harm the process that renders them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from opgraft.errors import CheckpointError, RequestError
from opgraft.serving.chat_template import ChatTemplate
from opgraft.serving.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TWICE = (
    "{% set n = namespace(x=['a']) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)

MARKED = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|system|>\\nBe brief.<|end|>\\n' }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

BRACKETED = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Turns go user, assistant, user') }}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' ~ (system ~ '\\n\\n' if loop.first and system is defined) ~ message.content ~ ' [/INST]' }}
    {%- else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}
{%- endfor %}"""

WITH_TOOLS = """\
{{- bos_token }}Today: {{ strftime_now('%Y') }}
{% if tools is not none %}
# Tools
{% for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
{% endfor %}
{% endif %}
{% set seen = namespace(last=-1, think='') %}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% if message.tool_calls %}
        {% for call in message.tool_calls %}
<call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</call>
        {% endfor %}
    {% elif message.content is string %}
        {% generation %}{{ message.role }}: {{ message.content }}{% endgeneration %}

    {% else %}
        {% for part in message.content if part.type == 'text' %}{{ '|' if not loop.first }}{{ part.text }}{% endfor %}
    {% endif %}
    {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {% set seen.last = loop.index0 %}
{% endfor %}
last {{ seen.last }} {{ enable_thinking if enable_thinking is defined else 'unset' }}
{% if add_generation_prompt %}assistant:{% endif %}
"""

WITH_MACRO = """\
{% macro line(role, text='-') %}{{ role|upper }}={{ text|default('none', true)|replace('\\n', ' ') }};{% endmacro %}
{% set text %}
{% for group in messages | groupby('role') %}
{{ line(group.grouper, group.list | map(attribute='content') | join(',')) }}
{% endfor %}
{% endset %}
{{ text }}
{% call(x) twice() %}{{ x }}{% endcall %}{{ messages | length }} {{ messages[-1].content[:3] }}
{{ 7 // 2 * 1.5 }} {{ 'ab' * 3 }} {{ [1] + [2] }} {{ 'n%03d' % 7 }} {{ dict(a=1) }} {{ messages[0].get('x', 'y') }}
{{ '{}-{a[0]:>4}'.format('<x>', a=[7]) }} {{ 'Now %s at %(percent)s' | replace('%(', '%%(') | format('x') }}
{{ [[1], [2]] | sum(start=[]) }} {{ [1, 2] | sum }} {{ messages | map(attribute='role') | select | first }}
{% set roles = messages | map(attribute='role') %}{{ 'y' if roles }}{{ roles | join('|') }}{{ roles | join('|') }}
{{ ('a' | safe).format('<') }}{{ 'a-b'.split('-') }} {{ '-'.join(messages | map(attribute='role')) }}
{{ u }}
""".replace("{% call", "{% macro twice() %}{{ caller(1) }}{{ caller(2) }}{% endmacro %}{% call")

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> & 'more'",
        "parameters": {"é": [1, 2.5]},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi\nthere <b>&\"' 漢字"}],
    [
        {"role": "system", "content": " s "},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": " a "},
    ],
    [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4", "reasoning": "easy"},
    ],
]


def chat_template(source: str, name: str = "default") -> ChatTemplate:
    return ChatTemplate(Tokenizer(Path("model"), None, SPECIAL, {name: source}))


def by_transformers(source: str, messages: list[dict[str, Any]], **values: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    kept = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    rendered, _ = utils.render_jinja_template([kept], chat_template=source, **SPECIAL, **values)
    return str(rendered[0])


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("source", [MARKED, BRACKETED, WITH_TOOLS, WITH_MACRO])
def test_the_text_of_transformers(
    source: str, messages: list[dict[str, Any]], prompt: bool
) -> None:
    """Marks, brackets, tools and macros: each character is as in transformers."""
    text = chat_template(source).render(messages, add_generation_prompt=prompt)
    assert text == by_transformers(source, messages, add_generation_prompt=prompt)
    assert len(text) > 10


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": False}])
def test_tools_and_content_in_parts(thinking: dict[str, bool]) -> None:
    """Tools, calls of tools, their answers, and content in parts reach the template."""
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, CALL, {"role": "tool", "content": "3"}]
    text = chat_template(WITH_TOOLS).render(messages, tools=[TOOL], values=thinking)
    assert text == by_transformers(
        WITH_TOOLS, messages, tools=[TOOL], add_generation_prompt=True, **thinking
    )
    assert "Adds <two> & 'more'" in text
    assert "a|b" in text
    assert str(datetime.datetime.now().year) in text


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", CHATS)
def test_the_language_model(
    smollm2, smollm2_of_transformers, messages: list[dict[str, Any]], prompt: bool
) -> None:
    """The template and the tokens of SmolLM2 are those of transformers."""
    text = ChatTemplate(smollm2).render(messages, add_generation_prompt=prompt)
    options = {"add_generation_prompt": prompt}
    assert text == smollm2_of_transformers.apply_chat_template(messages, tokenize=False, **options)
    ids = smollm2_of_transformers.apply_chat_template(messages, return_dict=True, **options)[
        "input_ids"
    ]
    assert smollm2.encode(text, add_special_tokens=False) == ids


def test_templates_by_name() -> None:
    """A template for tools goes before the default one where there are tools, and others go by their names."""
    templates = {"default": "d", "tool_use": "t", "rag": "r{{ documents[0].text }}"}
    chat = ChatTemplate(Tokenizer(Path("model"), None, {}, templates))
    message = [{"role": "user", "content": ""}]
    assert chat.render(message) == "d"
    assert chat.render(message, tools=[TOOL]) == "t"
    assert chat.render(message, name="rag", documents=[{"text": "x"}]) == "rx"
    with pytest.raises(RequestError, match="has no chat template 'rga': did you mean 'rag'"):
        chat.render(message, name="rga")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 1000000 steps",
        ),
        ("{% for a in [1,1] recursive %}{{ loop([1, 1]) }}{% endfor %}", "recursion"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}"
            + "text" * 1000
            + "{% endmacro %}{{ f(60) }}",
            "more than|longer than",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(10**9) %}{% endfor %}", "with the number 1e"),
        ("{% for i in range(200000) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 10**9 }}", "longer than"),
        ("{{ 10**9 * [0] }}", "longer than"),
        ("{{ 9**(9**9) }}", "power 3.87e"),
        ("{{ 'a'.ljust(10**9) }}", "with the number 1e"),
        ("{{ '%999999999d' % 1 }}", "longer than"),
        ("{{ '%*d' % (999999999, 1) }}", "longer than"),
        ("{{ 'a' | center(10**9) }}", "with the number 1e"),
        (
            "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "longer than",
        ),
        (
            "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "longer than",
        ),
        (
            "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "longer than",
        ),
        ("{{ (messages * 99999) | join('a' * 99999) }}", "longer than"),
        ("{{ ('a' * 99999) | list | join('a' * 99999) }}", "longer than"),
        ("{{ ('a' * 99999).join('a' * 99999) }}", "longer than"),
        ("{{ ('a' * 99999).join(('a' * 99999) | map('upper')) }}", "longer than"),
        ("{{ namespace(a='a' * 99999) | list }}", "not iterable"),
        ("{{ [namespace(a='a' * 99999)] | join('', 'a') }}", "puts a namespace"),
        ("{{ ('a' * 99999) | replace('a', 'b' * 99999) }}", "longer than"),
        ("{{ ('a' * 99999).replace('a', 'b' * 99999) }}", "longer than"),
        (
            "{{ ('a' * 99999).encode().replace('a'.encode(), ('b' * 99999).encode()) }}",
            "longer than",
        ),
        ("{{ ('a' * 99999).translate({97: 'b' * 99999}) }}", "longer than"),
        ("{{ ('a' * 9999999).rfind('b' + 'a' * 99999) }}", "longer than"),
        ("{{ ('\t' * 999999).expandtabs(99999) }}", "longer than"),
        ("{{ ('\n' * 999999) | indent(99999, blank=true) }}", "longer than"),
        ("{{ ([[1]] * 99999) | tojson(indent=99999) }}", "longer than"),
        ("{{ ([1] * 99999) | tojson(separators=('a' * 99999, '')) }}", "longer than"),
        ("{{ (['a' * 99999] * 160) | sum(start='') }}", "more than 1073741824 bytes"),
        ("{{ '{:999999999}'.format(1) }}", "longer than"),
        ("{{ '{:{}}'.format(1, 999999999) }}", "with the number 1e"),
        ("{{ '{:{a[0]}}'.format(1, a=[999999999]) }}", "longer than"),
        ("{{ ('{0}' * 99999).format('a' * 99999) }}", "more than 1073741824 bytes"),
        ("{{ '%999999999d' | format(1) }}", "longer than"),
        ("{{ '%(a)999999999d' % {'a': 1} }}", "longer than"),
        ("{{ ('%(a)s' * 99999) % {'a': 'a' * 99999} }}", "longer than"),
        ("{{ strftime_now('%9999999Y' * 99999) }}", "longer than"),
        ("{{ 1.5 | round(10**8) }}", "with the number 1e"),
        ("{{ [1] | slice(10**8) | list }}", "with the number 1e"),
        ("{{ [1] | batch(999999, 'a' * 9999) | list }}", "longer than"),
        (
            "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "16384 bits",
        ),
        ("{{ ('f' * 99999) | int(base=16) }}", "16384 bits"),
        (TWICE, "longer than"),
        (TWICE.replace("[n.x, n.x]", "dict(a=n.x, b=n.x)"), "longer than"),
        (TWICE.replace("[n.x, n.x]", "cycler(n.x, n.x).items"), "longer than"),
        (TWICE.replace("[n.x, n.x]", "[n.x] | batch(2, n.x) | first"), "longer than"),
        (TWICE.replace("[n.x, n.x]", "(n.x, n.x)"), "longer than"),
        (TWICE.replace("[n.x, n.x]", "{1: n.x, 2: n.x}.values()"), "longer than"),
        (
            TWICE.replace("[n.x, n.x]", "namespace(a=n.x, b=n.x)") + "{{ [n.x] }}",
            "puts a namespace",
        ),
        (
            "{% for i in range(99999) %}{% set x = 'a' * 16000000 %}{% endfor %}",
            "more than 1073741824 bytes",
        ),
        (
            "{% set x = 'a' * 16000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
            "1073741824 bytes",
        ),
        (
            "{% for i in range(99999) %}{{ messages[0].role * 9999 }}{% endfor %}",
            "writes more than",
        ),
        (
            "{% set x %}{% for i in range(99999) %}{{ messages[0].role * 9999 }}{% endfor %}{% endset %}",
            "writes more",
        ),
        ("{% for i in range(99999) %}" + "text" * 1000 + "{% endfor %}", "writes more than"),
    ],
)
def test_limits(source: str, reason: str) -> None:
    """Loops without end and huge texts are an error of the request, soon and with little memory."""
    with pytest.raises(
        RequestError, match=rf"'default' of the model cannot make a text of.*({reason})"
    ):
        chat_template(source).render([{"role": "user", "content": "x"}])


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that is slow at few steps is stopped too."""
    monkeypatch.setattr("opgraft.serving.template_budget.MOST_SECONDS", -1.0)
    with pytest.raises(RequestError, match="takes longer than -1 seconds"):
        chat_template("{% for i in [1] %}{% endfor %}").render([{"role": "user"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n['__class__'] = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ lipsum(9) }}",
        "{{ ('a' | safe).striptags() }}",
        "{{ 'a' | urlize }}",
    ],
)
def test_the_sandbox(source: str) -> None:
    """Templates reach neither the internals of Python nor files, and change nothing of the caller's."""
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises((RequestError, CheckpointError), match="the chat template 'default' of "):
        chat_template(source).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_a_template_that_refuses() -> None:
    """What the template says, and of which model it is, stands in the error."""
    with pytest.raises(RequestError, match=r"Turns go user, assistant, user\. Change the messages"):
        chat_template(BRACKETED).render([{"role": "assistant", "content": "x"}])


def test_no_template() -> None:
    """A model without chat template says so, and what to do."""
    with pytest.raises(
        RequestError,
        match=r"model has no chat template.*pass a prompt as text.*chat_template\.jinja",
    ):
        ChatTemplate(Tokenizer(Path("model"), None)).render([{"role": "user", "content": "x"}])


def test_a_broken_template() -> None:
    """A template that is none is an error of the checkpoint, with the line."""
    with pytest.raises(
        CheckpointError, match="'default' of model, line 2 is none: TemplateSyntaxError"
    ):
        chat_template("a\n{% for %}").render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "the chat has no messages"),
        (["Hi"], r"messages\[0\] is str, expected a dict"),
        (
            [{"role": "user", "content": object()}],
            r"messages\[0\]\['content'\] is object, and chat templates take plain",
        ),
        (
            [{"role": "user", "content": [Path("x")]}],
            r"messages\[0\]\['content'\]\[0\] is PosixPath",
        ),
    ],
)
def test_messages_that_are_none(messages: Any, reason: str) -> None:
    """Messages of another kind are refused with their places."""
    with pytest.raises(RequestError, match=reason):
        chat_template(MARKED).render(messages)
