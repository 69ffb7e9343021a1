import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from qiao.frontend import StopChecker

TEXT = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def run(checker: StopChecker, pieces: list[str]) -> tuple[str, list[str]]:
    """All text that was shown, and the text after each piece."""
    shown: list[str] = []
    for piece in pieces:
        shown.append(checker.push(piece))
        if checker.matched is not None:
            return "".join(shown), shown
    shown.append(checker.flush())
    return "".join(shown), shown


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Straight from the rule: the shortest prefix of the text that ends with a stop string, and its longest one."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(derandomize=True, max_examples=300, deadline=None)
@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 14)), include=st.booleans())
def test_the_cut_into_pieces_changes_nothing(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    checker = StopChecker(stops, include)
    shown, _ = run(checker, pieces)
    assert (shown, checker.matched) == expected(text, stops, include)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(text=TEXT, stops=STOPS)
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stops: list[str]) -> None:
    checker, shown = StopChecker(stops), ""
    for i, char in enumerate(text, start=1):
        shown += checker.push(char)
        if checker.matched is not None:
            return
        held = text[len(shown) : i]
        assert text[:i] == shown + held
        tails = [text[k:i] for k in range(i) if any(stop.startswith(text[k:i]) for stop in stops)]
        assert held == max(tails, key=len, default="")


def test_nothing_of_a_stop_string_is_shown_before_it_is_certain() -> None:
    checker = StopChecker(["DEFGHIJ"])
    assert [checker.push(char) for char in "DEFGHIJ"] == [""] * 7
    assert checker.matched == "DEFGHIJ"
    assert checker.flush() == ""


def test_near_miss_and_end_inside_a_possible_match() -> None:
    checker = StopChecker(["DEFZ"])
    assert [checker.push(char) for char in "DEFGH"] == ["", "", "", "DEFG", "H"]
    assert checker.push("xDE") == "x"
    assert checker.flush() == "DE"


def test_inactive_matches_stay_in_the_text_and_later_ones_count() -> None:
    checker = StopChecker(["\n"])
    assert checker.push("a\n", active=False) == "a\n"
    assert checker.push("b\nc") == "b"
    assert checker.matched == "\n"


def test_a_match_that_began_while_inactive_counts_when_it_completes_later() -> None:
    checker = StopChecker(["xy"])
    assert checker.push("ax", active=False) == "a"
    assert checker.push("y") == ""
    assert checker.matched == "xy"


def test_without_stop_strings_text_passes() -> None:
    checker = StopChecker([])
    assert checker.push("abc") == "abc"
    assert checker.flush() == ""
