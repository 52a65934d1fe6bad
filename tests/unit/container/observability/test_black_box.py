"""Black boxes: their size, their files, and when they are written."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from container import server
from container.models import life_cycle
from container.models.life_cycle import State
from container.models.registry import Model, Models
from container.observability import black_box, black_box_content, event_loop_delay
from container.observability.black_box import MOST_FILES, BlackBoxes, box_directory
from container.observability.black_box_content import MOST_BYTES, Box, _places, _steps
from container.observability.process_report import ProcessReport
from container.server import ModelServer
from container.settings.lookup import SettingEntry
from container.settings.server import ServerConfig
from container.settings.settings import Startup
from engines.interface import CopyState, EngineCopy
from engines.loaded_model import EngineStatus, RunningSequence
from engines.stacks import Stack
from engines.statistics import EngineStatistics
from tests.stand_ins.copied_engine import CopiedEngine
from tests.unit.container.models.test_copies import Watched, service_of, watched
from tests.waiting import until, wait_until

CONTENT = {"cause": "c", "reason": "r", "at": "", "findings": [], "gathered_in_seconds": 0.0, "calls": {"open": 0}}


def boxes(directory: Path, models: Models | None = None, late: float = 0.0, **settings: Any) -> BlackBoxes:
    return BlackBoxes(
        models or Models(), ServerConfig(blackbox_dir=str(directory), **settings), None, late=lambda: late
    )


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


def only_box(directory: Path) -> dict[str, Any]:
    (file,) = files(directory)
    assert file.suffix == ".json"
    box: dict[str, Any] = json.loads(file.read_text())
    return box


def box_for_a_person() -> dict[str, Any]:
    """Return the box that a server without a directory for boxes gives."""
    found = BlackBoxes(Models(), ServerConfig(blackbox_dir=""), None, late=lambda: 0.0)
    box: dict[str, Any] = json.loads(bytes(asyncio.run(found.page()).body))
    return box


class Engine(CopiedEngine):
    """An engine with many sequences and steps."""

    def __init__(self, sequences: int, steps: int) -> None:
        super().__init__(1)
        self._sequences = sequences
        self.statistics = EngineStatistics(steps={0: [(1e9 + n, 1, 0, 2, 0.5) for n in range(steps)]})  # type: ignore[dict-item]

    def sequences(self) -> list[RunningSequence]:
        return [
            RunningSequence(
                request_id=f"id{number}", seconds=1.0, quiet_seconds=None, prompt_tokens=5, tokens=0, constraint="json"
            )
            for number in range(self._sequences)
        ]

    def status(self) -> EngineStatus:
        return EngineStatus(1, 2, 0.25)


def test_thousands_of_calls_are_counted_and_some_are_listed(tmp_path: Path) -> None:
    watched_server = Watched(Engine(5000, 9000), blackbox_dir=str(tmp_path))
    models = watched_server.server.models
    for number in range(5000):
        head = Mock(request_id=f"id{number}", running=None)
        models.open_calls[head] = "/invocations", float(number)
    watched_server.server.boxes.write_now("stall", "it hangs", watched_server.model)
    (file,) = files(tmp_path)
    assert file.stat().st_size < MOST_BYTES
    calls = only_box(tmp_path)["calls"]
    assert (calls["open"], len(calls["listed"]), calls["other_sequences"]) == (5000, 500, 4500)
    assert calls["listed"][0]["sequences"] == [{"seconds": 1.0, "prompt_tokens": 5, "tokens": 0, "constraint": "json"}]
    assert [call["id"] for call in calls["listed"]] == [f"id{number}" for number in range(500)]


def test_steps_are_shown_one_by_one_and_by_seconds() -> None:
    steps = [(100.0, 0, 0, 1, 0.1), (110.0, 1, 0, 7, 0.2), (110.5, 2, 3, 2, 0.3), (139.9, 1, 0, 1, 0.4)]
    shown = _steps(steps, 140.0)
    assert shown["seconds_since_last"] == 0.1
    assert shown["last"] == [
        [40.0, 0, 0, 1, 0.1, None],
        [30.0, 1, 0, 7, 0.2, None],
        [29.5, 2, 3, 2, 0.3, 500.0],
        [0.1, 1, 0, 1, 0.4, 29400.0],
    ]
    assert [30, 1, 1, 0, 7, 0.2, 0.0] in shown["by_second"]
    assert [29, 1, 2, 3, 2, 0.3, 500.0] in shown["by_second"]
    assert _steps(steps, 1000.0)["last"] == []
    assert _steps([], 1000.0)["seconds_since_last"] is None


values = st.recursive(
    st.none() | st.text("ab", max_size=3) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=25)
@given(part=values, copies=st.sampled_from([1, 300, 60_000]), text=st.sampled_from([1, 400_000]))
def test_a_box_is_never_larger_than_its_limit(part: Any, copies: int, text: int) -> None:
    data = Box(
        {**CONTENT, "part": [part] * copies, "text": "x" * text, "more": {"x": [["y" * 50] * copies]}}, [], []
    ).encoded()
    assert len(data) <= MOST_BYTES
    assert json.loads(data)["cause"] == "c"


def test_the_short_form_is_short_and_has_the_first_processes() -> None:
    stack = Stack("main", tuple(f'File "{"long/" * 20}a.py", line {n} in f' for n in range(9)))
    processes = [ProcessReport(pid=n, name="VLLM::Worker", state="sleeping", stacks=[stack]) for n in range(200)]
    calls = {"open": 9, "listed": [{"id": f"id{number}"} for number in range(9)]}
    line = Box({**CONTENT, "calls": calls}, [], processes).short("/the/path")
    found = json.loads(line)
    assert (found["calls"], found["oldest_calls"]) == (9, ["id0", "id1", "id2"])
    assert (found["path"], found["processes"][0]["pid"], len(found["processes"][0]["in"])) == ("/the/path", 0, 3)
    long = Box({**CONTENT, "reason": "\u2603" * 9000}, ["\u2603" * 9000] * 8, []).short("/" + "\u2603" * 4000)
    assert json.loads(long)["cause"] == "c"
    assert max(len(line), len(long)) <= 6000


def test_frames_are_cut_before_stacks_and_processes_are_never_cut() -> None:
    stacks = [
        Stack(f"thread {t}", tuple(f'File "{t}/a.py", line {n} in function' for n in range(100))) for t in range(9)
    ]
    processes = [ProcessReport(pid=n, name="VLLM::Worker", state="sleeping", stacks=stacks) for n in range(100)]
    listed = [{"route": "/invocations", "seconds": 1.0}] * 500
    data = Box(
        {**CONTENT, "processes": [one.shown() for one in processes], "calls": {"listed": listed}}, [], processes
    ).encoded()
    found = json.loads(data)
    assert len(data) <= MOST_BYTES
    assert (len(found["processes"]), len(found["processes"][99]["stacks"]), len(found["calls"]["listed"])) == (
        100,
        9,
        500,
    )
    assert len(found["processes"][0]["stacks"][0]["frames"]) == 11, "ten, and how many more"


def test_a_sequence_is_shown_with_its_own_call_and_with_none_in_doubt(tmp_path: Path) -> None:
    own = [*("the-id", "the-id-0", "cmpl-the-id-2-1", "chatcmpl-the-id", "1_cmpl-the-id-0", "embd-the-id")]
    own += ["the-id-beam", "the-id-1-beam", "cmpl-the-id-0123456789abcdef-beam-3"]
    own += ["cmpl-the-id-0-0123456789abcdef-beam-11"]
    engine = Engine(0, 0)
    engine.sequences = lambda: [  # type: ignore[method-assign]
        RunningSequence(request_id=name, seconds=1.0, quiet_seconds=None, prompt_tokens=1, tokens=0)
        for name in (*own, "chatcmpl-one", "cmpl-three-0", "cmpl-three-1", "twice")
    ]
    watched_server = Watched(engine, blackbox_dir=str(tmp_path))
    calls = {"e": 0, "id": 0, "the-id": len(own), "one": 1, "three": 2}
    for number, name in enumerate([*calls, "twice", "twice"]):
        watched_server.server.models.open_calls[Mock(request_id=name, running=None)] = "/", float(number)
    watched_server.server.boxes.write_now("stall", "it hangs")
    found = only_box(tmp_path)["calls"]
    assert [(call["id"], len(call["sequences"])) for call in found["listed"]] == [*calls.items(), *[("twice", 0)] * 2]
    assert [sequence["id"] for sequence in found["other_sequences_listed"]] == ["twice"]


def test_a_call_whose_body_has_an_id_is_listed_with_it(tmp_path: Path) -> None:
    engine = Engine(1, 0)
    watched_server = Watched(engine, blackbox_dir=str(tmp_path))
    heads = [
        Mock(request_id="of-the-server", running=Mock(request_id="id0")),
        Mock(request_id="of-the-header", running=Mock(request_id="")),
    ]
    watched_server.server.models.open_calls.update(dict.fromkeys(heads, ("/", 0.0)))
    watched_server.server.boxes.write_now("stall", "it hangs")
    calls = only_box(tmp_path)["calls"]
    assert [(call["id"], len(call["sequences"])) for call in calls["listed"]] == [("id0", 1), ("of-the-header", 0)]


def test_the_place_of_the_worker_that_differs_is_the_first() -> None:
    waits = Stack("main", ('File "zmq/sugar/poll.py", line 106 in poll', 'File "/x/vllm/v1/core.py", line 5 in wait'))
    hangs = Stack("main", ('File "/x/vllm/v1/worker.py", line 7 in run',))
    stacks = [waits] * 5 + [hangs] + [waits] * 2
    processes = [ProcessReport(pid=n, name="VLLM::Worker", state="s", stacks=[one]) for n, one in enumerate(stacks)]
    first, others = _places(processes)
    assert first == 'process 5 (VLLM::Worker) is in File "/x/vllm/v1/worker.py", line 7 in run'
    assert others.startswith(
        "process 0 (VLLM::Worker), process 1 (VLLM::Worker), process 2 (VLLM::Worker) and 4 more are"
    )
    assert others.endswith('in File "/x/vllm/v1/core.py", line 5 in wait')


def test_the_newest_files_are_kept_and_only_their_owner_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(black_box, "_PAUSE_SECONDS", 0.0)
    directory = tmp_path / "new" / "boxes"
    found = boxes(directory)
    (tmp_path / "new").mkdir()
    (directory).mkdir()
    (directory / "notes.txt").touch()
    for number in range(MOST_FILES + 3):
        found.write_now(f"cause {number}", "reason")
    names = [path.name for path in files(directory)]
    assert len(names) == MOST_FILES + 1, "other files stay"
    assert names[0].endswith("-cause-3.json")
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(directory)[:-1]} == {0o600}


def test_a_cause_has_one_box_within_half_a_minute(tmp_path: Path) -> None:
    found = boxes(tmp_path)
    for _ in range(3):
        found.write_now("stall", "reason")
    found.write_now("drain", "reason")
    assert len(files(tmp_path)) == 2
    found.write_now("stall", "reason", part=("another",))
    for _ in range(2):
        found.write_now("asked", "reason")
    assert len(files(tmp_path)) == 5, "a person may ask at any time"


def test_what_a_killed_server_has_left_is_removed(tmp_path: Path) -> None:
    left, new = tmp_path / "blackbox-1.part", tmp_path / "blackbox-2.part"
    left.touch()
    new.touch()
    os.utime(left, (1.0, 1.0))
    boxes(tmp_path).write_now("stall", "reason")
    assert (left.exists(), new.exists()) == (False, True)


def test_a_directory_that_cannot_be_written_leaves_the_short_form_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    boxes(tmp_path / "file" / "below").write_now("death", "the engine has died")
    assert "black box: the engine has died; it cannot be written" in caplog.text
    assert 'black box, short form: {"cause": "death"' in caplog.text


def test_a_short_form_is_logged_where_files_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    boxes(tmp_path / "a").write_now("death", "reason")
    assert "short form" not in caplog.text
    boxes(tmp_path / "b", blackbox_log=True).write_now("death", "reason")
    assert "short form" in caplog.text


def test_a_broken_part_does_not_cost_the_others(tmp_path: Path) -> None:
    model = Mock(spec=Model, title="m", leaving=False)
    type(model).lifecycle = property(lambda _: 1 // 0)
    models = Mock(leaving=set(), open_calls={}, __iter__=lambda _: iter([model]))
    found = boxes(tmp_path, models)
    found.write_now("death", "reason")
    box = only_box(tmp_path)
    assert "ZeroDivisionError" in box["models"][0]["error"]
    assert box["processes"][0]["pid"] == os.getpid()


def test_a_box_has_no_credential_of_the_settings_the_environment_or_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    found = Watched(Engine(1, 1), blackbox_dir=str(tmp_path), blackbox_log=True)
    entries = (
        SettingEntry("option.hf_token", "s3cret", "environment"),
        SettingEntry("option.lora_modules", "a=s3://key:s3cret@bucket/a", "serving.properties"),
        SettingEntry("option.kv_transfer_config", '{"password": "s3cret"}', "serving.properties"),
    )
    found.life.settings = replace(found.life.settings, entries=entries)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "s3cret"]) as child:
        try:
            found.server.boxes.write_now("stall", "it hangs", found.model)
        finally:
            child.kill()
    (file,) = files(tmp_path)
    box = json.loads(file.read_text())
    assert [entry["name"] for entry in box["models"][0]["settings"]["settings"]] == [entry.name for entry in entries]
    assert str(child.pid) in file.read_text()
    assert "s3cret" not in file.read_text()


def test_no_line_of_the_log_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies = [EngineCopy(n, CopyState.DEAD, 0.0, end="has ended " * 30_000) for n in range(1, 20)]
    monkeypatch.setattr(Engine, "copies", copies)
    found = Watched(Engine(0, 0), blackbox_dir=str(tmp_path), blackbox_log=True)
    found.server.boxes.write_now("death", "the engine has died " * 30_000, found.model)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("black box")]
    assert len(lines) == 2
    assert max(map(len, lines)) < 16_000


def test_processes_that_run_elsewhere_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "worker 1 in Ray on 10.0.0.2 (node abc)"
    copies = [EngineCopy(1, CopyState.READY, 0.0), EngineCopy(2, CopyState.READY, 0.0, elsewhere=(place,))]
    monkeypatch.setattr(Engine, "copies", copies)
    found = Watched(Engine(0, 0), blackbox_dir=str(tmp_path))
    found.server.boxes.write_now("stall", "it hangs", found.model)
    box = only_box(tmp_path)
    assert [copy["elsewhere"] for copy in box["models"][0]["copies"]] == [[], [place]]
    assert f"copy 2: no stacks of {place}" in box["findings"]


def test_processes_that_the_kernel_has_killed_since_the_start_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(black_box, "killed_for_memory", lambda: 5)
    found = boxes(tmp_path)
    monkeypatch.setattr(black_box, "killed_for_memory", lambda: 7)
    found.write_now("death", "the engine has died")
    box = only_box(tmp_path)
    assert box["findings"] == ["the kernel has killed 2 processes because memory was short"]
    assert box["memory"]["killed_since_start"] == 2


def test_an_nvidia_smi_that_hangs_with_its_gpu_does_not_hold_up_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(black_box_content, "gpu_figures", lambda _: ended.wait())
    box = box_for_a_person()
    ended.set()
    assert box["gpus"] == {"error": "nvidia-smi has not answered within 2 s"}


def test_nvidia_smi_is_asked_while_the_processes_write_their_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, writing = threading.Event(), threading.Event()

    def figures(_: float) -> list[dict[str, str]]:
        asked.set()
        return [{"name": "a GPU"}] if writing.wait(60) else []

    def reports(*_: object) -> list[ProcessReport]:
        assert asked.wait(60)
        writing.set()
        return []

    monkeypatch.setattr(black_box_content, "STACK_SECONDS", 60.0)
    monkeypatch.setattr(black_box_content, "gpu_figures", figures)
    monkeypatch.setattr(black_box_content, "process_reports", reports)
    assert box_for_a_person()["gpus"] == [{"name": "a GPU"}]


def test_without_a_directory_there_are_no_files_and_a_person_gets_the_box() -> None:
    found = BlackBoxes(Models(), ServerConfig(blackbox_dir=""), None, late=lambda: 0.0)
    found.write_now("stall", "reason")
    answer = box_for_a_person()
    assert (answer["cause"], answer["processes"][0]["name"]) == ("asked", "the server")
    assert box_directory("") is None
    assert box_directory(None, {"SLIPWAY_CACHE_DIR": "/cache"}) == Path("/cache/blackbox")


def test_a_signal_has_a_box_each_time_and_the_thread_ends(tmp_path: Path) -> None:
    before, found = threading.active_count(), boxes(tmp_path, late=99.0)
    found.begin()
    for number in range(2):
        os.kill(os.getpid(), signal.SIGQUIT)
        wait_until(lambda: sum(path.suffix == ".json" for path in files(tmp_path)) == number + 1)  # noqa: B023
    found.end()
    wait_until(lambda: threading.active_count() == before)
    box = json.loads(files(tmp_path)[0].read_text())
    assert (box["reason"], box["findings"][0]) == ("the server got SIGQUIT", "the event loop is late by 99.0 s")


async def test_each_death_of_a_copy_has_a_box_that_ping_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "_PAUSE_SECONDS", 0.0)
    engine = CopiedEngine()
    async with watched(monkeypatch, engine, may_start=False, blackbox_dir=str(tmp_path)) as one:
        engine.die(2)
        await engine.restarting.wait()
        (file,) = files(tmp_path)
        assert f"copies [2] have died; black box: {file}".encode() in one.ping()[1]
        engine.die(3)
        await until(lambda: len(files(tmp_path)) == 2)
        engine.may_start.set()
        await until(lambda: one.idle and not one.model.fault.black_box)
        assert b"reason" not in one.ping()[1]
        await asyncio.sleep(0.1)  # some looks
        assert len(files(tmp_path)) == 2


class SlowToEnd(CopiedEngine):
    """An engine whose copies count as dead while they end."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()

    async def stop(self, why: str = "") -> None:
        self.die(*self.states)
        await self.may_end.wait()
        await super().stop(why)


