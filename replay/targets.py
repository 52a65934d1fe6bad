"""The servers that requests are sent to: a server at a URL, or a SageMaker endpoint."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Protocol
from urllib.parse import parse_qs

from engines.daemon_thread import in_daemon_thread
from replay.request import CUSTOM_ATTRIBUTES, ROUTE, RecordedRequest, Reply

MAX_ANSWER = 256 << 20  # The maximum number of bytes of an answer to keep.
_CONNECT_SECONDS = 10.0
_INVOCATIONS = "/invocations"
# The headers that are parameters of a SageMaker runtime call.
_PARAMETERS = {
    "x-amzn-sagemaker-session-id": "SessionId",
    "x-amzn-sagemaker-target-model": "TargetModel",
}
# These names may be in a query or in headers. SageMaker passes on neither, so they are sent as custom attributes.
_MODEL = ("model_version", "model_name")
_ADAPTER = "x-amzn-sagemaker-adapter-identifier"


class NoAnswer(Exception):
    """A target gave no answer. The message states the reason."""


class Unreachable(NoAnswer):
    """No connection to a target can be opened."""


class Target(Protocol):
    """A server that requests are sent to."""

    async def ask(self, request: RecordedRequest) -> Reply:
        """Send a request, and return the reply.

        Raises:
            Unreachable: No connection can be opened.
            NoAnswer: The reply is missing or incomplete.
        """
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class HttpTarget:
    """A server at a URL."""

    def __init__(
        self, url: str, headers: Iterable[tuple[str, str]], timeout: float, concurrency: int, paths: Mapping[str, str]
    ) -> None:
        """Prepare the connections.

        Args:
            url: The address. The paths of the requests are appended to its path.
            headers: Headers that replace the requests' headers of the same name.
            timeout: The time limit for a whole reply, in seconds.
            concurrency: The number of concurrent requests.
            paths: Maps recorded paths to this target's paths, if they differ.
        """
        import httpx  # Importing httpx takes a while, and other commands do not need it.

        self._url, self._headers, self._timeout, self._paths = url.rstrip("/"), tuple(headers), timeout, paths
        self._http = httpx.AsyncClient(
            # HTTP libraries send these headers by default. A record may override them.
            headers={"accept": "*/*", "user-agent": "slipway-replay"},
            timeout=httpx.Timeout(None, connect=min(_CONNECT_SECONDS, timeout)),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency, keepalive_expiry=4),
            verify=ssl.create_default_context() if url.startswith("https") else False,
            trust_env=False,
            # Cookies are not stored, because the recorded requests come from different clients.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        )
        del self._http.headers["accept-encoding"]

    async def ask(self, request: RecordedRequest) -> Reply:
        import httpx

        sent = request.to(mapped(request.path, self._paths), self._headers)
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                return await self._reply(sent, began)
        except TimeoutError:
            raise NoAnswer(f"no whole answer within {self._timeout:g} s (--timeout)") from None
        except httpx.ConnectError as error:
            raise Unreachable(f"cannot connect to {self._url}: {_reason(error)}") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise NoAnswer(f"the connection failed: {_reason(error)}") from None

    async def _reply(self, sent: RecordedRequest, began: float) -> Reply:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.headers]
        first: float | None = None
        parts, size = [], 0
        async with self._http.stream(sent.method, self._url + sent.path, headers=headers, content=sent.body) as reply:
            async for part in reply.aiter_bytes():
                if first is None:
                    first = time.perf_counter() - began
                size += len(part)
                if size > MAX_ANSWER:
                    raise NoAnswer(f"the answer is larger than {MAX_ANSWER >> 20} MiB")
                parts.append(part)
            found = tuple((name.lower(), value) for name, value in reply.headers.items())
            return Reply(
                reply.status_code,
                found,
                b"".join(parts),
                seconds=time.perf_counter() - began,
                first_byte=first,
            )

    async def close(self) -> None:
        await self._http.aclose()


class SageMakerTarget:
    """A SageMaker endpoint. Its client blocks, so calls run in threads."""

    def __init__(self, client: Any, name: str, timeout: float, paths: Mapping[str, str], component: str | None) -> None:
        """Create the target.

        Args:
            client: boto3's client for the SageMaker runtime.
            name: The name of the endpoint.
            timeout: The time limit for a whole reply, in seconds.
            paths: Maps recorded paths to this target's paths, if they differ.
            component: The inference component.
        """
        self._client, self._name, self._timeout, self._paths = client, name, timeout, paths
        self._component = component

    async def ask(self, request: RecordedRequest) -> Reply:
        try:
            async with asyncio.timeout(self._timeout):
                # Each call has its own daemon thread: a call that misses the timeout must not delay the next call or
                # the end of the command.
                return await in_daemon_thread(partial(self._ask, request))
        except TimeoutError:
            raise NoAnswer(f"no whole answer within {self._timeout:g} s (--timeout)") from None

    def _ask(self, request: RecordedRequest) -> Reply:
        from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError
        from urllib3.exceptions import HTTPError

        parameters = self._call(request)
        call: Callable[..., Reply] = self._stream if request.streams else self._whole
        began = time.perf_counter()
        try:
            return call(parameters, began)
        except ClientError as error:
            if error.response["Error"].get("Code") == "ModelError":
                return _model_error(error.response, time.perf_counter() - began)
            raise NoAnswer(f"SageMaker refuses the call: {_reason(error)}") from None
        except EndpointConnectionError as error:
            raise Unreachable(f"the connection failed: {_reason(error)}") from None
        except (BotoCoreError, HTTPError, OSError) as error:
            raise NoAnswer(f"the connection failed: {_reason(error)}") from None

    def _call(self, request: RecordedRequest) -> dict[str, Any]:
        path, _, query = mapped(request.path, self._paths).partition("?")
        asked = parse_qs(query)
        attributes = request.header(CUSTOM_ATTRIBUTES)
        for name in _MODEL if path == _INVOCATIONS else ():  # Other routes do not read these parameters.
            if chosen := next(iter(asked.get(name, ())), request.header(name)):
                attributes = f"{name}={chosen};{attributes}" if attributes else f"{name}={chosen}"
        if (adapter := request.header(_ADAPTER)) and not self._component:
            raise NoAnswer(f"SageMaker takes no header for the adapter {adapter}, only its inference component")
        if path != _INVOCATIONS and not ROUTE.search(attributes):
            attributes = f"route={path},{attributes}" if attributes else f"route={path}"
        parameters: dict[str, Any] = {"EndpointName": self._name, "Body": request.body}
        for header, name in (("content-type", "ContentType"), ("accept", "Accept"), *_PARAMETERS.items()):
            if value := request.header(header):
                parameters[name] = value
        if attributes:
            parameters["CustomAttributes"] = attributes
        if self._component:
            parameters["InferenceComponentName"] = self._component
        return parameters

    def _whole(self, parameters: dict[str, Any], began: float) -> Reply:
        answer = self._client.invoke_endpoint(**parameters)
        with answer["Body"] as stream:
            body = bytes(stream.read())
        seconds = time.perf_counter() - began
        return Reply(200, _headers(answer), body, headers_known=False, seconds=seconds, first_byte=seconds)

    def _stream(self, parameters: dict[str, Any], began: float) -> Reply:
        answer = self._client.invoke_endpoint_with_response_stream(**parameters)
        parts: list[bytes] = []
        first: float | None = None
        stream = answer["Body"]
        try:
            for event in stream:
                if "PayloadPart" in event:
                    if first is None:
                        first = time.perf_counter() - began
                    parts.append(bytes(event["PayloadPart"]["Bytes"]))
        finally:
            stream.close()
        seconds = time.perf_counter() - began
        body = b"".join(parts)
        return Reply(200, _headers(answer), body, headers_known=False, seconds=seconds, first_byte=first)

    async def close(self) -> None:
        """Do nothing. A call that missed the timeout may still run in a daemon thread, which ends with the process."""


def mapped(path: str, paths: Mapping[str, str]) -> str:
    """Return the path of a request on a target, with the request's query."""
    route, mark, query = path.partition("?")
    return paths.get(route, route) + mark + query


def _headers(answer: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    kind = answer.get("ContentType", "")
    return (("content-type", kind),) if kind else ()


def _model_error(response: Mapping[str, Any], seconds: float) -> Reply:
    """Return the container's reply, which SageMaker includes in its error. SageMaker truncates long bodies."""
    body = str(response.get("OriginalMessage", "")).encode()
    try:
        json.loads(body)
        headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)
    except ValueError:
        headers = ()
    status = int(response.get("OriginalStatusCode") or 0)
    if not status:
        raise NoAnswer("the model gave no answer")
    return Reply(status, headers, body, headers_known=False, seconds=seconds, first_byte=seconds)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
