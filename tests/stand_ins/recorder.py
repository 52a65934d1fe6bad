"""A sink that keeps its deltas and errors."""

from __future__ import annotations

from engines.errors import RequestError
from engines.request import TokenDelta


class Recorder:
    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.errors: list[RequestError] = []

    def on_delta(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)

    def on_error(self, error: RequestError) -> None:
        self.errors.append(error)
