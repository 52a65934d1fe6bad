"""LMI's listener addresses, such as `http://0.0.0.0:8080` (contracts/lmi.md 1.1 and 2.9)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from container.masking import quoted
from container.properties import Value

_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9_.-]+))(:(?P<port>[0-9]{1,5}))?/?"
)
_DEFAULT_PORT = "80"


class AddressError(Exception):
    """An address that Slipway cannot listen on; the message names the key, the source and what is allowed."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen."""

    host: str
    port: str

    @classmethod
    def parse(cls, value: Value, key: str = "management_address") -> Address:
        """Parse `http://host:port`; the port is 80 if left out.

        Raises:
            AddressError: no such address, or one with TLS or of a Unix socket.
        """
        match = _ADDRESS.fullmatch(value.text.strip())
        given = f"{key} is {quoted(key, value.text)} ({value.source})"
        if match is None:
            raise AddressError(f"{given}; allowed: http://<host>:<port>")
        if match["scheme"] == "https":
            raise AddressError(
                f"{given}: not served by this version of Slipway; let a proxy in front of the container do TLS"
            )
        return cls(match["v6"] or match["host"], match["port"] or _DEFAULT_PORT)


def expand_address(layer: dict[str, Value]) -> None:
    """Set `host` and `port` from `inference_address`, unless the same layer has them.

    Raises:
        AddressError: the address is none.
    """
    value = layer.get("inference_address")
    if value is None:
        return
    address = Address.parse(value, "inference_address")
    layer.setdefault("host", Value(address.host, value.source))
    layer.setdefault("port", Value(address.port, value.source))
