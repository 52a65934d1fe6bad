"""Which calls change adapters, and which of them a replica that starts later has to carry out."""

from __future__ import annotations

import json

import pytest

from deploy.ray.changes import Change, Changes, changes_adapters


def change(method: str, target: str, **body: str) -> Change:
    return Change(method, target.encode(), (), json.dumps(body).encode())


def load(name: str, path: str = "/a") -> Change:
    return change("POST", "/v1/load_lora_adapter", lora_name=name, lora_path=path)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/load_lora_adapter", True),
        ("POST", "/v1/unload_lora_adapter", True),
        ("POST", "/adapters", True),
        ("DELETE", "/adapters/a", True),
        ("POST", "/adapters/a/update", True),
        ("POST", "/models/m/adapters", True),
        ("DELETE", "/models/m/adapters/a", True),
        ("GET", "/adapters", False),
        ("GET", "/models/m/adapters/a", False),
        ("POST", "/models/m", False),
        ("POST", "/models/m/invoke", False),
        ("POST", "/v1/completions", False),
    ],
)
def test_calls_that_change_adapters(method: str, path: str, expected: bool) -> None:
    assert changes_adapters(method, path.encode()) is expected


@pytest.mark.parametrize(
    ("call", "adapter"),
    [
        (load("a"), ("", "a")),
        (change("POST", "/adapters", name="a", src="/x"), ("", "a")),
        (change("POST", "/models/m/adapters?x=1", name="a"), ("m", "a")),
        (Change("POST", b"/adapters?name=a&src=/x", (), b""), ("", "a")),
        (change("DELETE", "/models/m/adapters/a?y"), ("m", "a")),
        (change("DELETE", "/adapters/a%2Fb"), ("", "a/b")),
        (change("POST", "/adapters/a/update", src="/y"), ("", "a")),
    ],
)
def test_a_change_says_which_adapter_it_is_of(call: Change, adapter: tuple[str, str]) -> None:
    assert call.adapter == adapter


def test_a_replica_gets_what_came_after_what_it_has() -> None:
    changes = Changes()
    first, second = load("a"), load("b")
    assert [changes.add(first), changes.add(second)] == [1, 2]
    assert changes.since(0) == (2, [(1, first), (2, second)])
    assert changes.since(1) == (2, [(2, second)])
    assert changes.since(2) == (2, [])


def test_an_adapter_that_comes_and_goes_leaves_one_change_behind() -> None:
    changes = Changes()
    for _ in range(100):
        changes.add(load("a"))
        changes.add(change("POST", "/v1/unload_lora_adapter", lora_name="a"))
    last, left = changes.since(0)
    assert last == 200
    assert [(number, call.target) for number, call in left] == [(200, b"/v1/unload_lora_adapter")]


def test_an_update_needs_the_registration_before_it() -> None:
    changes = Changes()
    registered, updated = change("POST", "/adapters", name="a"), change("POST", "/adapters/a/update", src="/y")
    changes.add(registered)
    changes.add(updated)
    assert changes.since(0)[1] == [(1, registered), (2, updated)]
    again = change("POST", "/adapters", name="a")
    changes.add(again)
    assert changes.since(0)[1] == [(3, again)]


def test_a_replica_brings_back_what_was_lost() -> None:
    replica, actor = Changes(), Changes()
    replica.add(load("a"), 7)
    actor.restore(*replica.since(0))
    assert actor.since(0) == (7, [(7, load("a"))])
    actor.add(load("b"))
    actor.restore(*replica.since(0))
    assert actor.last == 8