@pytest.mark.parametrize("unregisters", [False, True])
async def test_a_model_that_is_stopped_has_no_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unregisters: bool
) -> None:
    engine = SlowToEnd()
    async with watched(monkeypatch, engine, blackbox_dir=str(tmp_path)) as one:
        looks, look = Mock(), one.server.boxes.look

        async def counted(*arguments: Any) -> None:
            await look(*arguments)
            looks()

        stop = one.server.registrar.unregister(one.model) if unregisters else one.server.stop()
        stopping = asyncio.create_task(stop)
        await until(lambda: CopyState.DEAD in engine.states.values())
        monkeypatch.setattr(one.server.boxes, "look", counted)
        await until(lambda: looks.call_count > 2)
        assert not files(tmp_path)
        engine.may_end.set()
        await stopping


async def test_a_stalled_engine_that_is_loaded_anew_has_one_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = SlowToEnd(), CopiedEngine()
    old.stalled, old.waits = {1, 2, 3}, False
    monkeypatch.setattr(life_cycle, "load_service", AsyncMock(side_effect=[service_of(old), service_of(new)]))
    monkeypatch.setattr(life_cycle, "_warm_up", AsyncMock())
    async with watched(monkeypatch, old, blackbox_dir=str(tmp_path), engine_restart_when_stalled=True) as one:
        await one.life.start(lambda given: given)
        await until(lambda: CopyState.DEAD in old.states.values())
        await asyncio.sleep(0.1)  # some looks
        old.may_end.set()
        await until(lambda: one.life.state is State.READY)
        assert [file.stem.rpartition("-")[2] for file in files(tmp_path)] == ["stall"]


