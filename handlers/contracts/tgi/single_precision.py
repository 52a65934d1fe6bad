"""Numbers of single precision as serde_json writes them: the fewest digits that say which number it is.

Engines compute log probabilities in single precision and hand them over in Python's double precision, whose own text
has nine digits of noise: -0.4000000059604645 is -0.4.
"""

from __future__ import annotations

from math import isfinite
from struct import Struct

_SINGLE = Struct("<f")
_pack, _unpack = _SINGLE.pack, _SINGLE.unpack


def single(value: float | None) -> str:
    """JSON for a number; "null" for None and for what single precision cannot hold. About a microsecond."""
    if value is None or not isfinite(value):
        return "null"
    try:
        packed = _pack(value)
    except OverflowError:
        return "null"
    nearest: float = _unpack(packed)[0]
    # Any decimal of six digits is told apart; nine digits tell all numbers apart.
    text = f"{nearest:.6g}"
    if _pack(float(text)) != packed:
        text = f"{nearest:.7g}"
        if _pack(float(text)) != packed:
            text = f"{nearest:.8g}"
            if _pack(float(text)) != packed:
                text = f"{nearest:.9g}"
    if "e" in text:
        return _exponential(text)
    return text if "." in text else text + ".0"


def _exponential(text: str) -> str:
    """1.5e-07 as 1.5e-7; down to 1e-6 in plain digits."""
    mantissa, _, exponent = text.partition("e")
    power = int(exponent)
    if power < -6 or power > 0:
        return f"{mantissa}e{power}"
    sign, digits = ("-", mantissa[1:]) if mantissa[0] == "-" else ("", mantissa)
    return f"{sign}0.{'0' * (-power - 1)}{digits.replace('.', '')}"
