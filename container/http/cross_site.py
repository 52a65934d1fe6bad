"""Finds the requests that a browser sends for another site; routes that command or describe the server refuse them.

Any web page can have a browser send requests to a server on its user's machine or network, without asking the server
first (CORS's "simple requests"), and by DNS rebinding it can read the answers. API clients are not affected: only
browsers send `Sec-Fetch-Site` and `Origin`, and call themselves Mozilla.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping

_OWN = (b"same-origin", b"none")
"""Values of Sec-Fetch-Site: the server's own page sent the request, or the user typed the address."""
_PORT = re.compile(r":[0-9]*$")
_SHOWN = 200
"""Characters of a header that a message repeats."""


class KnownHosts:
    """The names under which browsers may reach the server's own routes.

    A page that was loaded under another name may belong to a site whose name leads here now (DNS rebinding). Nobody
    else can make an IP address, `localhost` or this machine's name lead here.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Take further names (`SERVING_ALLOWED_HOSTS`)."""
        self._names = frozenset(name.lower() for name in (*names, "localhost", socket.gethostname()))

    def fault(self, headers: Mapping[bytes, bytes]) -> str:
        """Say why a request is refused; "" if an API client has sent it, or a page of this server."""
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site is None and origin is None and not headers.get(b"user-agent", b"").startswith(b"Mozilla/"):
            return ""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if site is not None:
            foreign = site not in _OWN
        else:
            foreign = origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host
        if foreign:
            return "a browser sent this request for another site; only this server's own pages may send it"
        if not self._is_known(host):
            return (
                f"a browser sent this request to {host[:_SHOWN]!r}, which is not known as a name of this server; "
                "expected an IP address, localhost or a name in SERVING_ALLOWED_HOSTS"
            )
        return ""

    def _is_known(self, host: str) -> bool:
        name = _PORT.sub("", host)
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True
