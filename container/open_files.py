"""How many files the process may have open, connections among them."""

from __future__ import annotations

import resource

ENOUGH = 65536
"""More than a server's calls and idle connections are; as many as vLLM's own server asks for."""


def allow_open_files() -> None:
    """Raise the soft limit to the hard one, as far as it is of use.

    1024 is a common soft limit, and fewer than the calls that may wait here. Once there are as many connections, no
    further one is accepted, not even for /ping.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