async def test_a_drain_that_runs_out_of_time_has_a_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, CopiedEngine(), blackbox_dir=str(tmp_path), drain_timeout=0.5) as one:
        one.life.open_calls = 1
        await one.server.drain()
        await until(lambda: [path.suffix for path in files(tmp_path)] == [".json"])
        assert only_box(tmp_path)["reason"] == "1 request was still running after 0.25 s of a drain of 0.5 s"
        one.life.open_calls = 0


async def test_the_box_of_a_drain_is_written_while_its_calls_may_still_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = asyncio.wait
    monkeypatch.setattr(asyncio, "wait", lambda tasks, timeout: wait(tasks, timeout=0.0 if timeout > 60.0 else timeout))
    async with watched(monkeypatch, CopiedEngine(), blackbox_dir=str(tmp_path), drain_timeout=600.0) as one:
        one.life.open_calls = 1
        draining = asyncio.create_task(one.server.drain())
        await until(lambda: [path.suffix for path in files(tmp_path)] == [".json"])
        assert not draining.done()
        one.life.open_calls = 0
        await draining


@pytest.mark.parametrize("seconds", [0.0, 600.0], ids=["of no time", "whose calls end in time"])
async def test_a_drain_may_have_no_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    async with watched(monkeypatch, CopiedEngine(), blackbox_dir=str(tmp_path), drain_timeout=seconds) as one:
        one.life.open_calls = 1
        draining = asyncio.create_task(one.server.drain())
        await until(lambda: one.life.stage is State.DRAINING if seconds else draining.done())
        one.life.open_calls = 0
        await draining
        assert not files(tmp_path)


