"""What the documents say is so: links, commands, flags, targets, code and generated pages."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import qiao_reference
from qiao.cli.main import main
from qiao.contract import CATALOG
from qiao.models import describe
from qiao.registry import Policy, backend_of, make_plan
from qiao.server.flags import flags as server_flags
from qiao.server.flagtext import FLAG_TEXT
from qiao.vllm_arguments import ALIASES, FIXED, IGNORED, SHORT

from benchmarks.comparison.commands import parser as peers_parser
from tests.support.source import ROOT, relative
from tools import docs

PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/*.md", "plugins-*/*.md", "examples/**/*.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
)
GENERATED = {ROOT / page for page in docs.PAGES}
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of the page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks of the page in these languages."""
    return [code for language, code in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def command_lines(page: Path) -> list[list[str]]:
    """Commands of the page's shell blocks and of its inline code, split into words."""
    text = page.read_text(encoding="utf-8")
    lines = "\n".join(blocks(page, "bash", "sh", "")).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    words = []
    for line in lines:
        try:
            split = shlex.split(line, comments=True)
        except ValueError:
            continue
        if split:
            words.append([Path(split[0]).name, *split[1:]])
    return words


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"https?:|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", docs.PAGES)
def test_generated_pages_are_current(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == docs.PAGES[page](), "run: make docs"


def known_flags() -> dict[str, set[str]]:
    """Flags of each subcommand."""
    flags = {
        name: {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        for name, command in docs.commands().items()
    }
    known = [f"--{name.replace('_', '-')}" for name in (*server_flags(), *ALIASES, *FIXED, *IGNORED, "config", "help")]
    negated = [f"--no-{flag.option[2:]}" for flag in server_flags().values() if flag.kind == "bool"]
    serve = {*known, *negated, *SHORT, "-h"}
    return flags | {"serve": serve, "benchmarks/peers.py": peers_flags()}


def peers_flags() -> set[str]:
    """Flags of the comparison's subcommands."""
    subcommands = next(a for a in peers_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {option for command in subcommands.choices.values() for option in command._option_string_actions}


@pytest.mark.parametrize("page", [p for p in PAGES if p not in GENERATED], ids=relative)
def test_commands_and_flags_exist(page: Path) -> None:
    flags = known_flags()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    wrong = []
    for words in command_lines(page):
        if words[0] == "make" and len(words) > 1:
            wrong += [w for w in words[1:] if "=" not in w and w not in targets]
        elif words[0] == "qiao" and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]):
            used = {w.split("=")[0] for w in words[2:] if re.match(r"-{1,2}[a-zA-Z]", w)}
            name = " ".join(words[1:3]) if " ".join(words[1:3]) in flags else words[1]
            wrong += [name] if name not in flags else sorted(used - flags[name])
        elif words[0].startswith("--"):
            wrong += [] if any(words[0].split("=")[0] in known for known in flags.values()) else [words[0]]
    # Flags that belong to others' commands and are named in prose.
    assert not set(wrong) - {"--check", "--qiao-device", "--pyargs"}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_python_blocks_parse_and_import_what_exists(page: Path) -> None:
    import qiao.contract

    for code in blocks(page, "python"):
        if page in GENERATED:
            continue
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module in ("qiao", "qiao.contract"):
                module = qiao if node.module == "qiao" else qiao.contract
                assert all(hasattr(module, alias.name) for alias in node.names)


def test_both_readmes_show_the_same() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"

    def code(page: Path) -> list[str]:
        return [re.sub(r"\s*#.*", "", block) for block in blocks(page, "bash", "python")]

    def links(page: Path) -> set[str]:
        found = {target.split("#")[0] for target in LINK.findall(page.read_text(encoding="utf-8"))}
        return found - {"", english.name, chinese.name}

    def packages(page: Path) -> set[str]:
        return set(re.findall(r"`(qiao-[a-z]+)`", page.read_text(encoding="utf-8")))

    assert code(english) == code(chinese)
    assert links(english) == links(chinese)
    assert packages(english) == packages(chinese)


def test_every_hook_is_documented_and_tested() -> None:
    page = (ROOT / "docs/reference/hooks.md").read_text(encoding="utf-8")
    folders = ("tests/contract", "tests/registry", "tests/fallback", "tests/reference", "plugins/conformance")
    tests = "\n".join(f.read_text(encoding="utf-8") for d in folders for f in (ROOT / d).rglob("*.py"))
    for name in CATALOG:
        assert f"### {name}\n" in page
        assert re.search(rf"\b{name}\b", tests), f"no test names the hook {name}"


def test_metrics_named_in_prose_exist() -> None:
    known = set(re.findall(r"`([\w:]+)`", (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")))
    for page in set(PAGES) - GENERATED:
        named = set(re.findall(r"`((?:qiao|vllm):\w+)`", page.read_text(encoding="utf-8")))
        assert named <= known, page


def test_every_flag_is_explained() -> None:
    assert set(FLAG_TEXT) >= set(server_flags()) - {"model"}


def test_prices_in_the_concepts_are_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    claims = re.findall(r"^qiao (plan .*?) +# ([\d.]+) ([MG])B to the host a step$", page, re.MULTILINE)
    assert len(claims) == 2
    for command, amount, unit in claims:
        words = [str(ROOT / w) if w.startswith("examples/") else w for w in command.split()]
        with pytest.raises(SystemExit):
            main([*words, "--json"])
        plan = json.loads(capsys.readouterr().out)
        said = plan["total"]["bytes_to_host"] / {"M": 1e6, "G": 1e9}[unit]
        assert round(said, 1) == float(amount)


def test_the_plugin_of_the_guide_is_valid_and_plans_as_the_guide_says() -> None:
    code = max(blocks(ROOT / "docs/plugin-guide/README.md", "python"), key=len)
    plugin = ModuleType("qiao_acme")
    exec(compile(code, "docs/plugin-guide/README.md", "exec"), plugin.__dict__)
    shape = describe(json.loads((ROOT / "examples/configs/llama-3-8b.json").read_text()))
    host = backend_of(qiao_reference, "reference")
    plan = make_plan(shape, backend_of(plugin, "acme", host=host), Policy.parse("allow", None))
    assert {row.group.split("[")[0] for row in plan.fallback_rows} == {"KV", "W", "S"}
    assert plan.placement("rms_norm").place == "torch", "on the device, by its own torch backend"


def test_examples_compile() -> None:
    for path in sorted((ROOT / "examples").rglob("*.py")):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
