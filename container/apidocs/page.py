"""`/docs`: the API description as pages, which load nothing from other servers.

If vLLM is installed, its copy of Swagger UI shows the document and calls the routes; `/docs/plain` is always served.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jinja2

from container.apidocs.openapi import Document

_SWAGGER = ("entrypoints", "serve", "instrumentator", "static")
_ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}

_SWAGGER_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<link rel="stylesheet" href="docs/swagger-ui.css"></head><body>
<noscript><p>This page needs scripts; <a href="docs/plain">this one</a> does not.</p></noscript>
<div id="swagger-ui"></div><script src="docs/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true})</script>
</body></html>"""


def swagger_assets() -> dict[str, tuple[Path, str]]:
    """Swagger UI's files and their content types by name; empty if vLLM is not installed."""
    found = importlib.util.find_spec("vllm")
    directory = Path(next(iter((found and found.submodule_search_locations) or ()), "/nowhere"), *_SWAGGER)
    assets = {name: (directory / name, kind) for name, kind in _ASSETS.items()}
    return assets if all(path.is_file() for path, _ in assets.values()) else {}


def swagger_page(title: str) -> str:
    """The HTML of Swagger UI for /openapi.json."""
    return jinja2.Environment(autoescape=True).from_string(_SWAGGER_PAGE).render(title=title)


_PLAIN_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ info.title }}</title><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}pre{background:#f3f3f3}
</style></head><body>
<h1>{{ info.title }}</h1><p>The machine-readable form is <a href="../openapi.json">openapi.json</a>.</p>
{% for path, verbs in paths.items() %}{% for verb, operation in verbs.items() %}
<h2>{{ verb | upper }} <code>{{ path }}</code></h2><p>{{ operation.summary }}</p>
<details><summary>Request and answers</summary><pre>{{ operation | tojson(indent=2) }}</pre></details>
{% endfor %}{% endfor %}
{% for name, schema in components.schemas.items() %}
<h2 id="{{ name }}">{{ name }}</h2><pre>{{ schema | tojson(indent=2) }}</pre>
{% endfor %}
</body></html>"""


def plain_page(document: Document) -> str:
    """The HTML of the document, without scripts."""
    return jinja2.Environment(autoescape=True).from_string(_PLAIN_PAGE).render(document.content)
