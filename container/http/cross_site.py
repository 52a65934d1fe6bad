"""Finds requests that a browser sends on behalf of another site's page.

Routes that control or describe the server refuse such requests.

Any web page can make a browser send requests to a server on its user's machine or network, without asking the server
first (CORS's "simple requests"). By DNS rebinding, the page can also read the answers. API clients are recognized by
their headers: they send none of `BROWSER_HEADERS`, and do not call themselves Mozilla.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping

from engines.errors import SHOWN

# Headers that browsers send, but that API clients do not send.
BROWSER_HEADERS = (b"sec-fetch-site", b"origin", b"accept-language")
# Values of Sec-Fetch-Site: the server's own page sent the request, or the user typed the address.
_OWN = (b"same-origin", b"none")
_PORT = re.compile(r":[0-9]*$")


class KnownHosts:
    """The names under which browsers may reach the server's own routes.

    A page that was loaded under another name may belong to a site whose name now resolves to this server (DNS
    rebinding). IP addresses, `localhost` and this machine's name are always allowed, because no other site controls
    where they lead.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Allow additional names (`SERVING_ALLOWED_HOSTS`)."""
        self._names = frozenset(name.lower() for name in (*names, "localhost", socket.gethostname()))

    def fault(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the reason to refuse a request. Empty if an API client or a page of this server sent the request."""
        by_browser = any(name in headers for name in BROWSER_HEADERS)
        if not by_browser and not _names_mozilla(headers.get(b"user-agent", b"")):
            return ""
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if site is not None:
            foreign = site not in _OWN
        else:
            foreign = origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host
        if foreign:
            return "a browser sent this request for another site; only this server's own pages may send it"
        if not self._is_known(host):
            return (
                f"a browser sent this request to {host[:SHOWN]!r}, which is not known as a name of this server; "
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


def _names_mozilla(user_agent: bytes) -> bool:
    return user_agent.startswith(b"Mozilla/")


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a checked request without the headers that only browsers send.

    The headers go to another server, under another `Host`. With a browser's headers, that server would refuse the
    request.
    """
    return [
        (name, value)
        for name, value in headers
        if name not in BROWSER_HEADERS and not (name == b"user-agent" and _names_mozilla(value))
    ]
