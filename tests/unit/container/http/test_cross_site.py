"""Requests that a browser sends for another site, or under a host name that a stranger may control."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.http.cross_site import KnownHosts, passed_on

BROWSER = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
HOSTS = KnownHosts(["Slipway.example.com", "gpu-1"])
OF_ANOTHER_SITE = "a browser sent this request for another site; only this server's own pages may send it"
NAMES = ["127.0.0.1:8080", "10.0.0.7", "[::1]:8080", "localhost", "LOCALHOST:8080", "a.localhost", socket.gethostname()]


def fault(**headers: str) -> str:
    return HOSTS.fault({name.replace("_", "-").encode(): value.encode() for name, value in headers.items()})


@given(st.text(st.characters(codec="ascii")), st.sampled_from(["", "curl/8", "python-httpx/0.28", "Boto3/1.40"]))
def test_an_api_client_may_use_any_name(host: str, agent: str) -> None:
    assert fault(host=host, user_agent=agent) == ""


@pytest.mark.parametrize("host", [*NAMES, "slipway.example.com:8080", "gpu-1"])
@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_a_page_of_this_server_may_ask_it(host: str, site: str) -> None:
    assert fault(host=host, sec_fetch_site=site, user_agent=BROWSER) == ""
    # A proxy may have replaced the name in `Host`. But the browser has compared the origins.
    assert fault(host=host, origin="https://public.example", sec_fetch_site=site, user_agent=BROWSER) == ""
    # Without TLS, browsers send Sec-Fetch-Site only to their own machine.
    assert fault(host=host, origin=f"http://{host}", user_agent=BROWSER) == ""
    assert fault(host=host, user_agent=BROWSER) == ""


@pytest.mark.parametrize("host", NAMES)
def test_another_sites_page_is_refused(host: str) -> None:
    for site in ("cross-site", "same-site", "SAME-ORIGIN", ""):
        assert fault(host=host, sec_fetch_site=site) == OF_ANOTHER_SITE
    for origin in ("http://evil.example", "null", "", "http://localhost.evil.example", f"http://{host}9", "http://["):
        assert fault(host=host, origin=origin) == OF_ANOTHER_SITE


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil", ""])
def test_a_name_that_may_be_a_strangers_is_refused(host: str) -> None:
    own = {"user_agent": "own", "accept_language": "en"}  # in Firefox, a page may choose the header User-Agent
    for headers in ({"sec_fetch_site": "same-origin"}, {"origin": f"http://{host}"}, {"user_agent": BROWSER}, own):
        said = fault(host=host, **headers)
        assert repr(host) in said
        assert "SERVING_ALLOWED_HOSTS" in said


def test_what_is_passed_on_is_an_api_clients() -> None:
    own = [(b"host", b"a"), (b"user-agent", b"curl/8"), (b"accept", b"*/*")]
    signs = [(b"origin", b"http://a"), (b"sec-fetch-site", b"same-origin"), (b"accept-language", b"en")]
    assert passed_on([*own, *signs, (b"user-agent", BROWSER.encode())]) == own
    assert HOSTS.fault(dict(passed_on([(b"host", b"elsewhere"), *signs]))) == ""


@given(st.dictionaries(st.sampled_from([b"host", b"origin", b"sec-fetch-site", b"user-agent"]), st.binary()))
def test_no_header_is_a_fault_of_ours(headers: dict[bytes, bytes]) -> None:
    assert isinstance(HOSTS.fault(headers), str)
