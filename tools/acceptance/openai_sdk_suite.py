"""Run the OpenAI Python SDK's own tests for completions, chat, responses, embeddings and models against a running
server.

    python tools/acceptance/openai_sdk_suite.py --url http://127.0.0.1:8000/v1 [--json]

The tests come from the source distribution of the ``openai`` version that is installed here, fetched with
``pip download`` (or ``--sdist FILE``). The server must answer to the models that the tests name: start it with
``--served-model-name smollm2 gpt-3.5-turbo-instruct gpt-6-astra`` (``--models`` prints them for the fetched version).

Some of the tests ask for things that a server of one text model does not have; ``NOT_APPLICABLE`` lists them with
reasons. They run all the same, and one that passes is reported, so that the list cannot grow stale. For the tests that
send every parameter at once, ``openai_supported_params.py`` sends every parameter that is supported instead. Exit
status 0 when all others pass.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path
from typing import Any

FILES = (
    "tests/api_resources/test_completions.py",
    "tests/api_resources/chat/test_completions.py",
    "tests/api_resources/test_embeddings.py",
    "tests/api_resources/test_responses.py",
    "tests/api_resources/responses/test_input_items.py",
    "tests/api_resources/responses/test_input_tokens.py",
)
MODEL_FILE = "tests/api_resources/test_models.py"
SUPPORTED = "tests/api_resources/test_qiao_supported_params.py"
MADE = "tests/api_resources/qiao_made.py"

HELPER = """\
import json, os, urllib.request

