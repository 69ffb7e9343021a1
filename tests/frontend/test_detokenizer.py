import codecs
import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.frontend import TokenTable, make_detokenizer
from qiao.frontend.detokenizer import ByteDetokenizer, WindowDetokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

TEXT = st.text(st.sampled_from("ab  th e\n.é漢😀한"), max_size=12)
BYTE_IDS = st.lists(
    st.one_of(st.integers(0, 310), st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 256, 300])), max_size=12
)


@functools.cache
def table_of(tokenizer: Any) -> TokenTable:
    return TokenTable(tokenizer)


def stream(tokenizer: Any, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    detokenizer = make_detokenizer(table_of(tokenizer), prompt, skip)
    return [*(detokenizer.push(i) for i in output), detokenizer.flush()]


def decode(tokenizer: Any, ids: list[int], skip: bool = True) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


@settings(derandomize=True, max_examples=200, deadline=None)
@given(prompt=BYTE_IDS, output=BYTE_IDS, skip=st.booleans())
def test_any_bytes_give_the_whole_decode_minus_the_prompts(
    prompt: list[int], output: list[int], skip: bool, bytetok: Any
) -> None:
    """Also for ids without text, special tokens, broken characters, and a prompt that ends within a character."""
    whole = decode(bytetok, prompt + output, skip)
    raw = b"".join(table_of(bytetok).raw(i) for i in prompt if not (skip and i in (256, 257, 258, 259)))
    complete = codecs.getincrementaldecoder("utf-8")("replace").decode(raw)  # without an unfinished last character
    assert whole == complete + "".join(stream(bytetok, prompt, output, skip))


@settings(derandomize=True, max_examples=80, deadline=None)
@given(prompt=TEXT, output=TEXT, kind=st.sampled_from(["byte", "spm"]))
def test_pieces_of_valid_text_join_to_it(prompt: str, output: str, kind: str, bytetok: Any, spm: Any) -> None:
    """The rule itself, for every cut into tokens that the tokenizers make."""
    tokenizer = bytetok if kind == "byte" else spm
    ids = tokenizer(prompt + output)["input_ids"]
    after = decode(tokenizer, ids)
    complete = ""
    for cut in range(len(ids) + 1):
        before = decode(tokenizer, ids[:cut])
        if "\ufffd" not in before:  # otherwise the cut is within a character: what was complete before it still stands
            complete = before
        pieces = stream(tokenizer, ids[:cut], ids[cut:])
        assert all("\ufffd" not in piece for piece in pieces)
        assert complete + "".join(pieces) == after


def test_a_character_appears_once_with_its_last_byte(bytetok: Any) -> None:
    assert stream(bytetok, [120], list("é漢😀y".encode())) == ["", "é", "", "", "漢", "", "", "", "😀", "y", ""]


def test_a_prompt_that_ends_in_half_a_character_does_not_leak(bytetok: Any) -> None:
    assert stream(bytetok, [97, 98, 226, 130], [0xAC, 0x21]) == ["€", "!", ""]
    assert stream(bytetok, [97, 98, 226, 130], [0x21]) == ["\ufffd!", ""]


@pytest.mark.parametrize("skip", [True, False])
def test_ids_without_text_and_specials(bytetok: Any, skip: bool) -> None:
    assert "".join(stream(bytetok, [97], [310, 257, 300, 311, 5000], skip)) == ("hello" if skip else "</s>hello")


def test_an_unfinished_character_gives_one_mark_at_the_end(bytetok: Any) -> None:
    assert stream(bytetok, [97], [0xE2, 0x82]) == ["", "", "\ufffd"]


def test_leading_space_after_a_prompt_is_kept(bytetok: Any, spm: Any) -> None:
    for tokenizer in (bytetok, spm):
        prompt = tokenizer("x")["input_ids"]
        output = tokenizer("x leading")["input_ids"][len(prompt) :]
        assert "".join(stream(tokenizer, prompt, output)) == " leading"


def test_leading_space_at_the_start_of_a_text_is_the_marker(spm: Any) -> None:
    ids = spm("the")["input_ids"]
    assert "".join(stream(spm, [1], ids)) == decode(spm, [1, *ids]) == "the"
    assert "".join(stream(spm, [1], ids, skip=False)) == " the"


def test_text_is_not_held_back_for_want_of_a_space(bytetok: Any) -> None:
    pieces = stream(bytetok, [120], list(b"ABCDEFGHIJ0123456789"))
    assert [bool(piece) for piece in pieces[:-1]] == [True] * 20


def test_both_kinds_of_tokenizer_are_read_exactly(bytetok: Any, spm: Any) -> None:
    for tokenizer in (bytetok, spm):
        table = TokenTable(tokenizer)
        assert table.exact
        assert isinstance(make_detokenizer(table, [1], True), ByteDetokenizer)


def test_labels(table: TokenTable) -> None:
    assert [table.label(i) for i in (97, 0xE2, 257, 300, 310)] == ["a", "bytes:\\xe2", "</s>", "hello", "token_id:310"]
    assert table.raw(0xE2) == b"\xe2"
    assert table.raw(10**6) == b""


@pytest.fixture(scope="module")
def wordpiece() -> Any:
    vocab = {text: i for i, text in enumerate(["[UNK]", "hello", "##ing", "world", "!", "##s"])}
    tokenizer = Tokenizer(WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(prompt=st.lists(st.integers(1, 5), min_size=1, max_size=12), output=st.lists(st.integers(1, 5), max_size=12))
def test_a_tokenizer_of_another_kind_goes_through_its_own_decode(
    prompt: list[int], output: list[int], wordpiece: Any
) -> None:
    table = TokenTable(wordpiece)
    assert not table.exact
    assert isinstance(make_detokenizer(table, prompt, True), WindowDetokenizer)
    assert decode(wordpiece, prompt) + "".join(stream(wordpiece, prompt, output)) == decode(wordpiece, prompt + output)


def test_the_generic_kind_waits_for_characters_too(bytetok: Any) -> None:
    detokenizer = WindowDetokenizer(TokenTable(bytetok), [97, 226, 130], True)
    pieces = [detokenizer.push(i) for i in [0xAC, *"é".encode(), 310]]
    assert "".join([*pieces, detokenizer.flush()]) == "€é"
    assert "\ufffd" not in "".join(pieces)
