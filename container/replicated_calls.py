"""Calls that manage adapters, for servers that pass them on to several replicas."""

from __future__ import annotations

from typing import Any, NamedTuple

from container.http.body_limits import BodyReader, Receive
from container.http.refusals import connection_headers
from container.http.reply import Headers
from container.settings.settings import ServerSettings
from engines.errors import AdapterFailed, NotReady, RequestError
from handlers.lmi.management import adapters as lmi
from handlers.management import MAX_BODY
from handlers.openai import routes as openai


class Refusal(NamedTuple):
    """A reply to a call that changes nothing."""

    status: int
    headers: Headers
    body: bytes


async def read_adapter_call(scope: Any, receive: Receive, settings: ServerSettings) -> bytes | Refusal | None:
    """Read the body of a call.

    Returns:
        The body; the reply if the body cannot be read; None if the client left.
    """
    limit = min(MAX_BODY, settings.max_request_size)
    try:
        return await BodyReader(None).read(dict(scope["headers"]), receive, limit, settings.request_read_timeout)
    except RequestError as error:
        return _refused_adapter_call(scope["raw_path"], error)


def adapter_call_failed(path: bytes, message: str, *, again: bool) -> Refusal:
    """Return the reply for a call that failed on one of several replicas.

    Args:
        again: The client may repeat the call at once.
    """
    return _refused_adapter_call(path, NotReady(message) if again else AdapterFailed(message))


def _refused_adapter_call(path: bytes, error: RequestError) -> Refusal:
    refuse = openai.refuse_adapter if path.decode() in (openai.LOAD, openai.UNLOAD) else lmi.refuse
    reply = refuse(error)
    headers = [(b"content-type", reply.content_type.encode()), *connection_headers(error, body_read=False)]
    return Refusal(reply.status, headers, reply.body)
