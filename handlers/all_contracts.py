"""The contracts that declare routes. Add new contracts here.

Two contracts may share a path and a method in two cases only: one of the two routes has `with_field`, or both routes
have `models`.
"""

from __future__ import annotations

from handlers.happy_vllm.routes import HAPPY_VLLM
from handlers.lmi.routes import lmi
from handlers.openai.routes import ANTHROPIC, OPENAI
from handlers.route_declarations import ContractRoutes
from handlers.tei.routes import TEI
from handlers.tgi.routes import TGI
from handlers.triton.routes import TRITON


def all_contracts(not_ready: int = 503, internal: int = 500) -> tuple[ContractRoutes, ...]:
    """Return the contracts. The arguments are the statuses that `lmi` takes from the server's settings."""
    return (lmi(not_ready, internal), TRITON, HAPPY_VLLM, TGI, TEI, OPENAI, ANTHROPIC)


CONTRACTS = all_contracts()
