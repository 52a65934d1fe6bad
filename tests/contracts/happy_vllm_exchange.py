"""happy_vllm's contract without an engine, for tests."""

from __future__ import annotations

from typing import Any

from handlers.happy_vllm.routes import HappyVllmContract
from handlers.route_declarations import ContractSetting
from tests.contracts.exchange import MODEL
from tests.contracts.tgi_exchange import FakeModel
from tests.settings import configured


def contract(*, stream: bool = False, **settings: Any) -> HappyVllmContract:
    setting = ContractSetting(config=configured(MODEL, **settings), model=FakeModel())
    return HappyVllmContract(setting, stream=stream)
