"""Bodies that take the longest to read, and the time that `/ping` waits while a server reads them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

MODEL = b'"model":"model"'
_PING_SECONDS = 0.02
_REPLY_SECONDS = 300.0


def _many(first: bytes, piece: bytes, last: bytes, size: int) -> bytes:
    return first + piece * ((size - len(first) - len(last)) // len(piece)) + last


def _keys(size: int) -> bytes:
    return (
        b'{"max_new_tokens":1,"max_tokens":1,' + b",".join([b'"k%x":1' % place for place in range(size // 13)]) + b"}"
    )


SHAPES: dict[str, Callable[[int], bytes]] = {
    "different keys": _keys,
    "empty arrays": lambda size: _many(b"[[]", b",[]", b"]", size),
    "large exponents": lambda size: _many(b"[1", b",1e300", b"]", size),
    "different strings": lambda size: b"[" + b",".join([b'"%x"' % place for place in range(size // 10)]) + b"]",
    "messages": lambda size: _many(b'[{"role":"user","content":"a"}', b',{"role":"user","content":"a"}', b"]", size),
    "plain text": lambda size: _many(b'"', b"a", b'"', size),
}
"""Functions that make JSON values of a given size. The keys say what the values contain."""


@dataclass(frozen=True, slots=True)
class Target:
    """A route, and the fields of its bodies into which the heavy values are put."""

    path: str
    fields: tuple[str, ...]
    others: bytes = MODEL
    """The other members, without which the body would not be a request."""
    content_type: str = "application/json"

    def bodies(self, size: int, shapes: Iterable[str] = SHAPES) -> Iterator[tuple[str, bytes]]:
        """Yield each body of about `size` bytes, with its title."""
        for name in self.fields:
            for shape in shapes:
                value = SHAPES[shape](size - 100)
                yield f"{self.path} {name}: {shape}", b'{%b,"%b":%b}' % (self.others, name.encode(), value)


_INPUTS, _LIMIT = b'"inputs":"a"', b',"parameters":{"max_new_tokens":1}'
_PROMPT, _TEXT = MODEL + b',"prompt":"a","max_tokens":1', b'"text_input":"a","max_tokens":1'
_CHAT = MODEL + b',"messages":[{"role":"user","content":"a"}],"max_tokens":1'
_FORM, _MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
LMI = (
    Target("/invocations", ("parameters",), _INPUTS),
    Target("/invocations", ("unknown",), _INPUTS + _LIMIT),
    Target("/invocations", ("inputs", "messages", "prompt", "requestType"), b'"max_tokens":1' + _LIMIT),
    Target("/predictions/model", ("parameters",), _INPUTS),
)
OPENAI = (
    Target("/v1/completions", ("logit_bias", "stop", "unknown"), _PROMPT),
    Target("/v1/completions", ("prompt",), MODEL),
    Target("/v1/chat/completions", ("tools", "unknown"), _CHAT),
    Target("/v1/chat/completions", ("messages",), MODEL + b',"max_tokens":1'),
    Target("/v1/chat/completions/batch", ("messages",), MODEL + b',"max_tokens":1'),
    Target("/v1/responses", ("input",), MODEL + b',"max_output_tokens":1'),
    Target("/v1/messages", ("messages",), MODEL + b',"max_tokens":1'),
    Target("/v1/messages/count_tokens", ("messages",), MODEL),
    Target("/tokenize", ("prompt", "messages", "unknown"), MODEL),
    Target("/tokenize", ("parameters",), _INPUTS),
    Target("/detokenize", ("tokens",), MODEL),
)
TGI = (
    Target("/generate", ("parameters",), _INPUTS),
    Target("/generate", ("unknown",), _INPUTS + _LIMIT),
    Target("/generate", ("inputs",), b'"a":1' + _LIMIT),
    Target("/generate_stream", ("parameters",), _INPUTS),
    Target("/", ("parameters",), _INPUTS),
    Target("/chat_tokenize", ("messages",), b'"a":1'),
)
TRITON = (
    Target("/v2/models/model/generate", ("parameters", "unknown", "stop_words"), _TEXT),
    Target("/v2/models/model/generate", ("text_input",), b'"max_tokens":1'),
    Target("/v2/models/model/generate_stream", ("parameters",), _TEXT),
    Target("/v2/repository/index", ("ready",), b'"a":1'),
    Target("/v2/repository/models/model/load", ("parameters",), b'"a":1'),
)
HAPPY = (
    Target("/v1/generate", ("prompt",), b'"max_tokens":1'),
    Target("/v1/generate", ("response_pool", "json_format", "unknown"), b'"prompt":"a","max_tokens":1'),
    Target("/v1/generate_stream", ("prompt",), b'"max_tokens":1'),
    Target("/v1/tokenizer", ("text",), b'"a":1'),
    Target("/v2/tokenizer", ("prompt", "messages"), MODEL),
    Target("/v1/decode", ("token_ids",), b'"a":1'),
    Target("/v1/split_text", ("text", "separators"), b'"a":1'),
    Target("/v1/metadata_text", ("text",), b'"a":1'),
)
MANAGEMENT = (
    Target("/adapters", ("name",), b'"src":"a"'),
    Target("/v1/load_lora_adapter", ("lora_name",), b'"lora_path":"a"'),
    Target("/models", ("url",), b'"a":1'),
)
ALL = (*LMI, *OPENAI, *TGI, *TRITON, *HAPPY, *MANAGEMENT)


def forms(size: int) -> dict[str, tuple[str, bytes]]:
    """Return forms of about `size` bytes. The keys say what the forms contain. Each is a content type and a body."""
    head = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
    return {
        "form fields": (_FORM, _many(b"a=1", b"&a=1", b"", size)),
        "form without fields": (_FORM, b"&" * size),
        "form of escapes": (_FORM, _many(b"inputs=", b"%41", b"", size)),
        "parts": (_MULTIPART, _many(b"", head + b"\r\n", b"--x--\r\n", size)),
        "part of line ends": (_MULTIPART, _many(head, b"\r\n", b"\r\n--x--\r\n", size)),
        "part of returns": (_MULTIPART, _many(head, b"\r", b"\r\n--x--\r\n", size)),
        "part of near boundaries": (_MULTIPART, _many(head, b"\r\n--", b"\r\n--x--\r\n", size)),
        "csv": ("text/csv", _many(b"inputs\n", b"a\n", b"", size)),
        "csv of columns": ("text/csv", _many(b"inputs", b",a", b"\n1", size)),
        "text": ("text/plain", b"a" * size),
    }


def head(path: str, content_type: str, length: int, host: str = "localhost") -> bytes:
    """Return a request's head. The connection ends with the reply."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()


