from pathlib import Path
from typing import Any

import pytest
from qiao.errors import ParameterError
from qiao.frontend import ChatRenderer
from qiao.loading import load_tokenizer

from tests.support.tokenizers import CHATML, byte_tokenizer

USER = {"role": "user", "content": "hi"}


def renderer(folder: Path, template: str | None = CHATML) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(byte_tokenizer(folder, chat_template=template)))


@pytest.fixture(scope="module")
def chatml(bytetok: Any) -> ChatRenderer:
    return ChatRenderer(bytetok)


CONVERSATION = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "yes é "}]


@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_agrees_with_transformers(chatml: ChatRenderer, bytetok: Any, options: dict[str, bool]) -> None:
    expected = bytetok.apply_chat_template(CONVERSATION, tokenize=False, **options)
    assert chatml.render(CONVERSATION, **options) == expected


@pytest.mark.parametrize("role", ["system", "user", "assistant", "developer", "tool"])
def test_text_parts_are_joined_for_every_role(chatml: ChatRenderer, role: str) -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    assert chatml.render([{"role": role, "content": parts}]) == chatml.render([{"role": role, "content": "Be brief."}])


def test_openai_format_keeps_the_parts(bytetok: Any) -> None:
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    chat = ChatRenderer(bytetok, template)
    assert (
        chat.render([USER, {"role": "user", "content": [{"type": "text", "text": "b"}]}], content_format="openai")
        == "[hi][b]"
    )


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], r"messages\[0\]\.content\[0\]"),
        ([{"type": "text"}], r"messages\[0\]\.content\[0\]"),
        ([{"type": "text", "text": 5}], r"messages\[0\]\.content\[0\]"),
        ([7], r"messages\[0\]\.content\[0\]"),
        (7, r"messages\[0\]\.content"),
        (None, r"messages\[0\]\.content"),
        ({"text": "x"}, r"messages\[0\]\.content"),
    ],
)
def test_contents_that_are_no_text_are_named(chatml: ChatRenderer, content: Any, field: str) -> None:
    with pytest.raises(ParameterError, match=field):
        chatml.render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "messages", [[], "hi", None, {"role": "user"}, [3], [{"content": "x"}], [{"role": 3, "content": "x"}]]
)
def test_messages_that_are_none(chatml: ChatRenderer, messages: Any) -> None:
    with pytest.raises(ParameterError, match="messages"):
        chatml.render(messages)


def test_the_templates_own_refusal_reaches_the_user(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
        "{% if loop.index0 and loop.previtem.role == m.role %}{{ raise_exception('must alternate') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    chat = renderer(tmp_path, template)
    assert chat.render([USER]) == "hi"
    with pytest.raises(ParameterError, match="No system role"):
        chat.render([{"role": "system", "content": "s"}, USER])
    with pytest.raises(ParameterError, match="must alternate"):
        chat.render([USER, USER])


def test_a_model_without_template(tmp_path: Path) -> None:
    chat = renderer(tmp_path, None)
    assert not chat.available
    with pytest.raises(ParameterError, match="no chat template"):
        chat.render([USER])


def test_options_reach_the_template(bytetok: Any) -> None:
    source = "{{ tools }}|{{ documents }}|{{ enable_thinking }}|{{ depth }}|{{ bos_token }}{{ eos_token }}"
    chat = ChatRenderer(bytetok, source)
    text = chat.render(
        [USER], tools=[{"a": 1}], documents=[{"b": 2}], chat_template_kwargs={"enable_thinking": False}, depth=3
    )
    assert text == "[{'a': 1}]|[{'b': 2}]|False|3|<s></s>"
    assert chat.render([USER]) == "None|None|||<s></s>"


def test_template_options_cannot_replace_the_messages(bytetok: Any) -> None:
    chat = ChatRenderer(bytetok, "{{ messages[0].content }}{{ add_generation_prompt }}")
    assert chat.render([USER], chat_template_kwargs={"messages": [], "add_generation_prompt": 5}) == "hiTrue"


def test_generation_prompt_and_continuation_exclude_each_other(chatml: ChatRenderer) -> None:
    with pytest.raises(ParameterError, match="continue_final_message"):
        chatml.render([USER], continue_final_message=True)


@pytest.mark.parametrize("last", ["", "x", "  spaced  ", "hi"])
def test_continuation_ends_with_the_last_message(chatml: ChatRenderer, last: str) -> None:
    messages = [USER, {"role": "assistant", "content": last}]
    text = chatml.render(messages, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\n" + last)


def test_continuation_with_a_template_that_trims(bytetok: Any) -> None:
    chat = ChatRenderer(bytetok, "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}")
    messages = [USER, {"role": "assistant", "content": "ab  "}]
    assert chat.render(messages, continue_final_message=True, add_generation_prompt=False) == "<hi><ab"


def test_developer_is_system_where_the_template_does_not_know_it(chatml: ChatRenderer, bytetok: Any) -> None:
    assert "system\nx" in chatml.render([{"role": "developer", "content": "x"}])
    chat = ChatRenderer(bytetok, "{% if messages[0].role == 'developer' %}dev{% endif %}")
    assert chat.render([{"role": "developer", "content": "x"}]) == "dev"


def call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
    }


def test_tool_calls_have_objects_as_arguments(bytetok: Any) -> None:
    chat = ChatRenderer(bytetok, "{{ messages[-1].tool_calls[0].function.arguments.x }}{{ messages[-1].content }}")
    given = call('{"x": 5}')
    assert chat.render([USER, given]) == "5"
    assert given["tool_calls"][0]["function"]["arguments"] == '{"x": 5}'
    assert chat.render([USER, call({"x": 6})]) == "6"
    assert chat.render([USER, call("")]) == ""
    with pytest.raises(ParameterError, match=r"arguments.*JSON"):
        chat.render([USER, call("{broken")])
    with pytest.raises(ParameterError, match="tool_calls"):
        chat.render([USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}])


