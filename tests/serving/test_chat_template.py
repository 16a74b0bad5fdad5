"""Chat templates give the text that transformers gives, and cannot harm the process that renders them."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from opgraft.errors import CheckpointError, RequestError
from opgraft.serving import template_renderer
from opgraft.serving.chat_template import ChatTemplate
from opgraft.serving.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

MARKED = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|system|>\\nBe brief.<|end|>\\n' }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

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


TEMPLATES: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def one_helper() -> Iterator[None]:
    """All tests share one helper process, as the chats of a server do."""
    CHAT.append(ChatTemplate(Tokenizer(Path("model"), None, SPECIAL, TEMPLATES)))
    yield
    CHAT.clear()


CHAT: list[ChatTemplate] = []


def chat_template(source: str) -> ChatTemplate:
    TEMPLATES["default"] = source
    return CHAT[0]


def helpers() -> list[int]:
    """Return the children of this process that render templates."""
    return [pid for pid in children(os.getpid()) if "template_process" in command_line(pid)]


def children(pid: int) -> list[int]:
    """Return the children of a process, which a thread of the process has started each."""
    listed = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for each in listed for child in each.split()]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


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


@pytest.mark.parametrize(
    "content", ["one", "one ", " one\n", "one two one", "end", "end ", "im", "|", "s", "a</s>"]
)
@pytest.mark.parametrize("source", [MARKED, BRACKETED, CHATML])
def test_going_on_with_the_last_message(source: str, content: str) -> None:
    """The text ends with the last message, as in transformers, also if it is a part of a template's mark."""
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": content}]
    text = chat_template(source).render(messages, continue_final_message=True)
    assert text == by_transformers(source, messages, continue_final_message=True)
    assert text.rstrip().endswith(content.strip())


@pytest.mark.parametrize(
    ("source", "content", "reason"),
    [
        (MARKED, " ", "which has no text"),
        ("{{ messages[0].content | upper }}", "one", "the chat template changes its text"),
        ("{{ messages[0].content | upper }}", "1", "the chat template changes its text"),
        ("{{ messages[0].content[2:] }}", "one", "the chat template changes its text"),
    ],
)
def test_no_message_to_go_on_with(source: str, content: str, reason: str) -> None:
    """A blank message, or one that the template changes, has no end in the text of the chat."""
    messages = [{"role": "assistant", "content": content}]
    with pytest.raises(RequestError, match=reason):
        chat_template(source).render(messages, continue_final_message=True)


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