async def send(host: str, port: int, path: str, content_type: str, body: bytes) -> tuple[int, bytes]:
    """Return the reply's status and its first bytes. Status 0: the server closed the connection without a reply."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(head(path, content_type, len(body)))
            writer.write(body)
            await writer.drain()
        reply = b""
        with contextlib.suppress(ConnectionError):
            reply = await asyncio.wait_for(reader.read(2000), _REPLY_SECONDS)
        return (int(reply[9:12]) if reply[9:12].isdigit() else 0), reply
    finally:
        writer.transport.abort()


def _watch(pipe: Connection, host: str, port: int) -> None:
    """Call `/ping` every 20 ms.

    The answer to a message in the pipe is the longest wait since the last message. None ends the loop.
    """

    async def watch() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        longest = 0.0
        while True:
            if pipe.poll():
                if pipe.recv() is None:
                    return
                pipe.send(longest)
                longest = 0.0
            began = time.monotonic()
            writer.write(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
            headers = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(_PING_SECONDS)

    asyncio.run(watch())


class PingWatch:
    """A process that does nothing but call `/ping`."""

    def __init__(self, host: str, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_watch, args=(theirs, host, port), daemon=True)
        self._process.start()
        self.longest()

    def longest(self) -> float:
        """Return the longest wait since the last call of this method, in seconds."""
        self._pipe.send(True)
        return float(self._pipe.recv())

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join(10)
