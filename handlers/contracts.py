"""The families of clients that are served; a new one is registered here.

No two of them may have the same path and method, unless a route says `where`. LMI is not in the list: what answers its
routes, `/invocations` and `/predictions`, depends on the model's settings.
"""

from __future__ import annotations

from handlers.contract_routes import ContractRoutes
from handlers.happy_vllm.routes import HAPPY_VLLM
from handlers.openai.routes import OPENAI
from handlers.tgi.routes import TGI
from handlers.triton.routes import TRITON

CONTRACTS: tuple[ContractRoutes, ...] = (TRITON, HAPPY_VLLM, TGI, OPENAI)
