"""The families of clients that are served: each is declared in the file of its wire contract, and registered here.

No two of them may want one path and method, unless a route says `where`. LMI's routes are not in the list:
`/invocations` and `/predictions` are answered by what the model's settings say.
"""

from __future__ import annotations

from handlers.contracts.family import Family
from handlers.contracts.happy_vllm.family import HAPPY_VLLM
from handlers.contracts.openai.family import OPENAI
from handlers.contracts.tgi.family import TGI
from handlers.contracts.triton.family import TRITON

FAMILIES: tuple[Family, ...] = (TRITON, HAPPY_VLLM, TGI, OPENAI)
