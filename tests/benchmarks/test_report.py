"""The Markdown: verdicts in words, what is missing as a dash, the README filled again and again."""

from __future__ import annotations

import pytest

from benchmarks.comparison.report import END_MARK, MARK, fill, markdown, number, readme_figures, table
from benchmarks.comparison.roofline import SHAPES, SMOLLM2, decode_bytes, layer_weights, limit, prefill_ops, shares
from tests.benchmarks.data import results, run

DATA = results(
    run("qiao 4 bit", "single", decode_rate=300.0, output_rate=250.0),
    run("openvino int4", "single", decode_rate=100.0, output_rate=90.0),
    run("qiao 4 bit", "streams8", full_rate=100.0),
    run("openvino int4", "streams8", full_rate=100.0),
    skipped=[{"size": "135m", "format": "4bit", "peer": "vllm GPTQ", "why": "cannot run here: no such instruction"}],
)


def row(text: str, *starts: str) -> str:
    return next(line for line in text.splitlines() if all(start in line for start in starts))


def test_verdicts_and_reasons_are_said() -> None:
    text = markdown(DATA)
    assert row(text, "single stream decode", "135M", "4 bit").endswith("| 3.00× | ≥ 2.5× | met | 3.18× |")
    assert "| 1.00× | ≥ 2.5× | **missed** | " in row(text, "8 streams", "135M", "4 bit")
    assert "cannot run here: no such instruction" in text
    assert "24 streams, tokens/s" not in text  # neither Qiao nor a peer was measured


def test_an_empty_run_still_renders() -> None:
    assert "nothing was measured" in markdown(results())


def test_numbers_keep_three_digits() -> None:
    assert [number(v) for v in (None, 0.123, 9.996, 12.34, 99.96, 1234.5)] == [
        "–",
        "0.12",
        "10.0",
        "12.3",
        "100",
        "1,234",
    ]


def test_a_table_has_as_many_cells_in_each_line() -> None:
    assert {line.count("|") for line in table(("", "a"), [("x", "1"), ("y", "2")]).splitlines()} == {3}


@pytest.mark.parametrize(("language", "word"), [("en", "one stream"), ("zh", "单路解码")])
def test_readme_is_filled_and_filled_again(language: str, word: str) -> None:
    figures = readme_figures(DATA, language, "benchmarks/results/peers.md")
    assert word in figures and "**300**" in figures and "100 (openvino int4)" in figures
    once = fill(f"before\n{MARK}\nafter\n", figures)
    assert once.startswith("before\n") and once.endswith("after\n")
    assert fill(once, figures) == once
    assert fill(once, "other") == f"before\n{MARK}\nother\n{END_MARK}\nafter\n"
    with pytest.raises(ValueError, match="figures"):
        fill("no place", figures)


def test_weights_of_both_shapes() -> None:
    """Against the parameter counts of the checkpoints, less embeddings and norms."""
    assert layer_weights(SMOLLM2) == 134_515_008 - 49152 * 576 - 61 * 576
    assert layer_weights(SHAPES["1b"]) == 1_100_048_384 - 2 * 32000 * 2048 - 45 * 2048


def test_shares_of_the_peaks() -> None:
    data = results(
        run("qiao 16 bit", "single", size="1b", decode_rate=10.0),
        run("qiao 16 bit", "prefill", size="1b", prefill_rate=50.0),
    )
    decode, prefill = shares(data)
    assert decode.share == pytest.approx(10 * decode_bytes(SHAPES["1b"], "16bit", 192) / 30e9)
    assert 0.6 < decode.share < 0.8 and decode.goal == 0.85
    assert prefill.share == pytest.approx(50 / 1024 * prefill_ops(SHAPES["1b"], 1024) / 150e9)
    assert prefill.value == pytest.approx(50 * 2 * 0.97e9 / 1e9, rel=0.1)  # two operations a weight and token


def test_the_limit_of_a_cell_is_what_the_peaks_allow() -> None:
    shape, peaks = SHAPES["1b"], {"memory_gb_s": 30.0, "fp32_gop_s": 150.0, "int8_gop_s": 300.0}
    assert limit(peaks, "single", "1b", "16bit") == pytest.approx(30e9 / decode_bytes(shape, "16bit", 192))
    assert limit(peaks, "prefill", "1b", "4bit") == pytest.approx(1024 * 300e9 / prefill_ops(shape, 1024))
    # Twice the memory bandwidth helps one stream and not 24, which are bound by arithmetic.
    faster = {**peaks, "memory_gb_s": 60.0}
    assert limit(faster, "single", "135m", "16bit") == pytest.approx(2 * limit(peaks, "single", "135m", "16bit"))
    assert limit(faster, "streams24", "135m", "4bit") == limit(peaks, "streams24", "135m", "4bit")
    # All arithmetic of 24 requests of 96 tokens that answer 160, at the peak.
    weights = 134_515_008 - 61 * 576
    least = (96 * layer_weights(SMOLLM2) + 160 * weights) * 2 / 300e9
    assert 0.8 * 160 / least < limit(peaks, "streams24", "135m", "4bit") < 160 / least
    assert limit(peaks, "poisson-0.6", "135m", "4bit") is None and limit({}, "single", "1b", "4bit") is None
