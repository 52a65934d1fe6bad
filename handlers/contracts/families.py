"""The families of clients that are served; a new one is registered here.

No two of them may have the same path and method, unless a route says `where`. LMI is not in the list: what answers its
routes, `/invocations` and `/predictions`, depends on the model's settings.
"""

from __future__ import annotations

from handlers.contracts.family import Family
from handlers.contracts.happy_vllm.family import HAPPY_VLLM
from handlers.contracts.openai.family import OPENAI
from handlers.contracts.tgi.family import TGI
from handlers.contracts.triton.family import TRITON

FAMILIES: tuple[Family, ...] = (TRITON, HAPPY_VLLM, TGI, OPENAI)
