"""`slipway explain`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from replay.command import Connection, headers_of
from replay.request import CUSTOM_ATTRIBUTES, RecordedRequest, Reply, printable, with_content_type
from replay.targets import NoAnswer, Target

REFUSED = 1
_ASKING = ("x-slipway-explain", "1")
_SHOWN_IDS = 50
_WIDEST = 32  # The widest column, in characters.


def explain(
    file: Annotated[str, typer.Argument(help="File with the body of a request, or - for standard input.")],
    path: Annotated[str, typer.Option(help="Path of the request.")] = "/invocations",
    to: Annotated[
        str, typer.Option("--to", help="URL of the server, or the name of its SageMaker endpoint.")
    ] = "http://localhost:8080",
    header: Annotated[list[str] | None, typer.Option(help="'Name: value': a header to send; repeatable.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SLIPWAY_API_KEY", help="API key, if the server requires one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation as JSON.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Maximum seconds for the whole answer.")] = 60.0,
    component: Annotated[
        str | None, typer.Option(help="Inference component to call on the SageMaker endpoint.")
    ] = None,
    region: Annotated[str | None, typer.Option(help="AWS region.")] = None,
    profile: Annotated[str | None, typer.Option(help="Profile of the AWS credentials.")] = None,
) -> None:
    """Show how a server reads a request. Nothing is generated.

    Exit codes: 1 if the server refuses the request or gives no explanation, 2 for wrong options, else 0.
    """
    if not path.startswith("/"):
        raise typer.BadParameter(f"is {path!r}; expected a path that begins with /", param_hint="--path")
    try:
        body = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot be read: {error.strerror}", param_hint="FILE") from None
    given = headers_of("--header", header) + ([("authorization", f"Bearer {api_key}")] if api_key else [])
    # SageMaker passes on the custom attributes, but not the header `x-slipway-explain`.
    attributes = "; ".join([*(value for name, value in given if name.lower() == CUSTOM_ATTRIBUTES), "explain=1"])
    given = [pair for pair in given if pair[0].lower() != CUSTOM_ATTRIBUTES] + [(CUSTOM_ATTRIBUTES, attributes)]
    target = Connection(region, profile, timeout, 1).target("--to", to, given, {}, component)
    request = RecordedRequest(file, file, "POST", path, with_content_type((_ASKING,)), body)
    try:
        reply = asyncio.run(_ask(target, request))
    except NoAnswer as error:
        typer.echo(f"slipway: {printable(str(error))}", err=True)
        raise typer.Exit(REFUSED) from None
    document = _explanation(reply)
    if document is None:
        said = "answers without an explanation" if reply.status == 200 else "refuses the request"
        typer.echo(f"slipway: the server {said} ({reply.status}):", err=True)
        typer.echo(printable(reply.body[:4000].decode("utf-8", "replace")), err=True)
        raise typer.Exit(REFUSED)
    if as_json:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        _show(document)


async def _ask(target: Target, request: RecordedRequest) -> Reply:
    try:
        return await target.ask(request)
    finally:
        await target.close()


def _explanation(reply: Reply) -> Mapping[str, Any] | None:
    """Return the explanation in a reply, or None."""
    try:
        document = json.loads(reply.body)
    except (ValueError, RecursionError):
        return None
    explains = reply.status == 200 and isinstance(document, dict) and {"contract", "because"} <= document.keys()
    return document if explains else None


def _show(document: Mapping[str, Any]) -> None:
    lines = [f"Contract: {document['contract']}", *(f"  {reason}" for reason in document["because"])]
    for number, prompt in enumerate(document["prompts"], 1):
        ids = [str(token_id) for token_id in prompt["token_ids"][:_SHOWN_IDS]]
        lines += [
            f"Prompt {number} of {document['prompt_count']}: {_numbers(prompt)}",
            *(f"  {part}" for part in prompt["text"].split("\n")),
            f"  token ids: {' '.join(ids)}{' ...' if prompt['tokens'] > len(ids) else ''}",
        ]
    rows = [("parameter", "value", "from")]
    for name, given in document.get("parameters", {}).items():
        rows.append((name, json.dumps(given["value"], ensure_ascii=False), _origin(given)))
    lines += _table(rows)
    lines += [f"{title}: {', '.join(found)}" for title, found in _others(document)]
    for line in lines:
        typer.echo(printable(line))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Format rows as lines with aligned columns. A long value shifts the rest of its line."""
    if len(rows) < 2:
        return []
    widths = [min(max(map(len, column)), _WIDEST) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _numbers(prompt: Mapping[str, Any]) -> str:
    parts = [f"{prompt['tokens']} tokens"]
    if prompt["new_tokens"] is not None:
        parts.append(f"at most {prompt['new_tokens']} new")
    if prompt["copy"] is not None:
        parts.append(f"copy {prompt['copy']}")
    if prompt["cached_tokens"] is not None:
        parts.append(f"about {prompt['cached_tokens']} cached")
    return ", ".join(parts)


def _origin(found: Mapping[str, Any]) -> str:
    origin, fields = found["from"] or "body or default", ", ".join(found.get("fields", ()))
    return f"{origin}: {fields}" if fields else origin


def _others(document: Mapping[str, Any]) -> Iterable[tuple[str, list[str]]]:
    """Yield the explanation's other fields that are not empty: the title and the values of each."""
    if adapter := document.get("adapter"):
        yield "Adapter", [f"{adapter['value']} ({_origin(adapter)})"]
    if salt := document.get("cache_salt"):
        yield "Salt of the prefix cache from", [salt]
    for name, title in (
        ("ignored", "Ignored"),
        ("not_held", "Not held of the JSON schema"),
        ("changes_prompt", "Fields that change the prompt"),
        ("without_effect", "Fields without effect on the engine's request"),
    ):
        if found := document.get(name):
            yield title, found
    if limits := document.get("limits"):
        yield "Limits", [f"{name} {value}" for name, value in limits.items()]
