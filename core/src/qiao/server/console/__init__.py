"""The web console: static files in this folder, served as they are; they hold nothing secret and call the API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FILES: Mapping[str, str] = MappingProxyType(
    {
        "index.html": "text/html; charset=utf-8",
        "style.css": "text/css; charset=utf-8",
        "app.js": "text/javascript; charset=utf-8",
        "metrics.js": "text/javascript; charset=utf-8",
        "views.js": "text/javascript; charset=utf-8",
        "play.js": "text/javascript; charset=utf-8",
        "words.js": "text/javascript; charset=utf-8",
    }
)
"""Every file and its media type."""

PATHS = frozenset({"/console", "/console/", *(f"/console/{name}" for name in FILES)})
"""Paths of the page itself, which need no key; what it shows does."""
