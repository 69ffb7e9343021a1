import tracemalloc

import pytest
from qiao.errors import ParameterError
from qiao.frontend import template_limits
from qiao.frontend.template import MAX_OUTPUT, ChatTemplate
from transformers.utils.chat_template_utils import _compile_jinja_template


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% for x in [].__class__.__base__.__subclasses__() %}{% endfor %}",
        "{{ raise_exception.__globals__.x }}",
    ],
)
def test_the_sandbox_stops_what_reaches_out(source: str) -> None:
    with pytest.raises(ParameterError, match=r"security|unsafe|not safely"):
        ChatTemplate(source).render({"messages": []})


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"])
def test_what_is_only_printed_prints_nothing(source: str) -> None:
    assert ChatTemplate(source).render({"messages": []}) == ""


LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}X"
    "{% endfor %}{% endfor %}{% endfor %}"
)
DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("X", ""),
        LOOP.replace("X", "some text"),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 99999999999 }}",
        "{{ [1] * 99999999999 }}",
        "{{ 9 ** 99999999 }}",
        "{{ '%09999999999d' % 1 }}",
        "{{ '%09999999999d' | format(1) }}",
        DOUBLE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        DOUBLE + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        DOUBLE + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(9999999999) | list }}",
    ],
)
def test_endless_work_and_growth_are_stopped(source: str) -> None:
    with pytest.raises(ParameterError):
        ChatTemplate(source).render({})


GROW = "{% set ns = namespace(x=3) %}{% for i in range(100) %}"
NEST = "{% set ns = namespace(x=[]) %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a'.zfill(10 ** 9) }}",
        "{{ '\t'.expandtabs(10 ** 9) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}",
        "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{{ ('{0}' * 9999).format('a' * 99999) }}",
        "{{ ('%(a)s' * 9999) % {'a': 'a' * 99999} }}",
        "{{ '%.999999999f' % 1.0 }}",
        "{{ ('a' * 99999).replace('a', 'a' * 99999) }}",
        "{{ ('a' * 99999) | replace('a', 'a' * 99999) }}",
        "{{ ('b' * 99999).join(['a'] * 9999) }}",
        "{{ (['a'] * 9999) | join('b' * 99999) }}",
        "{{ ('a' * 999999).translate({97: 'b' * 99999}) }}",
        "{{ ('\n' * 999999) | indent(999) }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ lipsum(n=10 ** 9) }}",
        "{{ [1] | slice(10 ** 9) | list }}",
        "{{ (['a' * 999999] * 99999) | map('upper') | list }}",
        "{{ (1).to_bytes(10 ** 9, 'big') }}",
        GROW + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
        GROW + "{% set ns.x = ns.x ** 99 %}{% endfor %}",
        NEST + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        NEST + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x | tojson }}",
        NEST + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | string }}",
        NEST + "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x ~ '' }}",
        "{% set x %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}",
        "{% macro f() %}{% for i in range(9999999) %}" + "a" * 9999 + "{% endfor %}{% endmacro %}{{ f() }}",
        "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{% set y = x | upper %}{% endfor %}",
    ],
)
def test_one_operation_cannot_take_all_memory_or_time(source: str) -> None:
    """Each would need gigabytes or minutes; a bounded peak is what tells refused from survived."""
    tracemalloc.start()
    try:
        with pytest.raises(ParameterError):
            ChatTemplate(source).render({})
        assert tracemalloc.get_traced_memory()[1] < 1 << 29
    finally:
        tracemalloc.stop()


def test_slow_operations_are_stopped_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    source = "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% if 'ab' in x %}{% endif %}{% endfor %}"
    with pytest.raises(ParameterError, match="processor time"):
        ChatTemplate(source).render({})


def test_output_is_bounded() -> None:
    line = "x" * 1000
    with pytest.raises(ParameterError, match="characters"):
        ChatTemplate("{% for i in range(99999) %}" + line + "{% endfor %}").render({})
    assert MAX_OUTPUT > 10 * 1024 * 1024


def test_a_limit_is_for_one_rendering_only() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}ok")
    assert {template.render({}) for _ in range(30)} == {"ok"}


VARIABLES = {
    "messages": [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "b", "tags": {"k": [1, None]}}],
    "name": "N",
}


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n    {{ m.role }}: {{ m['content'] }}\n{% endfor %}\n",
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.last }}{{ loop.previtem }};{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}",
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% for k, v in messages[1].items() %}{{ k }}={{ v }};{% endfor %}",
        "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}",
        "{{ 'a' ~ 1 ~ name ~ none }}{{ 'x' + name }}{{ [1] + [2] }}{{ 2 * 3 }}{{ 'ab' * 2 }}",
        "{{ 7 % 4 }}{{ '%s-%03d' % ('a', 7) }}",
        "{% set x %}a{{ name }}{% endset %}{{ x | upper }}{% set y | trim %}  b  {% endset %}[{{ y }}]",
        "{% macro f(a, b='d') %}<{{ a }}{{ b }}>{% endmacro %}{{ f(1) }}{{ f(2, b=3) }}",
        "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
        "{{ messages | map(attribute='role') | join(', ') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ undefined_name }}{{ undefined_name is defined }}{% for x in undefined_name %}y{% endfor %}",
        "{% generation %}{{ name }}{% endgeneration %}",
        "{{ '%s and %5.1f' | format('a', 2.25) }}{{ strftime_now('%%') }}",
        "{%- for a in [[1, 2], [3]] recursive -%}{{ loop(a) if a is iterable else a }}{%- endfor -%}",
    ],
)
def test_renders_as_transformers_does(source: str) -> None:
    assert ChatTemplate(source).render(VARIABLES) == _compile_jinja_template(source).render(**VARIABLES)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 +", "{% unknown_tag %}", "{{ x | no_such_filter }}"])
def test_syntax_errors_are_named(source: str) -> None:
    with pytest.raises(ParameterError, match="does not compile"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only user please') }}", "only user please"),
        ("{{ nothing.x.y }}", "'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ [1][5].x }}", "no element 5"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.missing() }}", "missing"),
    ],
)
def test_errors_in_a_template_carry_their_message(source: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        ChatTemplate(source).render(VARIABLES)
    assert caught.value.field == "messages"
