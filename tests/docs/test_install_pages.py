"""The install pages: one for each vendor in two languages that say the same, linked from both READMEs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from qiao.observability.drivers import known_drivers

from tests.docs.test_documents import LINK, blocks
from tests.support.source import ROOT

FOLDER = ROOT / "docs/install"
VENDORS = ("ascend", "cambricon", "dcu", "cuda")


def pair(vendor: str) -> tuple[Path, Path]:
    return FOLDER / f"{vendor}.md", FOLDER / f"{vendor}.zh-CN.md"


def cells(page: Path) -> list[list[str]]:
    """Versions, names in code and numbers of each table row: what does not depend on the language."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [sorted(re.findall(r"`[^`]+`|(?<![A-Za-z])\d[\w.+]*", row)) for row in rows]


@pytest.mark.parametrize("vendor", VENDORS)
def test_both_languages_say_the_same(vendor: str) -> None:
    english, chinese = pair(vendor)
    assert cells(english) == cells(chinese)
    first = [[line.split("#")[0].rstrip() for line in block.splitlines()] for block in blocks(english, "bash")]
    second = [[line.split("#")[0].rstrip() for line in block.splitlines()] for block in blocks(chinese, "bash")]
    assert first == second
    headings = [len(re.findall(r"^## ", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in (english, chinese)]
    assert headings[0] == headings[1] >= 5


@pytest.mark.parametrize("vendor", VENDORS)
def test_each_page_has_what_a_user_needs(vendor: str) -> None:
    known = next(e for e in known_drivers()["accelerators"] if e["name"] == vendor)
    for page in pair(vendor):
        text = page.read_text(encoding="utf-8")
        assert known["package"] in text and "qiao doctor" in text
        assert "PT_HPU_" in text and "torch==2.1.0-npu" in text
        nodes = [node.rstrip("*").replace("[0-9]", "") for node in known["devices"]]
        assert all(node in text for node in nodes), nodes
        assert f"`{known['environment'][0]}`" in text
    assert all(f"]({page.name})" in (FOLDER / "README.md").read_text(encoding="utf-8") for page in pair(vendor))


def test_the_readmes_link_to_them() -> None:
    for readme in ("README.md", "README.zh-CN.md"):
        assert "docs/install/README.md" in LINK.findall((ROOT / readme).read_text(encoding="utf-8"))
