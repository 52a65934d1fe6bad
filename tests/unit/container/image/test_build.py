"""`build.sh` builds from the digest of a base image. A fake container engine records its arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
DIGEST = "sha256:" + "5" * 64
ENGINE = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["ASKED"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
match sys.argv[1:]:
    case ["pull", "--quiet", name]:
        sys.exit(name in ("example.com/of-nobody:1", "of-nobody"))
    case ["image", "inspect", "--format", _, _]:
        print("example.com/other@sha256:other")
        print("docker.io/vllm/vllm-openai@{DIGEST}")
"""


class Machine:
    """A machine with a fake container engine."""

    def __init__(self, directory: Path) -> None:
        self._asked, self._engine = directory / "asked", directory / "engine"
        self._engine.write_text(ENGINE)
        self._engine.chmod(0o755)
        self.said = ""

    def build(self, device: str, **variables: str) -> list[str]:
        """Return the arguments of the build."""
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_IMAGE")}
        environment |= {"CONTAINER_ENGINE": str(self._engine), "ASKED": str(self._asked), **variables}
        command = ["sh", ROOT / "container" / "image" / "build.sh", device, "slipway:test"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        self.said = done.stderr
        arguments: list[str] = json.loads(self._asked.read_text().splitlines()[-1])
        return arguments

    @property
    def pulled(self) -> list[str]:
        asked = map(json.loads, self._asked.read_text().splitlines())
        return [arguments[-1] for arguments in asked if arguments[0] == "pull"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_digest_of_a_tag_is_looked_up_and_is_what_the_image_is_built_from(machine: Machine) -> None:
    arguments = machine.build("gpu")
    (tag,) = machine.pulled
    assert tag.startswith("vllm/vllm-openai:v")
    assert f"BASE_IMAGE={tag}@{DIGEST}" in arguments
    assert f"org.opencontainers.image.base.name={tag}" in arguments
    assert f"org.opencontainers.image.base.digest={DIGEST}" in arguments
    assert machine.said == ""


def test_a_registry_with_a_port_and_no_tag_is_no_matter(machine: Machine) -> None:
    base = "example.com:5000/vllm/vllm-openai"
    assert f"BASE_IMAGE={base}@{DIGEST}" in machine.build("gpu", BASE_IMAGE=base)


def test_a_digest_that_is_given_is_taken_and_nothing_is_looked_up(machine: Machine) -> None:
    given = f"example.com:5000/debian:12@{DIGEST}"
    arguments = machine.build("cpu", BASE_IMAGE=given)
    assert machine.pulled == []
    assert f"BASE_IMAGE={given}" in arguments
    assert "org.opencontainers.image.base.name=example.com:5000/debian:12" in arguments
    assert f"org.opencontainers.image.base.digest={DIGEST}" in arguments


def test_the_cpu_images_own_base_has_its_digest(machine: Machine) -> None:
    arguments = machine.build("cpu")
    assert machine.pulled == []
    assert "org.opencontainers.image.base.name=debian:bookworm-slim" in arguments


@pytest.mark.parametrize("base", ["localhost/base:1", "example.com/of-nobody:1", "of-nobody"])
def test_an_image_that_no_registry_has_is_taken_as_it_is_and_that_is_said(machine: Machine, base: str) -> None:
    arguments = machine.build("cpu", BASE_IMAGE=base)
    assert f"BASE_IMAGE={base}" in arguments
    assert "org.opencontainers.image.base.digest=" in arguments
    assert base in machine.said
