"""Cut OpenAI's published API document down to the routes that Qiao has: ``python -m tools.prune_openai openapi.json``.

The document is https://github.com/openai/openai-openapi (MIT licence). The result goes to ``tests/compat/openai.json``.
Texts, examples and extensions are left out; what is kept is kept as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "tests" / "compat" / "openai.json"

ROUTES: dict[str, tuple[str, ...]] = {
    "/chat/completions": ("post",),
    "/completions": ("post",),
    "/embeddings": ("post",),
    "/models": ("get",),
    "/models/{model}": ("get",),
    "/responses": ("post",),
    "/responses/input_tokens": ("post",),
    "/responses/{response_id}": ("get", "delete"),
    "/responses/{response_id}/cancel": ("post",),
    "/responses/{response_id}/input_items": ("get",),
}

_TEXTS = frozenset({"description", "title", "example", "examples", "summary", "externalDocs", "tags", "deprecated"})


def plain(value: Any, names: bool = False) -> Any:
    """``value`` without texts; ``names``: its keys are names that the document gives, not words of OpenAPI."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if names or not (k in _TEXTS or k.startswith("x-"))}
    return {k: plain(v, not names and k in ("properties", "schemas", "responses")) for k, v in kept.items()}


def references(value: Any) -> Iterator[tuple[str, str]]:
    """Kind and name of the components that ``value`` refers to."""
    if isinstance(value, list):
        for one in value:
            yield from references(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key == "$ref":
                kind, name = one.removeprefix("#/components/").split("/")
                yield kind, name
            else:
                yield from references(one)


def prune(document: dict[str, Any], source: str) -> dict[str, Any]:
    """The document of ``ROUTES`` alone."""
    paths = {path: {m: plain(document["paths"][path][m]) for m in methods} for path, methods in ROUTES.items()}
    components: dict[str, dict[str, Any]] = {}
    todo = list(references(paths))
    while todo:
        kind, name = todo.pop()
        found = components.setdefault(kind, {})
        if name not in found:
            found[name] = plain(document["components"][kind][name])
            todo += references(found[name])
    return {
        "openapi": document["openapi"],
        "info": {
            "title": "OpenAI API, cut down to the routes that Qiao has",
            "version": document["info"]["version"],
            "license": document["info"]["license"],
            "x-source": source,
            "x-copyright": "Copyright (c) OpenAI (https://openai.com), MIT licence",
        },
        "paths": paths,
        "components": {kind: dict(sorted(found.items())) for kind, found in sorted(components.items())},
    }


def main(argv: list[str]) -> None:
    """Write ``TARGET`` from the file named first; the second word says where that came from."""
    document = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    found = prune(document, argv[1] if len(argv) > 1 else "https://github.com/openai/openai-openapi")
    TARGET.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{TARGET}: {len(found['components']['schemas'])} schemas")


if __name__ == "__main__":
    main(sys.argv[1:])