def response_id() -> str:
    body = {"model": "MODEL", "input": "x", "max_output_tokens": 4, "background": True, "stream": True}
    request = urllib.request.Request(os.environ["TEST_API_BASE_URL"] + "/responses", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as stream:
        for line in stream.read().decode().splitlines():
            if line.startswith("data: "):
                return json.loads(line[6:])["response"]["id"]
    raise AssertionError("no event")
"""
"""Makes the response that a test asks for: the tests name one that OpenAI's mock server has."""

_CREATE = r"(responses\.(?:with_\w+\.)?create\()(?=\)|\s+stream=True,\s+\))"
_COUNT = r"(input_tokens\.(?:with_\w+\.)?count\()(?=\))"
"""Calls that send nothing, which OpenAI's mock server takes and its API does not."""

_STORED = "stored completions (store=true and the routes to read them) are not offered"
_ALL_COMPLETION = (
    "sends suffix, best_of=0 (below n), logit_bias for a token called 'foo', and stream_options without stream; "
    "each is refused by name"
)
_ALL_CHAT = (
    "sends audio, functions, web_search_options, verbosity, prediction, max_tokens=0 and logit_bias for a token called "
    "'foo'; what would change the answer and is not supported is refused by name"
)
_ALL_RESPONSES = (
    "sends a conversation, a stored prompt, moderation, context_management, truncation=auto and verbosity=low; what "
    "would change the answer and is not supported is refused by name"
)
NOT_APPLICABLE: tuple[tuple[str, str, str], ...] = (
    (
        r"chat.*test_completions",
        r"test_(method|raw_response|streaming_response)_(retrieve|update|list|delete)",
        _STORED,
    ),
    (r"chat.*test_completions", r"test_method_create_with_all_params", _ALL_CHAT),
    (r"test_completions", r"test_method_create_with_all_params", _ALL_COMPLETION),
    (
        r"test_responses",
        r"test_(method|raw_response|streaming_response)_compact",
        "nothing here could compact a conversation without losing what it says",
    ),
    (r"test_(responses|input_tokens)", r"test_method_(create|count)_with_all_params", _ALL_RESPONSES),
    (
        r"test_embeddings",
        r"test_(method|raw_response|streaming_response)_create\[(strict|aiohttp)\]",
        "the client asks for base64 and its strict type, a list of numbers, refuses that before it is decoded",
    ),
    (
        r"test_input_items",
        r"test_method_list_with_all_params",
        "asks for at most 0 items behind one that does not exist",
    ),
    (
        r"test_models",
        r"test_(method|raw_response|streaming_response)_delete",
        "a served model is not a fine-tuned one and cannot be deleted",
    ),
)
"""File pattern, test pattern and reason. The first that matches counts."""


def fetch(folder: Path) -> Path:
    """The source distribution of the installed ``openai``, downloaded through pip. Raises ``SystemExit``."""
    wanted = f"openai=={version('openai')}"
    command = [sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps", "-d", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("openai-*.tar.gz"))
    if done.returncode or not found:
        raise SystemExit(f"could not fetch the source of {wanted}; give it with --sdist FILE\n{done.stderr[-2000:]}")
    return found[0]


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack and return the source's root. Raises ``SystemExit`` where it has no tests."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    root = next(path for path in folder.iterdir() if path.is_dir() and path.name.startswith("openai-"))
    missing = [name for name in (*FILES, MODEL_FILE, "tests/conftest.py") if not (root / name).exists()]
    if missing:
        raise SystemExit(f"{sdist.name} lacks {', '.join(missing)}: this version ships without its tests")
    return root


def models_named(root: Path) -> list[str]:
    """The models that the applicable tests ask for."""
    found: set[str] = set()
    for name in FILES:
        found.update(re.findall(r'model="([^"]+)"', (root / name).read_text(encoding="utf-8")))
    text = (root / MODEL_FILE).read_text(encoding="utf-8")
    found.update(re.findall(r'retrieve\(\s*"([^"]+)"', text))
    return sorted(found - {"model"})


def adapt(root: Path) -> None:
    """Give the tests of responses what only a mock server has: the response that they name, and an input."""
    for name in FILES:
        path = root / name
        text = path.read_text(encoding="utf-8")
        if "responses" not in name:
            continue
        (root / MADE).write_text(HELPER.replace("MODEL", "smollm2"), encoding="utf-8")
        text = re.sub(_CREATE, r'\1model="smollm2", input="This is a test.", ', text)
        text = re.sub(_COUNT, r'\1model="smollm2", input="This is a test."', text)
        text = re.sub(r'"(resp_677efb5139a88190b512bc3fef8e535d|response_id)"', "response_id()", text)
        text = text.replace(
            "import pytest\n", "import pytest\n\nfrom tests.api_resources.qiao_made import response_id\n", 1
        )
        path.write_text(text, encoding="utf-8")


def run(root: Path, url: str, report: Path, chosen: str) -> str:
    """Run the tests with the suite's own settings but for parallel running; returns what pytest said."""
    shutil.copy(Path(__file__).with_name("openai_supported_params.py"), root / SUPPORTED)
    adapt(root)
    command = [
        *(sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=short"),
        *("--show-capture=no", f"--junitxml={report}", *FILES, MODEL_FILE, SUPPORTED),
        *(("-k", chosen) if chosen else ()),
    ]
    environment = {**os.environ, "TEST_API_BASE_URL": url}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def reason_for(file: str, test: str) -> str:
    """Why a test cannot apply, empty where it must pass."""
    for file_pattern, test_pattern, reason in NOT_APPLICABLE:
        if "supported_params" not in file and re.search(file_pattern, file) and re.match(test_pattern, test):
            return reason
    return ""


def judge(report: Path) -> dict[str, Any]:
    """Counts and names from pytest's report."""
    result: dict[str, Any] = {"passed": 0, "failed": {}, "not_applicable": {}, "passes_unexpectedly": [], "skipped": {}}
    for case in ET.parse(report).getroot().iter("testcase"):
        file, test = case.get("classname", ""), case.get("name", "")
        name = f"{file.removeprefix('tests.api_resources.')}::{test}"
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        reason = reason_for(file, test)
        if case.find("skipped") is not None:
            result["skipped"][name] = case.find("skipped").get("message", "")  # type: ignore[union-attr]
        elif fault is None:
            result["passed"] += 1
            if reason:
                result["passes_unexpectedly"].append(name)
        elif reason:
            result["not_applicable"].setdefault(reason, []).append(name)
        else:
            result["failed"][name] = (fault.get("message") or "")[:300]
    return result


def render(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"passed {result['passed']}, failed {len(result['failed'])}"]
    lines += [f"  FAILED {name}: {why}" for name, why in result["failed"].items()]
    for reason, names in result["not_applicable"].items():
        lines.append(f"cannot apply ({len(names)}): {reason}")
    lines += [f"passes although listed as not applicable: {name}" for name in result["passes_unexpectedly"]]
    lines += [f"skipped {name}: {why}" for name, why in result["skipped"].items()]
    return "\n".join(lines)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base URL, with /v1")
    parser.add_argument("--sdist", type=Path, help="openai-VERSION.tar.gz, where no index can be reached")
    parser.add_argument("-k", dest="chosen", default="", help="only tests that match, as for pytest")
    parser.add_argument("--models", action="store_true", help="print the models that the tests name and stop")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = unpack(arguments.sdist or fetch(folder), folder)
        if arguments.models:
            print(" ".join(models_named(root)))
            return 0
        report = folder / "report.xml"
        said = run(root, arguments.url, report, arguments.chosen)
        if not report.exists():
            raise SystemExit(f"pytest did not run (it needs pytest-asyncio, httpx2 and aiohttp):\n{said[-3000:]}")
        result = {"openai": version("openai"), **judge(report)}
    print(json.dumps(result, indent=2) if arguments.json else render(result))
    return 1 if result["failed"] or not result["passed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