NESTING = (
    "{% set n = namespace(x=['a']) %}{% for i in range(99999) %}{% set n.x = LIST %}{% endfor %}"
)
LONG, LARGE = "takes longer than 0.5 seconds", "takes more than 512 MiB of memory"
LIMITS = [
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", LONG),
    ("{{ 9**(9**9) }}", LONG),
    (
        "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        LONG,
    ),
    ("{{ (('ab' * 999999) | list + [1]) | groupby(1) }}{{ ('a ' * 999999) | wordwrap(1) }}", LONG),
    ("{{ 'a' * 10**9 }}", LARGE),
    ("{{ 10**9 * [0] }}", LARGE),
    ("{{ 'a'.ljust(10**9) }}", LARGE),
    ("{{ '%999999999d' % 1 }}", LARGE),
    ("{{ '%*d' % (999999999, 1) }}", LARGE),
    ("{{ '{:999999999}'.format(messages | length) }}", LARGE),
    ("{{ 'a' | center(10**9) }}", LARGE),
    ("{{ (messages * 99999) | join('a' * 99999) }}", LARGE),
    ("{{ ('a' * 99999).translate({97: 'b' * 99999}) }}", LARGE),
    ("{{ ('\n' * 999999) | indent(99999, blank=true) }}", LARGE),
    ("{{ ([[1]] * 99999) | tojson(indent=99999) }}", LARGE),
    ("{{ strftime_now('%9999999Y' * 99999) }}", LARGE),
    (
        "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        LARGE,
    ),
    (
        "{% for i in range(99999) %}" + "text" * 1000 + "{{ messages[0].role * 9999 }}{% endfor %}",
        LARGE,
    ),
    (NESTING.replace("LIST", "[n.x, n.x]") + "{{ n.x }}", LARGE),
    (
        "{% for i in range(99) %}" + "text" * 99999 + "{% endfor %}",
        "writes more than 16777216 characters",
    ),
    ("{% for i in range(200000) %}{% endfor %}", "Range too big"),
    ("{% for a in [1,1] recursive %}{{ loop([1, 1]) }}{% endfor %}", "recursion"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    (NESTING.replace("LIST", "[n.x]") + "{{ n.x | tojson }}", "recursion"),
    ("{{ raise_exception('a' * 9999999) }}", r"a…  ?\(9,999,999 characters\)"),
]
"""Templates that run on, fill the memory or recurse without end, and the limit that ends each."""


@pytest.mark.parametrize(("source", "reason"), LIMITS)
def test_limits(monkeypatch: pytest.MonkeyPatch, source: str, reason: str) -> None:
    """Loops without end, huge texts and deep recursion are an error of the request, and soon.

    If the machine is busy, the limit of time may come before the limit of memory.
    """
    monkeypatch.setattr(template_renderer, "MOST_SECONDS", 0.5)
    reasons = f"{reason}|{LONG}|crashed the process"
    words = rf"'default' of the model cannot make a text of.*({reasons})"
    started = time.monotonic()
    with pytest.raises(RequestError, match=words):
        chat_template(source).render([{"role": "user", "content": "x"}])
    assert time.monotonic() - started < 10


def test_a_helper_that_exceeds_a_limit_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next chat is rendered by a new helper, and nothing is left of the old one."""
    messages = [{"role": "user", "content": "x"}]
    assert chat_template("fine").render(messages) == "fine"
    (first,) = helpers()
    assert chat_template("as well").render(messages) == "as well"
    assert helpers() == [first]
    with pytest.raises(RequestError, match="takes more than 512 MiB of memory"):
        chat_template("{{ 'a' * 10**10 }}").render(messages)
    assert helpers() == []
    assert chat_template("fine").render(messages) == "fine"
    (second,) = helpers()
    assert second != first
    monkeypatch.setattr(template_renderer, "MOST_SECONDS", 0.1)
    with pytest.raises(RequestError, match=r"takes longer than 0\.1 seconds"):
        chat_template("{{ 9**(9**9) }}").render(messages)
    assert helpers() == []


def test_a_helper_that_was_killed_is_replaced() -> None:
    """The system may end a process for want of memory while nothing is rendered."""
    messages = [{"role": "user", "content": "x"}]
    assert chat_template("fine").render(messages) == "fine"
    (pid,) = helpers()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert chat_template("fine").render(messages) == "fine"


def test_an_interrupt_ends_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt from the keyboard ends the wait at once, and no answer comes late."""
    messages = [{"role": "user", "content": "x"}]
    chat_template("fine").render(messages)
    main = threading.main_thread().ident
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        chat_template("{{ 9**(9**9) }}").render(messages)
    timer.join()
    assert helpers() == []
    assert chat_template("fine").render(messages) == "fine"


def test_threads_share_the_helper() -> None:
    """Each thread gets the text of its own chat."""
    chat = chat_template("{{ messages[0].content }}")

    def render(number: int) -> str:
        return chat.render([{"role": "user", "content": f"text {number}"}])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(render, range(99))) == [f"text {number}" for number in range(99)]
    assert len(helpers()) == 1


PARENT = """
import os, sys
from pathlib import Path
from opgraft.serving import template_renderer

renderer = template_renderer.TemplateRenderer()
kind, text = renderer.render("{{ x }}", {"x": "fine"})
assert text == "fine"
tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
(helper,) = [int(pid) for file in tasks for pid in file.read_text().split()]
maps, environment = (Path(f"/proc/{helper}/{name}").read_bytes() for name in ("maps", "environ"))
print(helper, b"libtorch" in maps, b"SECRET" in environment, flush=True)
HOW
"""


@pytest.mark.parametrize("how", ["pass", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_helper_ends_with_its_parent(how: str) -> None:
    """However the parent ends. The helper has neither torch nor the parent's secrets."""
    done = subprocess.run(
        [sys.executable, "-c", PARENT.replace("HOW", how)],
        env={**os.environ, "API_KEY": "SECRET"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    pid, *found = done.stdout.split()
    assert found == ["False", "False"], done.stderr
    assert ended(int(pid)), done.stderr


def test_a_busy_helper_ends_after_its_parent() -> None:
    """A helper that is in a loop as its parent is killed ends after twice the limit of time."""
    killed = """
import threading
template_renderer.MOST_SECONDS = 0.5
threading.Timer(0.2, os.kill, (os.getpid(), 9)).start()
renderer.render("{{ 9**(9**9) }}", {})
"""
    command = [sys.executable, "-c", PARENT.replace("HOW", killed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert ended(int(done.stdout.split()[0]))


def ended(pid: int, seconds: float = 10) -> bool:
    """Return True if a process ends within some seconds."""
    until = time.monotonic() + seconds
    while Path(f"/proc/{pid}/maps").exists() and time.monotonic() < until:
        if not Path(f"/proc/{pid}/cmdline").read_bytes():  # nobody has asked for its status yet
            return True
        time.sleep(0.02)
    return time.monotonic() < until


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ lipsum(9) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages[0]) }}",
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
