"""Documents for schemathesis, and its command on them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.server import RunningServer

HERE = Path(__file__).parent
PUBLISHED = HERE / "openai.json"

OPTIONAL = {
    "FunctionTool": {"type", "parameters", "strict"},
    "OutputMessage": {"id", "status"},
    "OutputTextContent": {"annotations", "logprobs"},
    "LogProb": {"bytes"},
    "TopLogProb": {"bytes"},
    "ReasoningItem": {"id", "summary"},
    "ToolChoiceAllowed": {"mode"},
    "TextResponseFormatJsonSchema": {"name"},
}
"""Fields that a body must have at OpenAI and that many clients leave out; here nothing depends on them."""


_CHAT = {"model": "M", "messages": [{"role": "user", "content": "hi"}]}
GOOD: dict[str, dict[str, Any]] = {
    "/completions": {"model": "M", "prompt": "hi", "max_tokens": 4},
    "/chat/completions": {**_CHAT, "max_completion_tokens": 4},
    "/responses": {"model": "M", "input": "hi", "max_output_tokens": 4},
    "/responses/input_tokens": {"model": "M", "input": "hi"},
    "/messages": {**_CHAT, "max_tokens": 4},
    "/messages/count_tokens": _CHAT,
    "/embeddings": {"model": "M", "input": "hi"},
    "/score": {"model": "M", "text_1": "a", "text_2": "b"},
    "/rerank": {"model": "M", "query": "a", "documents": ["b", "c"]},
    "/tokenize": {"model": "M", "prompt": "hi"},
    "/detokenize": {"model": "M", "tokens": [1]},
}
"""A body of each route, by its path without a version, that gets an answer: what is drawn may not hit on one."""


def with_examples(document: dict[str, Any]) -> dict[str, Any]:
    """``document`` with the bodies of ``GOOD``, which schemathesis sends besides those that it makes up."""
    for path, operations in document["paths"].items():
        body = GOOD.get(path.removeprefix("/v1"))
        if body is not None and "post" in operations:
            operations["post"]["requestBody"]["content"]["application/json"]["example"] = body
    return document


def nullable(value: Any) -> Any:
    """The document's ``nullable: true``, a word of OpenAPI 3.0, as JSON Schema says it."""
    if isinstance(value, list):
        return [nullable(one) for one in value]
    if not isinstance(value, dict):
        return value
    plain = {k: nullable(v) for k, v in value.items() if k != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if value.get("nullable") is True else plain


def published() -> dict[str, Any]:
    """OpenAI's document, cut down to the routes that there are."""
    found: dict[str, Any] = nullable(json.loads(PUBLISHED.read_text(encoding="utf-8")))
    return found


def as_answered() -> dict[str, Any]:
    """``published`` with what OpenAI's own server answers and the document leaves out."""
    found = published()
    refusal = {"description": "Refused", "content": {"application/json": {"schema": _ref("ErrorResponse")}}}
    for operations in found["paths"].values():
        for operation in operations.values():
            answers = operation["responses"]
            answers["429"] = answers["default"] = refusal  # no refusal is described, but for an empty 429
            if "404" in answers:
                answers["404"] = refusal  # described without the envelope that its own clients unwrap
    for path, method in (("/completions", "post"), ("/responses/{response_id}", "get")):  # both stream
        found["paths"][path][method]["responses"]["200"]["content"]["text/event-stream"] = {"schema": {}}
    embedding = found["components"]["schemas"]["Embedding"]["properties"]["embedding"]
    found["components"]["schemas"]["Embedding"]["properties"]["embedding"] = {
        "anyOf": [embedding, {"type": "string"}]  # encoding_format=base64
    }
    effort = {"type": ["string", "null"]}  # its words are those of the model's template
    found["components"]["schemas"]["ReasoningEffort"] = effort
    for parameter in found["paths"]["/responses/{response_id}/input_items"]["get"]["parameters"]:
        if parameter["name"] == "limit":
            parameter["schema"] |= {"minimum": 1, "maximum": 100}  # it says so in words
    return _as_taken(found)


def _as_taken(document: dict[str, Any]) -> dict[str, Any]:
    """``document`` with what this server, like vLLM, takes on purpose: a body without ``model`` means the first, and
    null is a field that was left out, as clients send it that fill in all fields.

    Bodies get schemas of their own, as some are those of answers too.
    """
    schemas = document["components"]["schemas"]
    logprobs = schemas["CreateCompletionRequest"]["properties"]["logprobs"]
    logprobs.get("anyOf", [logprobs])[0]["maximum"] = 20  # that of --max-logprobs, not 5
    stops = schemas["StopConfiguration"]
    for form in stops.get("anyOf", [stops])[0]["oneOf"]:
        form.pop("minItems", None)  # an empty list asks for nothing, and clients that fill in all fields send it
    del schemas["CreateEmbeddingRequest"]["additionalProperties"]  # the only body that forbids fields it does not know
    for part in schemas["CreateResponse"]["allOf"]:
        if (most := part.get("properties", {}).get("max_output_tokens")) is not None:
            most["anyOf"][0]["minimum"] = 1  # not 16, as for chat

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(one) for one in value]
        if not isinstance(value, dict):
            return value
        changed = {key: given(one) for key, one in value.items()}
        if isinstance(changed.get("oneOf"), list):  # an input message is two of them, and no answer depends on which
            changed["anyOf"] = changed.pop("oneOf")
        if changed.get("format") == "uri":  # addresses in old answers, which nothing here follows
            del changed["format"]
        if isinstance(name := changed.get("$ref"), str):
            changed["$ref"] = f"{name}.given"
        required, fields = changed.get("required", []), changed.get("properties", {})
        if changed.get("type") != "object":  # a table of fields, one of which may have such a name
            return changed
        if "model" in required and len(required) > 1:  # elsewhere it is no model to answer
            required.remove("model")
        changed["properties"] = {
            name: field if name in required else {"anyOf": [field, {"type": "null"}]} for name, field in fields.items()
        }
        return changed

    for name, schema in list(schemas.items()):
        needed = [field for field in schema.get("required", ()) if field not in OPTIONAL.get(name, ())]
        schemas[f"{name}.given"] = given({**schema, "required": needed} if "required" in schema else schema)
    for operations in document["paths"].values():
        for operation in operations.values():
            if "requestBody" in operation:
                operation["requestBody"] = given(operation["requestBody"])
    return document


def answered_well(server: RunningServer, key: str) -> Counter[str]:
    """How often each route has answered with 200 so far."""
    page = server.http(headers={"Authorization": f"Bearer {key}"}).get("/metrics").text
    found = re.findall(r'^http_requests_total{handler="([^"]+)",method="\w+",status="2xx"} (\S+)', page, re.MULTILINE)
    counts: Counter[str] = Counter()
    for handler, count in found:
        counts[handler] += int(float(count))
    return counts


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def schemathesis(server: RunningServer, document: dict[str, Any], *flags: str, key: str, base: str = "") -> str:
    """Run it with ``schemathesis.toml`` and return what it said. Raises ``AssertionError`` where a check failed."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "document.json"
        file.write_text(json.dumps(with_examples(document)), encoding="utf-8")
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", "schemathesis.toml", "run", str(file)]
        command += ["--url", server.url + base, "--header", f"Authorization: Bearer {key}", "--no-color", *flags]
        if seed := os.environ.get("QIAO_COMPAT_SEED"):
            command += ["--seed", seed]  # instead of the one in the file
        done = subprocess.run(
            command, cwd=HERE, env=environment, capture_output=True, text=True, check=False, timeout=1200
        )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    return done.stdout
