"""The life cycle of real worker processes: they load, crash, hang, scale and stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.interface import EngineStartError
from handlers.contract import ContractError
from handlers.custom.custom_handler import CustomHandler
from tests.unit.handlers.custom.harness import MODELS, Recorder, alive, serving, settings_for
from tests.waiting import pass_time, until


async def start_failure(model: str | Path, **more: object) -> str:
    handler = CustomHandler(settings_for(model, **more), queue_size=1, overload_status=503)
    children = set(psutil.Process().children())
    with pytest.raises(EngineStartError) as failure:
        await handler.start()
    assert not handler.health().alive
    assert set(psutil.Process().children()) <= children
    return str(failure.value)


REFUSING = "from djl_python import Output\n\ndef handle(inputs):\n    return Output().error('no licence')\n"


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("missing_handle", {}, f"^{re.escape(str(MODELS))}/missing_handle/model.py .*`handle`"),
        (
            "import_error",
            {},
            r"^cannot import the handler: ModuleNotFoundError: No module named 'no_such_package_anywhere'.*"
            r"\(model.py, line 1\)$",
        ),
        ("echo", {"entry_point": "/nowhere/none.py"}, "none.py does not exist"),
        ("echo", {"entry_point": "nowhere"}, "No module named 'nowhere'"),
        ("echo", {"python_executable": "/nowhere/python"}, "cannot run /nowhere/python"),
        (
            "runtime_error",
            {"properties": {"fail_at_load": "1"}},
            r"^the handler's initialization failed: RuntimeError: no weights \(model.py, line 7\)$",
        ),
        ("out_of_memory", {}, "ran out of memory"),
    ],
)
async def test_a_model_that_cannot_be_loaded_says_why(model: str, more: dict[str, Any], message: str) -> None:
    assert re.search(message, await start_failure(model, **more))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def handle(inputs)\n    return None\n", r"SyntaxError: expected ':' \(model.py, line 1\)"),
        ("import os\nprint('last words')\nos._exit(7)\n", "(?s)exited with code 7.*last words"),
        (REFUSING, "(?s)424 invoke handler failure.*no licence"),
    ],
)
async def test_code_that_cannot_be_loaded_says_why(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "model.py").write_text(code)
    assert re.search(message, await start_failure(tmp_path))


async def test_loading_that_takes_too_long_is_ended() -> None:
    message = await start_failure("slow", properties={"load_seconds": "3600"}, model_loading_timeout=0.1)
    assert "did not load within 0.1 seconds (model_loading_timeout)" in message


async def test_if_the_second_worker_cannot_start_the_first_is_ended(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import os\ndef handle(inputs):\n    os.mkdir('first') if not os.path.exists('first') else 1 / 0\n"
    )
    assert "ZeroDivisionError" in await start_failure(tmp_path, min_workers=2)


@pytest.mark.parametrize(("switch", "reason"), [("exit", "exited with code 3"), ("abort", "exited with code 4")])
async def test_a_handler_that_exits_fails_its_own_call_and_is_restarted(switch: str, reason: str) -> None:
    async with serving("echo") as client:
        [before] = client.pids
        died, _ = await client.send(query={switch: "1"})
        waiting, _ = await client.send(b"waited")
        assert (await died.done()).status == 503
        assert json.loads(died.body) == {
            "code": 503,
            "type": "EngineException",
            "message": f"the handler's worker {reason} during the request",
        }
        assert (await waiting.done()).body == b"waited"
        assert client.pids != [before]
        assert client.handler.pool.failures == 1
        assert client.handler.health().alive


async def test_a_worker_killed_mid_stream_ends_the_body_with_the_reason(tmp_path: Path) -> None:
    async with serving("echo") as client:
        writer, _ = await client.send(query={"endless": "10", "journal": str(tmp_path / "journal")})
        await writer.progress.wait()
        os.kill(client.pids[0], signal.SIGKILL)
        await writer.done()
        assert writer.status == 200
        assert writer.body.endswith(b"the handler's worker was killed by SIGKILL during the request")
        assert (await client.ask(b"next")).body == b"next"


async def test_a_worker_killed_while_idle_is_replaced() -> None:
    async with serving("echo") as client:
        [before] = client.pids
        os.kill(before, signal.SIGKILL)
        await until(lambda: client.handler.pool.failures == 1 and client.handler.pool.ready == 1)
        assert (await client.ask(b"next")).body == b"next"


async def test_a_hanging_call_is_answered_and_its_worker_replaced_while_others_go_on() -> None:
    async with serving("slow", min_workers=2, max_workers=2, predict_timeout=60.0) as client:
        before = client.pids
        hung, _ = await client.send("3600")
        others = [await client.ask("0") for _ in range(3)]
        await pass_time(61)
        await hung.done()
        assert [other.body for other in others] == [b"done"] * 3
        assert hung.status == 503
        assert b"60 seconds (predict_timeout)" in hung.body
        await until(lambda: client.handler.pool.ready == 2 and client.pids != before)
        assert client.handler.pool.failures == 1


async def test_a_cancelled_call_that_hangs_does_not_keep_its_worker(tmp_path: Path) -> None:
    async with serving("slow", predict_timeout=60.0) as client:
        _, running = await client.send(str(tmp_path / "never"))
        await until((tmp_path / "never.begun").exists)
        running.cancel()
        waiting, _ = await client.send("0")
        await pass_time(61)
        assert (await waiting.done()).body == b"done"
        assert client.handler.pool.failures == 1


async def test_beyond_the_retry_threshold_the_model_counts_as_failed_and_still_serves() -> None:
    async with serving("echo", retry_threshold=1, min_workers=2, max_workers=2) as client:
        assert (await client.ask(query={"abort": "1"})).status == 503
        await until(lambda: client.handler.pool.ready == 2)
        assert client.handler.health().alive
        assert (await client.ask(query={"abort": "1"})).status == 503
        health = client.handler.health()
        assert not health.alive
        assert "failed 2 times (retry_threshold: 1)" in health.reason
        assert (await client.ask(b"next")).body == b"next"
        await until(lambda: client.handler.pool.ready == 2)
        assert not client.handler.health().alive


async def test_calls_are_refused_while_no_worker_can_be_started(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import os\n"
        "from djl_python import Output\n"
        "def handle(inputs):\n"
        "    if inputs.is_empty():\n"
        "        if os.path.exists('broken'):\n"
        "            raise ValueError('not now')\n"
        "        return None\n"
        "    if inputs.contains_key('break'):\n"
        "        open('broken', 'w').close()\n"
        "        os._exit(1)\n"
        "    return Output().add('served')\n"
    )
    async with serving(tmp_path) as client:
        died, _ = await client.send(query={"break": "1"})
        waiting, _ = await client.send(b"waits")
        assert (await died.done()).status == 503
        refused = await waiting.done()
        assert refused.status == 503
        assert b"not now" in refused.body
        with pytest.raises(ContractError, match="not now"):
            await client.send(b"next")
        (tmp_path / "broken").unlink()
        await until(lambda: client.handler.pool.ready)
        assert (await client.ask(b"next")).body == b"served"


async def test_a_worker_that_cannot_be_restarted_counts_as_a_failure_each_time(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import os\n"
        "def handle(inputs):\n"
        "    if not inputs.is_empty():\n"
        "        os._exit(1)\n"
        "    if os.path.exists('loaded'):\n"
        "        raise ValueError('not again')\n"
        "    open('loaded', 'w').close()\n"
    )
    async with serving(tmp_path, retry_threshold=2) as client:
        assert (await client.ask()).status == 503
        await until(lambda: not client.handler.health().alive)
        assert client.handler.pool.failures == 3
        assert "not again" in client.handler.health().reason


async def test_a_full_queue_is_refused_with_the_overload_status(tmp_path: Path) -> None:
    async with serving("slow", queue_size=2) as client:
        writers = [(await client.send(str(tmp_path / "go")))[0] for _ in range(3)]
        with pytest.raises(ContractError) as refused:
            await client.send("0")
        (tmp_path / "go").touch()
        assert refused.value.reply.status == 529
        assert b'"type": "WlmCapacityException"' in refused.value.reply.body
        assert [(await writer.done()).body for writer in writers] == [b"done"] * 3
        assert (await client.ask("0")).body == b"done"


async def test_without_standing_workers_the_first_call_starts_one() -> None:
    async with serving("echo", min_workers=0, max_workers=1, max_idle_time=0.2) as client:
        assert (await client.ask(b"x")).body == b"x"
        await until(lambda: not client.handler.pool.workers)
        assert (await client.ask(b"y")).body == b"y"


async def test_without_standing_workers_each_call_after_a_failed_start_tries_again(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import os\n"
        "from djl_python import Output\n"
        "def handle(inputs):\n"
        "    if not inputs.is_empty():\n"
        "        return Output().add('served')\n"
        "    if os.path.exists('broken'):\n"
        "        raise ValueError('not now')\n"
    )
    (tmp_path / "broken").touch()
    async with serving(tmp_path, min_workers=0, max_workers=1) as client:
        for failures in (1, 2):
            refused = await client.ask(b"x")
            assert (refused.status, client.handler.pool.failures) == (503, failures)
            assert b"not now" in refused.body
        (tmp_path / "broken").unlink()
        answers = await asyncio.gather(client.ask(b"x"), client.ask(b"y"))
        assert [answer.body for answer in answers] == [b"served"] * 2


async def test_busy_workers_beyond_a_lower_number_end_after_their_call(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    async with serving("slow", min_workers=2, max_workers=2) as client:
        pool = client.handler.pool
        writers = [(await client.send(str(first)))[0] for _ in range(2)]
        writers += [(await client.send(str(second)))[0] for _ in range(4)]
        assert (pool.busy, pool.queue_length) == (2, 4)
        pool.scale(1, 1)
        first.touch()
        await until(lambda: len(pool.workers) == 1, 60)
        await until(lambda: pool.queue_length == 3)
        assert (pool.busy, writers[-1].status) == (1, 0)
        second.touch()
        assert [(await writer.done()).body for writer in writers] == [b"done"] * 6
        assert pool.failures == 0


async def test_a_model_scaled_to_nothing_answers_its_running_calls_and_refuses_others(tmp_path: Path) -> None:
    async with serving("slow") as client:
        running, _ = await client.send(str(tmp_path / "go"))
        waiting, _ = await client.send("0")
        client.handler.pool.scale(0, 0)
        assert (await waiting.done()).status == 503
        with pytest.raises(ContractError) as refused:
            await client.send("0")
        assert refused.value.reply.status == 503
        (tmp_path / "go").touch()
        assert (await running.done()).body == b"done"
        await until(lambda: not client.handler.pool.workers)
        client.handler.pool.scale(1, 1)
        assert (await client.ask("0")).body == b"done"


async def test_a_worker_that_ends_while_another_one_loads_is_replaced_once_and_counts_as_a_failure(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.py").write_text(
        "import os, time\n"
        "def handle(inputs):\n"
        "    if not os.path.exists('first'):\n"
        "        open('first', 'w').close()\n"
        "        return\n"
        "    while not os.path.exists('go'):\n"
        "        time.sleep(0.05)\n"
    )
    config = settings_for(tmp_path, min_workers=2, max_workers=2, retry_threshold=0)
    handler = CustomHandler(config, queue_size=1, overload_status=503)
    pool = handler.pool
    starting = asyncio.create_task(handler.start())
    try:
        await until(lambda: pool.ready == 1 and len(pool.workers) == 2)
        pid = pool.workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: [worker.id for worker in pool.workers] == [2, 3])
        (tmp_path / "go").touch()
        await starting
        await until(lambda: pool.ready == 2)
        assert [worker.id for worker in pool.workers] == [2, 3]
        assert pool.failures == 1
        assert "failed 1 times (retry_threshold: 0)" in handler.health().reason
    finally:
        await handler.stop()


async def test_a_long_queue_starts_workers_that_end_when_idle(tmp_path: Path) -> None:
    async with serving("slow", min_workers=1, max_workers=2, max_idle_time=0.3) as client:
        [first] = client.pids
        writers = [(await client.send(str(tmp_path / "go")))[0] for _ in range(6)]
        await until(lambda: client.handler.pool.ready == 2)
        (tmp_path / "go").touch()
        for writer in writers:
            await writer.done()
        extra = set(client.pids) - {first}
        await until(lambda: len(client.handler.pool.workers) == 1)
        await until(lambda: not any(map(alive, {*extra} - set(client.pids))))
        assert client.handler.pool.failures == 0


async def test_lower_priorities_leave_the_queue_first(tmp_path: Path) -> None:
    order: list[str] = []

    async def ask(name: str, priority: str) -> None:
        writer, _ = await client.send(str(tmp_path / "go"), headers={"X-Priority": priority} if priority else None)
        await writer.done()
        order.append(name)

    async with serving("slow") as client:
        calls = [("running", ""), ("later", "9"), ("default", ""), ("first", "1")]
        asking = asyncio.gather(*(ask(name, priority) for name, priority in calls))
        await until(lambda: client.handler.pool.queue_length == 3)
        (tmp_path / "go").touch()
        await asking
    assert order == ["running", "first", "default", "later"]


async def test_stopping_lets_a_call_finish_and_ends_what_the_handler_started(tmp_path: Path) -> None:
    async with serving("processes") as client:
        child = int((await client.ask()).body)
        assert alive(child)
    await until(lambda: not alive(child))
    async with serving("slow", grace=60.0) as client:
        writer, _ = await client.send(str(tmp_path / "go"))
        waiting, _ = await client.send("0")
        stopping = asyncio.create_task(client.handler.stop())
        assert (await waiting.done()).status == 503
        (tmp_path / "go").touch()
        await stopping
        assert writer.body == b"done"
        with pytest.raises(ContractError):
            await client.send("0")


async def test_stopping_does_not_wait_for_a_call_that_hangs() -> None:
    async with serving("slow", grace=0.2) as client:
        writer, _ = await client.send("3600")
    assert writer.status == 503


async def test_a_crash_ends_what_the_handler_started() -> None:
    async with serving("processes") as client:
        child = int((await client.ask()).body)
        os.kill(client.pids[0], signal.SIGKILL)
        await until(lambda: not alive(child))


async def test_workers_run_their_exit_functions_when_they_are_stopped(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import atexit\natexit.register(lambda: open('exited', 'w').close())\ndef handle(inputs):\n    return None\n"
    )
    async with serving(tmp_path, grace=60.0):
        pass
    assert (tmp_path / "exited").exists()


async def test_many_crashes_and_calls_at_once_lose_no_answer() -> None:
    async with serving("echo", min_workers=3, max_workers=3, queue_size=1000) as client:

        async def ask(index: int) -> Recorder:
            return await client.ask(f"{index}", query={"abort": "1"} if index % 25 == 0 else None)

        answers = await asyncio.gather(*(ask(index) for index in range(100)))
    assert [answer.status for answer in answers] == [503 if index % 25 == 0 else 200 for index in range(100)]
    assert all(answer.body == b"%d" % index for index, answer in enumerate(answers) if index % 25)
