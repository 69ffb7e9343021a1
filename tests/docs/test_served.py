"""What was served on vendors' devices: every family that was left out gave the CPU's answers."""

from __future__ import annotations

import pytest

from tools.served_page import files, page

FAMILIES = {"nothing": set(), "allocation": {"allocate_kv"}, "attention": {"attention"}, "sampling": {"sample"}}
FAMILIES["matmul"] = {"matmul"}


@pytest.mark.parametrize("document", files(), ids=lambda d: d["plugin"])
def test_each_family_left_out_gave_the_cpus_answers_and_moved_in_the_plan(document) -> None:
    found = document["families"]
    assert set(found) == set(FAMILIES) and document["tokens"] >= 4
    for name, moved in FAMILIES.items():
        one = found[name]
        assert one["ok"] and one["equal"] == one["of"] >= 20
        assert moved <= set(one["planned_on_cpu"]) and set(one["ran_on_cpu"]) <= set(one["planned_on_cpu"])
        assert bool(one["ran_on_cpu"]) == bool(moved)
    assert not found["nothing"]["planned_on_cpu"] and found["nothing"]["replayed_steps"] > 0


def test_the_page_has_a_row_for_each_family() -> None:
    one = {"equal": 19, "of": 20, "planned_on_cpu": ["sample"], "ran_on_cpu": [], "replayed_steps": 3, "seconds": 7}
    about = {"plugin": "acme", "level": "device", "chip": "X2", "model": "m", "tokens": 4, "date": "2026-01-31"}
    lines = page("", [{**about, "families": {"sampling": one, "nothing": {**one, "kernels": {"k": 2}}}}]).splitlines()
    assert "## m on X2" in lines and "| sampling | 19 of 20 | `sample` | nothing | 3 | 7 |" in lines
    assert "`k` 2." in lines[-1]
