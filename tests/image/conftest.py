from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from container.sources.sample_model import prepare
from tests.image.building import CannotBuild, build
from tests.image.container_engine import Engine, NoEngine, find_engine
from tests.live.conftest import ENGINE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.image)
            item.add_marker(pytest.mark.timeout(3600))  # The first test builds the image.


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    try:
        return find_engine(tmp_path_factory.mktemp("engine"))
    except NoEngine as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> str:
    """The device of the image. The GPU image is built on a base that has vLLM's CPU build."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def image(engine: Engine, device: str) -> str:
    """The image for the device: the image in $IMAGE, or one that is built now."""
    if image := os.environ.get("IMAGE"):
        # Only the GPU image has cuda-compat.sh in its entry point.
        given = "gpu" if len(engine.config(image)["Entrypoint"]) > 2 else "cpu"
        if given != device:
            pytest.skip(f"IMAGE is an image for the {given}")
        return image
    try:
        return build(engine, device)
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample model with its settings. Every user may read it."""
    directory = tmp_path_factory.mktemp("model-store") / "model"
    shutil.copytree(prepare(), directory)
    lines = [f"option.{name}={value}" for name, value in ENGINE.items()]
    (directory / "serving.properties").write_text("\n".join(lines) + "\n")
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory
