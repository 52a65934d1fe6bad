"""What each command runs in: its connection to AWS, its errors in words, its exit codes.

Exit codes: 0, it is done; 1, it failed; 2, the configuration is wrong; 3, what is there stands in the way; 130,
interrupted.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from deploy.sagemaker import options as given

if TYPE_CHECKING:
    from deploy.sagemaker.aws import AwsCloud
    from deploy.sagemaker.executor import Failed
    from deploy.sagemaker.presence import Surroundings

FAILED, WRONG, IN_THE_WAY, INTERRUPTED = 1, 2, 3, 130


def cloud_of(region: str | None, profile: str | None, file: Path | None = None) -> AwsCloud:
    """AWS by the options, or else by the configuration file's region.

    Raises:
        NoRegion: nothing names a region.
        ConfigurationError: the file cannot be read.
    """
    from deploy.sagemaker.aws import AwsCloud
    from deploy.sagemaker.configuration_reader import read_file

    if region is None and file is not None:
        named = read_file(file).get("region")
        region = named if isinstance(named, str) else None
    return AwsCloud(region, profile)


def surroundings(cloud: AwsCloud) -> Surroundings:
    """AWS, with progress on standard error and a clock that waits for real."""
    from deploy.sagemaker.presence import Surroundings
    from deploy.sagemaker.progress import Progress, RealClock

    clock = RealClock()
    return Surroundings(cloud, Progress(sys.stderr, clock), clock)


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """SIGTERM, with which a CI system cancels a job, is what Ctrl-C is."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """Say what went wrong in one line for each problem, and end with its exit code; never with a traceback."""
    from botocore.exceptions import BotoCoreError, ClientError

    from deploy.sagemaker.aws import NoRegion
    from deploy.sagemaker.configuration_reader import ConfigurationError
    from deploy.sagemaker.executor import Conflict, Failed
    from deploy.sagemaker.invoke import StreamBroken
    from deploy.sagemaker.logs import NoLog
    from deploy.sagemaker.service_errors import in_words
    from deploy.sagemaker.status import NoEndpoint
    from deploy.sagemaker.template import NotInTemplates

    try:
        yield
    except ConfigurationError as error:
        _end(WRONG, *error.problems)
    except (given.WrongOption, NoRegion, NotInTemplates) as error:
        _end(WRONG, str(error))
    except Conflict as error:
        _end(IN_THE_WAY, *error.problems)
    except Failed as error:
        _end(INTERRUPTED if error.interrupted else FAILED, str(error), *_left(error))
    except (NoEndpoint, NoLog, StreamBroken) as error:
        _end(FAILED, str(error))
    except (BotoCoreError, ClientError) as error:
        _end(FAILED, in_words(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _left(error: Failed) -> list[str]:
    return [f"left: {key}" for key in error.left] + (["`slipway destroy` removes it"] if error.left else [])


def _end(code: int, *problems: str) -> None:
    for problem in problems:
        typer.echo(f"slipway: {problem}", err=True)
    sys.exit(code)