def test_no_calls_are_the_same_as_none(bytetok: Any) -> None:
    """Llama 3's template counts the calls wherever the key is there."""
    chat = ChatRenderer(bytetok, "{{ messages|selectattr('tool_calls', 'defined')|list|length }}")
    assert chat.render([{"role": "assistant", "content": "x", "tool_calls": []}]) == "0"
    assert chat.render([call("{}")]) == "1"


@pytest.mark.parametrize("depth", [990, 30_000])
def test_deep_nesting_is_named(bytetok: Any, depth: int) -> None:
    chat = ChatRenderer(bytetok, "{{ messages|length }}")
    with pytest.raises(ParameterError, match=r"arguments.*nested"):
        chat.render([USER, call('{"a":' + "[" * depth + "]" * depth + "}")])
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(ParameterError, match=r"tools.*nested"):
        chat.render([USER], tools=[schema])


def test_named_templates(bytetok: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytetok, "chat_template", {"default": "plain", "tool_use": "with tools"})
    chat = ChatRenderer(bytetok)
    assert chat.render([USER]) == "plain"
    assert chat.render([USER], tools=[{"a": 1}]) == "with tools"


def test_a_template_from_a_file_or_as_text(bytetok: Any, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("from {{ 'file' }}")
    assert ChatRenderer(bytetok, str(file)).render([USER]) == "from file"
    assert ChatRenderer(bytetok, "inline {{ 1 }}").render([USER]) == "inline 1"
    with pytest.raises(ParameterError, match="chat_template"):
        ChatRenderer(bytetok, str(tmp_path / "missing.jinja"))


def test_a_request_own_template(chatml: ChatRenderer) -> None:
    assert chatml.render([USER], chat_template="own {{ messages[0].content }}") == "own hi"


LOOPS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }};{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + LOOPS + "{% endif %}{% endfor %}"
)


def test_the_format_of_contents_follows_the_template(bytetok: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    for source, content_format, expected in (
        (LOOPS, "auto", "a;b;"),
        (LOOPS, "openai", "a;b;"),
        (BOTH, "auto", "ab"),
        ("{{ messages[0].content }}", "auto", "ab"),
        ("{{ messages[0].content|length }}", "openai", "2"),
    ):
        assert ChatRenderer(bytetok, source).render(parts, content_format=content_format) == expected
    assert ChatRenderer(bytetok, LOOPS).render([{"role": "user", "content": "ab"}]) == "ab;"
