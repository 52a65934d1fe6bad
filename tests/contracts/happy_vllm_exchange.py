"""happy_vllm's contract without an engine, for tests."""

from __future__ import annotations

from typing import Any

from handlers.happy_vllm.routes import HappyVllmContract
from tests.contracts.exchange import MODEL
from tests.settings import configured


def contract(*, stream: bool = False, **settings: Any) -> HappyVllmContract:
    return HappyVllmContract(configured(MODEL, **settings), stream=stream)
