"""The floor: a front end that does only the work that every front end in Python has to do.

It reads HTTP with httptools on uvloop, as Slipway does. It sends a message to the scripted engine for each request,
decodes the engine's messages, and writes a constant record for each token. It detokenizes nothing, encodes no JSON,
counts no metrics, and validates nothing.

    python -m benchmarks.scripted_front_end DIRECTORY SCRIPT benchmarks.floor DIRECTORY PORT
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any

import httptools
import msgspec
import uvloop
import zmq
import zmq.asyncio
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackEncoder

from benchmarks.scripted_front_end import addresses
from engines.vllm.output_processor import LeanDecoder, SentOutput, SentOutputs

_PROMPT_TOKEN_IDS = list(range(20))
_DOCUMENT = b'{"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":%b}]}'
_LAST_DOCUMENT = _DOCUMENT % b'"length"'


class Completion(msgspec.Struct):
    """The fields of a request that the floor reads."""

    max_tokens: int
    stream: bool = False
    logprobs: int | None = None


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _record(document: bytes) -> bytes:
    return _chunk(b"data: %b\n\n" % document)


_READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_RECORD, _LAST_RECORD = _record(_DOCUMENT % b"null"), _record(_LAST_DOCUMENT) + _chunk(b"")
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(_LAST_DOCUMENT), _LAST_DOCUMENT)


class EngineSockets:
    """The front end's side of the engine's protocol."""

    def __init__(self, directory: Path) -> None:
        context, where = zmq.asyncio.Context(), addresses(directory)
        self._input, self._output = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
        self._input.bind(where["input_address"])
        self._output.bind(where["output_address"])
        self._encoder, self._decoder = MsgpackEncoder(), LeanDecoder(SentOutputs)
        self._numbers = itertools.count()
        self.connections: dict[str, Connection] = {}

    async def connected(self) -> None:
        """Wait for the engine's first message."""
        self._identity, _ = await self._input.recv_multipart()

    def add(self, completion: Completion, connection: Connection) -> None:
        """Send a request."""
        request_id = str(next(self._numbers))
        self.connections[request_id] = connection
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=_PROMPT_TOKEN_IDS,
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=completion.max_tokens, logprobs=completion.logprobs),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        message = (self._identity, EngineCoreRequestType.ADD.value, *self._encoder.encode(request))
        self._input.send_multipart(message)

    async def run(self) -> None:
        """Pass each token to its connection, forever."""
        while True:
            outputs: SentOutputs = self._decoder.decode(await self._output.recv_multipart())
            for output in outputs.outputs:
                self.connections[output.request_id].token(output)


class Connection(asyncio.Protocol):
    """One client."""

    transport: asyncio.Transport

    def __init__(self, engine: EngineSockets) -> None:
        self._engine, self._parser, self._body = engine, httptools.HttpRequestParser(self), b""
        self._stream = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._body:
            self.transport.write(_READY)
            return
        completion = msgspec.json.decode(self._body, type=Completion)
        self._body, self._stream = b"", completion.stream
        self._engine.add(completion, self)
        if self._stream:
            self.transport.write(_STREAM)

    def token(self, output: SentOutput) -> None:
        """Write a token of a stream. Without a stream, write the whole answer, which has only one token."""
        ended = output.finish_reason is not None
        if ended:
            del self._engine.connections[output.request_id]
        self.transport.write((_LAST_RECORD if ended else _RECORD) if self._stream else _ANSWER)


async def serve(directory: Path, port: int) -> None:
    """Serve forever."""
    engine = EngineSockets(directory)
    await engine.connected()
    await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=1024)
    await engine.run()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
