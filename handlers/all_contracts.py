"""The contracts that declare routes. A new contract is added here.

No two contracts may have the same path and method, unless a route has `with_field`, or both have `models`. LMI is not
in the list, because the model's settings decide which handler serves its routes, `/invocations` and `/predictions`.
"""

from __future__ import annotations

from handlers.contract_routes import ContractRoutes
from handlers.happy_vllm.routes import HAPPY_VLLM
from handlers.openai.routes import ANTHROPIC, OPENAI
from handlers.tei.routes import TEI
from handlers.tgi.routes import TGI
from handlers.triton.routes import TRITON

CONTRACTS: tuple[ContractRoutes, ...] = (TRITON, HAPPY_VLLM, TGI, TEI, OPENAI, ANTHROPIC)
