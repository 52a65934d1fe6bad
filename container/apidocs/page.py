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


_MACROS = """
{%- macro shape(schema) %}{% if schema %}{% if schema["$ref"] -%}
<a href="#{{ schema["$ref"].split("/")[-1] }}">{{ schema["$ref"].split("/")[-1] }}</a>
{%- elif schema.anyOf %}{% for one in schema.anyOf %}{{ shape(one) }}{{ "" if loop.last else " or " }}{% endfor %}
{%- elif schema.type %}{{ schema.type if schema.type is string else schema.type | join(" or ") }}
{%- if schema.get("items") %} of {{ shape(schema.get("items")) }}{% endif %}{% endif %}{% endif %}{% endmacro %}
{%- macro fields(schema) %}{% for one in (schema or {}).anyOf or () %}{{ fields(one) }}{% endfor %}
{%- if schema and schema.properties %}<table>
<tr><th>Field</th><th>Type</th><th>Default</th><th>Meaning</th></tr>
{% for field, type in schema.properties.items() %}<tr><td><code>{{ field }}</code></td><td>{{ shape(type) }}</td>
<td>{% if "default" in type %}<code>{{ type.default | tojson }}</code>{% endif %}</td>
<td>{{ type.description }}{% if type.properties %}{{ fields(type) }}{% endif %}</td></tr>
{% endfor %}</table>{% endif %}{% endmacro -%}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ info.title }}</title><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}td,th{border-bottom:1px solid #ddd;padding:.3rem .6rem;
text-align:left;vertical-align:top}code{background:#f3f3f3;padding:.1rem .3rem;border-radius:3px}
h2 code{background:none;padding:0}.verb{text-transform:uppercase;color:#06c}</style></head><body>
<h1>{{ info.title }}</h1><p>The machine-readable form is <a href="../openapi.json">openapi.json</a>.</p>
{% for path, verbs in paths.items() %}{% for verb, operation in verbs.items() %}
<h2><span class="verb">{{ verb }}</span> <code>{{ path }}</code></h2><p>{{ operation.summary }}</p>
{% for field in operation.parameters or () if field.in == "query" %}{{ "Query: " if loop.first else ", " }}
<code>{{ field.name }}</code>{% endfor %}
{% for type, body in ((operation.requestBody or {}).content or {}).items() %}
<p>Request: <code>{{ type }}</code> {{ shape(body.schema) }}</p>{{ fields(body.schema) }}{% endfor %}
<table><tr><th>Status</th><th>Meaning</th><th>Content</th></tr>
{% for status, response in operation.responses.items() %}<tr><td>{{ status }}</td><td>{{ response.description }}</td>
<td>{% for type, body in (response.content or {}).items() %}<code>{{ type }}</code>
{{ shape(body.schema) }}<br>{% endfor %}</td></tr>{% endfor %}</table>
{% endfor %}{% endfor %}
{% for name, schema in components.schemas.items() %}<h2 id="{{ name }}">{{ name }}</h2>
{% if schema.description %}<p>{{ schema.description }}</p>{% endif %}
{{ fields(schema) }}{% endfor %}
</body></html>"""


def plain_page(document: Document) -> str:
    """The HTML of the document, without scripts."""
    environment = jinja2.Environment(autoescape=True)
    return environment.from_string(_MACROS + _PAGE).render(document.content)