async def test_a_box_that_hangs_does_not_put_off_the_end_of_a_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(black_box, "gathered", lambda *_: ended.wait())
    async with watched(monkeypatch, CopiedEngine(), blackbox_dir=str(tmp_path), drain_timeout=0.01) as one:
        one.life.open_calls = 1
        await one.server.drain()
        assert not ended.is_set()
        ended.set()
        one.life.open_calls = 0


async def test_an_event_loop_that_stands_still_has_a_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop_delay, "_STUCK_SECONDS", 0.5)
    server_config = ServerConfig(blackbox_dir=str(tmp_path), multi_model=True)
    found = ModelServer(Startup(server_config, ()))
    await found.load()
    wait_until(lambda: [path.suffix for path in files(tmp_path)] == [".json"])  # `wait_until` blocks this event loop.
    await found.stop()
    box = only_box(tmp_path)
    assert box["cause"] == "event loop"
    assert box["reason"].startswith("the event loop has stood still for ")


def test_a_server_that_does_not_end_in_time_has_a_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, codes = server.Process(Startup(ServerConfig(blackbox_dir=str(tmp_path)), ())), []
    written = lambda _: wait_until(lambda: [path.suffix for path in files(tmp_path)] == [".json"])  # noqa: E731
    monkeypatch.setattr(server, "time", Mock(sleep=written))
    monkeypatch.setattr(process, "_end_now", codes.append)
    process._end_late(signal.SIGTERM, 25.0, 2.0)
    assert only_box(tmp_path)["cause"] == "end"
    assert codes == [128 + signal.SIGTERM]


async def test_only_the_listener_of_the_management_api_has_it_and_no_other_site_gets_it() -> None:
    server_config = ServerConfig(management_address="http://127.0.0.1:1", blackbox_dir="")
    applications = ModelServer(Startup(server_config, ())).applications
    assert applications.management is not None
    async with httpx.AsyncClient(transport=httpx.ASGITransport(applications.main), base_url="http://localhost") as main:
        assert (await main.get("/server/blackbox")).status_code == 404
    transport = httpx.ASGITransport(applications.management)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as management:
        answer = await management.get("/server/blackbox")
        assert (answer.status_code, answer.json()["cause"]) == (200, "asked")
        page = {"sec-fetch-site": "cross-site"}
        assert (await management.get("/server/blackbox", headers=page)).status_code == 403
