"""`slipway replay`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from container.settings.values import masked
from deploy.local_endpoint.parameters import check_endpoint_name, is_server_url
from replay.request import HEADER_NAME, encodable, printable
from replay.results import FILE, CannotResume, Result, ResultFile
from replay.run import NoTimes, Plan, Replay
from replay.sources import MalformedLine, Sample, Source, SourceError, open_source
from replay.targets import HttpTarget, SageMakerTarget, Target, Unreachable

DIFFERENT, WRONG_USE, INTERRUPTED = 1, 2, 130
_FILE_COLUMNS = 160  # The width of the printed report if standard output is not a terminal.
_HEADER = re.compile(rf"({HEADER_NAME}):\s*([\x20-\x7e]*)")
_TARGETS = "expected http://host:port or the name of a SageMaker endpoint"


def replay(
    source: Annotated[str, typer.Argument(help="A file or folder of recorded requests, or s3://bucket/folder.")],
    to: Annotated[str, typer.Option("--to", help="URL of the server to test, or the name of its SageMaker endpoint.")],
    against: Annotated[
        str | None,
        typer.Option(help="URL of the old server, or the name of its SageMaker endpoint. Its answers are compared."),
    ] = None,
    recorded: Annotated[bool, typer.Option("--recorded", help="Compare with the recorded answers in SOURCE.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory for the results and the report.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run whose results are in --output.")] = False,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="Maximum number of requests that run at the same time.")
    ] = 4,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Maximum number of requests per second.")] = None,
    as_recorded: Annotated[
        bool, typer.Option("--as-recorded", help="Send the requests at the recorded intervals.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of requests to send.")] = None,
    sample: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Fraction of the requests to send. Their ids decide which requests.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of --sample: another number chooses other requests.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Maximum seconds for a whole answer.")] = 300.0,
    header: Annotated[
        list[str] | None, typer.Option(help="'Name: value': a header for both servers; repeatable.")
    ] = None,
    to_header: Annotated[list[str] | None, typer.Option(help="'Name: value': a header for --to; repeatable.")] = None,
    against_header: Annotated[
        list[str] | None, typer.Option(help="'Name: value': a header for --against; repeatable.")
    ] = None,
    pass_header: Annotated[
        list[str] | None,
        typer.Option(help="Name of a recorded header to send although no contract knows it; repeatable."),
    ] = None,
    management: Annotated[
        bool, typer.Option("--management", help="Also send requests that change the server, for example its adapters.")
    ] = False,
    path: Annotated[str, typer.Option(help="Path of the requests whose records have no path.")] = "/invocations",
    path_map: Annotated[
        list[str] | None,
        typer.Option("--map", help="OLD=NEW: send requests for the path OLD to the path NEW of --to; repeatable."),
    ] = None,
    component: Annotated[
        str | None, typer.Option(help="Inference component to call on the SageMaker endpoint --to.")
    ] = None,
    against_component: Annotated[
        str | None, typer.Option(help="Inference component to call on the SageMaker endpoint --against.")
    ] = None,
    region: Annotated[str | None, typer.Option(help="AWS region.")] = None,
    profile: Annotated[str | None, typer.Option(help="Profile of the AWS credentials.")] = None,
    other_model: Annotated[
        bool, typer.Option("--other-model", help="The models differ: compare no texts and no numbers of tokens.")
    ] = False,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave texts of prompts and answers out of the results and the report.")
    ] = False,
) -> None:
    """Send recorded requests to a server, and compare its answers with recorded answers or another server's answers.

    Exit codes: 0 if the documentation explains every difference, 2 for wrong options, 130 if interrupted, else 1.
    """
    if (against is None) == (not recorded):
        raise typer.BadParameter("give one of --against and --recorded", param_hint="--against")
    if rate is not None and as_recorded:
        raise typer.BadParameter("has no meaning with --as-recorded", param_hint="--rate")
    if against_header and against is None:
        raise typer.BadParameter("has no meaning without --against", param_hint="--against-header")
    if against_component and (against is None or "://" in against):
        raise typer.BadParameter("needs a SageMaker endpoint as --against", param_hint="--against-component")
    if resume and output is None:
        raise typer.BadParameter("needs --output, the directory of the earlier run", param_hint="--resume")
    if sample == 0:
        raise typer.BadParameter("is 0; expected a number above 0, up to 1", param_hint="--sample")
    if not path.startswith("/"):
        raise typer.BadParameter(f"is {path!r}; expected a path that begins with /", param_hint="--path")
    paths = _paths(path_map or [])
    new_headers = headers_of("--header", header) + headers_of("--to-header", to_header)
    old_headers = headers_of("--header", header) + headers_of("--against-header", against_header)
    if wrong := [name for name in pass_header or [] if re.fullmatch(HEADER_NAME, name) is None]:
        raise typer.BadParameter(f"is {wrong[0]!r}; expected the name of a header", param_hint="--pass-header")
    passed = frozenset(name.lower() for name in pass_header or [])
    connection = Connection(region, profile, timeout, concurrency)
    try:
        found = open_source(source, path, connection.s3)
    except SourceError as error:
        raise typer.BadParameter(printable(str(error)), param_hint="SOURCE") from None
    new = connection.target("--to", to, new_headers, paths, component)
    old = None if against is None else connection.target("--against", against, old_headers, {}, against_component)
    options = {
        "source": encodable(source),
        "to": masked("", to),
        "against": None if against is None else masked("", against),
        "recorded": recorded,
        "component": component,
        "against_component": against_component,
        "path": path,
        "map": paths,
        "pass_header": sorted(passed),
        "management": management,
        "sample": sample,
        "seed": seed,
        "other_model": other_model,
        "redact": redact,
    }
    plan = Plan(
        concurrency=concurrency,
        rate=rate,
        as_recorded=as_recorded,
        limit=limit,
        sample=Sample(sample, seed),
        redact=redact,
        other_model=other_model,
        management=management,
        passed_headers=passed,
    )
    directory = output or Path(f"replay-{datetime.now():%Y%m%d-%H%M%S}")
    sys.exit(asyncio.run(_run(found, new, old, plan, options, directory, resume)))


@dataclass(frozen=True, slots=True)
class Connection:
    """Creates the AWS clients and the targets."""

    region: str | None
    profile: str | None
    timeout: float
    concurrency: int

    def s3(self) -> Any:
        return self._client("s3")

    def target(
        self,
        option: str,
        name: str,
        headers: Sequence[tuple[str, str]],
        paths: Mapping[str, str],
        component: str | None,
    ) -> Target:
        """Return the target that an option names.

        Raises:
            typer.BadParameter: The value is neither a URL nor the name of an endpoint, or headers are given for an
                endpoint.
        """
        if "://" in name:
            if not is_server_url(name):
                raise typer.BadParameter(f"is {masked('', name)!r}; {_TARGETS}", param_hint=option)
            return HttpTarget(name, headers, self.timeout, self.concurrency, paths)
        from deploy.local_endpoint.errors import RuntimeApiError

        try:
            check_endpoint_name(name)
        except RuntimeApiError:
            raise typer.BadParameter(f"is {name!r}; {_TARGETS}", param_hint=option) from None
        if headers:
            raise typer.BadParameter("SageMaker passes no headers on; leave out --header", param_hint=option)
        client = self._client("sagemaker-runtime")
        return SageMakerTarget(client, name, self.timeout, paths, component)

    def _client(self, service: str) -> Any:
        from botocore.exceptions import ProfileNotFound

        from deploy.sagemaker.aws import Aws
        from deploy.sagemaker.configuration import ConfigurationError

        try:
            aws = Aws(self.region, self.profile, otherwise="us-east-1")
            return aws.client(service, attempts=1 if service != "s3" else 3, connections=self.concurrency)
        except ProfileNotFound as error:
            raise typer.BadParameter(str(error), param_hint="--profile") from None
        except ConfigurationError as error:
            raise typer.BadParameter(str(error)) from None


async def _run(
    source: Source,
    new: Target,
    old: Target | None,
    plan: Plan,
    options: Mapping[str, Any],
    directory: Path,
    resume: bool,
) -> int:
    from rich.console import Console  # rich and numpy take a while to import, and invalid options need neither.

    from replay.report import Progress, Report

    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _FILE_COLUMNS
    console = Console(highlight=False, width=wide)
    report, results = Report(options), ResultFile(directory / FILE)
    done: set[bytes] = set()
    try:
        _prepare(directory, resume)
        if resume:
            for result in results.resume(options):
                done.add(bytes.fromhex(result.key))
                report.add(result)
        else:
            results.create(options)
    except (CannotResume, OSError) as error:
        typer.echo(f"slipway: {printable(str(error))}", err=True)
        return WRONG_USE
    progress = Progress(source, plan.limit, report)

    def on_result(result: Result) -> None:
        results.add(result)
        report.add(result)
        progress.update()

    def on_malformed(line: MalformedLine) -> None:
        report.add_malformed(line)
        progress.update()

    run = Replay(source, new, old, plan, on_result, on_malformed, report.add_unsent, done)
    code = DIFFERENT
    interrupted = _on_signals(run.stop)
    try:
        with progress.bar:
            await run.run()
    except (NoTimes, Unreachable) as error:
        typer.echo(f"slipway: {printable(str(error))}", err=True)
        report.ended = str(error)
        code = WRONG_USE if isinstance(error, NoTimes) else DIFFERENT
    finally:
        results.close()
        await new.close()
        if old is not None:
            await old.close()
    if interrupted:
        report.ended, code = f"{interrupted[0]}; --resume continues it", INTERRUPTED
    elif run.gave_up:
        report.ended = "too many requests in a row had no answer; --resume continues it"
    _write(report.as_json(), directory)
    report.show(console)
    console.print(printable(f"The report is in {directory / 'report.html'}"), soft_wrap=True, markup=False)
    return 0 if report.passed else code


def _prepare(directory: Path, resume: bool) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CannotResume(f"--output {directory} cannot be made: {error.strerror}") from None
    if not resume and (directory / FILE).exists():
        raise CannotResume(f"{directory / FILE} exists; give --resume to continue its run, or another --output")


def _on_signals(stop: Callable[[], None]) -> list[str]:
    """Stop the replay at the first signal, and the process at the second.

    The name of the first signal is added to the returned list.
    """
    loop, seen = asyncio.get_running_loop(), []

    def on_signal(number: signal.Signals) -> None:
        seen.append("Ctrl-C" if number is signal.SIGINT else number.name)
        loop.remove_signal_handler(number)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return seen


def _write(report: Mapping[str, Any], directory: Path) -> None:
    from replay.page import page

    written = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    texts = {
        "report.json": json.dumps(report, indent=2, ensure_ascii=False) + "\n",
        "report.html": page(report, written),
    }
    for name, text in texts.items():
        # Only the owner can read the files, because the examples may contain texts of users.
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


def headers_of(option: str, given: list[str] | None) -> list[tuple[str, str]]:
    """Return the headers that an option lists, as names and values.

    Raises:
        typer.BadParameter: A header is not of the form 'Name: value'.
    """
    found = []
    for text in given or []:
        if (match := _HEADER.fullmatch(text.strip())) is None:
            # The message does not show the text, because it may be a key.
            raise typer.BadParameter("a header is not of the form 'Name: value'", param_hint=option)
        found.append((match[1], match[2]))
    return found


def _paths(given: list[str]) -> dict[str, str]:
    paths = {}
    for text in given:
        old, equals, new = text.partition("=")
        if not (equals and old.startswith("/") and new.startswith("/")):
            raise typer.BadParameter(f"is {text!r}; expected /old=/new", param_hint="--map")
        paths[old] = new
    return paths
