"""`slipway deploy | update | destroy | status | template | invoke | logs | policy`.

Exit codes: 0, it is done; 1, it failed; 2, the configuration is wrong; 3, the stack or endpoint that exists does not
allow it; 130, interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from deploy.sagemaker import invoke as asking
from deploy.sagemaker import logs as reading
from deploy.sagemaker.aws import Aws, error_in_words, is_missing
from deploy.sagemaker.configuration import (
    Configuration,
    ConfigurationError,
    laid_over,
    read_configuration,
    read_file,
    read_options,
)
from deploy.sagemaker.roles import caller_policy
from deploy.sagemaker.stack import ENDPOINT_TAG, ChangeSet, Conflict, Failed, Stack, Wanted
from deploy.sagemaker.status import NoEndpoint
from deploy.sagemaker.status import status as status_of
from deploy.sagemaker.template import as_yaml, parameter_values
from deploy.sagemaker.template import template as template_of
from deploy.sagemaker.uploads import UploadFailed, ecr_image, push_script, upload_model
from deploy.sagemaker.uploads import push as push_image

FAILED, WRONG, CONFLICT, INTERRUPTED = 1, 2, 3, 130
_LOG_LINES = 20

Name = Annotated[str, typer.Argument(help="Name of the endpoint.")]
Region = Annotated[str | None, typer.Option(help="By default AWS_REGION or the profile's.")]
Profile = Annotated[str | None, typer.Option(help="Profile of the AWS credentials.")]
OfComponent = Annotated[
    str | None, typer.Option("--component", help="Inference component: the model's is named like the endpoint.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the template and, with credentials, what would change.")]


def register(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    for command in (
        _configured(deploy),
        _configured(update),
        destroy,
        status,
        invoke,
        logs,
        _configured(template),
        policy,
    ):
        app.command()(_errors_in_words()(command))


@dataclass(frozen=True, slots=True)
class _Deployment:
    """A configuration, the stack that is to be made of it, and where."""

    aws: Aws
    configuration: Configuration
    stack: Stack
    wanted: Wanted

    @property
    def name(self) -> str:
        return self.configuration.name


def _read(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file with the configuration; options go before what it says.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the endpoint; by default from the model.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id, or an s3:// prefix or archive.")] = None,
    upload: Annotated[
        str | None, typer.Option(help="Local directory to upload first, to the s3:// prefix that is the model.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image in ECR.")] = None,
    push: Annotated[str | None, typer.Option(help="Local image to push to ECR first, with docker.")] = None,
    role: Annotated[str | None, typer.Option(help="ARN of the execution role; by default one is made.")] = None,
    instance_type: Annotated[str | None, typer.Option(help="Such as ml.g6e.xlarge.")] = None,
    instances: Annotated[int | None, typer.Option(help="How many to begin with.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the container; repeatable.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="KEY=VALUE on every resource; repeatable.")] = None,
    account: Annotated[str | None, typer.Option(help="Twelve digits, if no ARN says it.")] = None,
    set: Annotated[
        list[str] | None,
        typer.Option(help="Any other field as FIELD=VALUE in TOML, such as autoscaling.max=4; repeatable."),
    ] = None,
    region: Region = None,
    profile: Profile = None,
) -> _Deployment:
    """The deployment of a file and of options; AWS is asked for the account alone, where a push needs it."""
    options = dict(locals())
    values = laid_over(read_file(file) if file else {}, read_options(options))
    in_ecr = ecr_image(str(values.get("image", "")))
    given = values.get("region")
    aws = Aws(given if isinstance(given, str) else None, profile, otherwise=in_ecr.region if in_ecr else None)
    values.setdefault("region", aws.region)
    if values.get("push") and not values.get("account") and not values.get("role") and aws.has_credentials:
        values["account"] = str(aws.client("sts").get_caller_identity()["Account"])
    configuration = read_configuration(values)
    tags = {**configuration.tags, ENDPOINT_TAG: configuration.name}
    wanted = Wanted(template_of(configuration), parameter_values(configuration), tags)
    return _Deployment(aws, configuration, _stack(aws, configuration.name), wanted)


def _configured(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `_read`, which give its first argument, before its own."""
    shared = inspect.signature(_read, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def run(**options: Any) -> None:
        deployment = _read(**{name: options.pop(name) for name in shared})
        command(deployment, **options)

    run.__dict__["__signature__"] = inspect.Signature([*shared.values(), *own])
    return run


def deploy(
    deployment: _Deployment,
    dry_run: DryRun = False,
    rollback: Annotated[bool, typer.Option(help="Remove what was made if anything fails.")] = True,
) -> None:
    """Deploy a model to a SageMaker endpoint, with one CloudFormation stack."""
    if dry_run:
        _show(deployment)
        return
    with _termination_interrupts():
        _deploy(deployment, rollback=rollback)
    name = deployment.name
    typer.echo(f"{name} is in service")
    component = f" --component {name}" if deployment.configuration.component else ""
    typer.echo(f'try: slipway invoke {name}{component} --prompt "Hello"', err=True)


def update(deployment: _Deployment, dry_run: DryRun = False) -> None:
    """Bring a deployment to another configuration while it serves."""
    if dry_run:
        _show(deployment)
        return
    with _termination_interrupts():
        change = _update(deployment)
    typer.echo(f"{deployment.name} is {'updated' if change else 'up to date'}")
    configuration = deployment.configuration
    sent = [what for what in (configuration.push and configuration.image, configuration.upload) if what]
    if sent and not (change and any(each.resource == "Model" for each in change.changes)):
        typer.echo(
            f"slipway: note: {' and '.join(sent)} was sent again under the same name, so what runs was not replaced: "
            "give the image another tag, or the model another prefix, to have it rolled out",
            err=True,
        )


def template(deployment: _Deployment) -> None:
    """Print the CloudFormation template that `deploy` makes."""
    typer.echo(as_yaml(deployment.wanted.template), nl=False)


def destroy(
    name: Name,
    region: Region = None,
    profile: Profile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
    repository: Annotated[
        str | None, typer.Option(help="Also this image repository, with its images, if it carries the tag.")
    ] = None,
) -> None:
    """Remove an endpoint and all that belongs to it: delete its stack."""
    aws = Aws(region, profile)
    said = "would remove" if dry_run else "removed"
    removed = _removed(aws, name, dry_run=dry_run)
    for resource in removed:
        typer.echo(f"{said}: {resource}")
    if repository and _repository_removed(aws, name, repository, dry_run=dry_run):
        typer.echo(f"{said}: image repository {repository}")
    elif not removed:
        typer.echo(f"nothing to remove: there is no stack slipway-{name}")


def status(
    name: Name,
    region: Region = None,
    profile: Profile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Show an endpoint's stack, variants, components, scaling and alarms."""
    aws = Aws(region, profile)
    of_stack = None
    with contextlib.suppress(Conflict):  # an endpoint that something else has made is shown as well
        of_stack = _stack(aws, name).status()
    found = status_of(aws, name, of_stack)
    typer.echo(json.dumps(found, indent=2) if as_json else as_yaml(found).rstrip())


def invoke(
    name: Name,
    prompt: Annotated[str, typer.Option(help="The prompt.")] = "",
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in a chat's form.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    component: OfComponent = None,
    body: Annotated[str | None, typer.Option(help="The request's JSON, instead of a prompt.")] = None,
    input_location: Annotated[
        str | None, typer.Option(help="s3:// request of an asynchronous endpoint; prints where the answer is.")
    ] = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Ask an endpoint; AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME names another than AWS's."""
    if not (prompt or body or input_location):
        raise ConfigurationError("--prompt: missing; expected a text (or --body, or --input-location)")
    runtime = Aws(region, profile).client("sagemaker-runtime")
    if input_location:
        typer.echo(asking.invoke_asynchronously(runtime, name, input_location))
        return
    made = asking.body(prompt, max_new_tokens=max_new_tokens, chat=chat, stream=stream)
    # What was no UTF-8 in the shell goes out as it was.
    request = body.encode(errors="surrogateescape") if body else made
    if not stream:
        typer.echo(asking.invoke(runtime, name, request, component))
        return
    try:
        for text in asking.texts(asking.invoke_stream(runtime, name, request, component)):
            typer.echo(text, nl=False)
    except asking.StreamBroken:
        typer.echo()
        raise
    typer.echo()


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
    since: Annotated[int, typer.Option(min=1, help="Minutes back.")] = 60,
    component: OfComponent = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Show what the containers of an endpoint log."""
    client = Aws(region, profile).client("logs")
    start = int((time.time() - since * 60) * 1000)
    for line in (reading.follow if follow else reading.read)(client, reading.group(name, component), start):
        typer.echo(str(line))


def policy(
    account: Annotated[str, typer.Option(help="Twelve digits.")],
    region: Annotated[str, typer.Option()],
    role: Annotated[str | None, typer.Option(help="ARN of the execution role; by default those of stacks.")] = None,
    repository: Annotated[
        str | None, typer.Option(help="Also what `deploy --push` needs, for this image repository.")
    ] = None,
) -> None:
    """Print the IAM policy that someone needs who deploys, looks, asks and removes."""
    typer.echo(json.dumps(caller_policy(account, region, role, repository), indent=2))


def _stack(aws: Aws, name: str) -> Stack:
    return Stack(aws.client("cloudformation"), name, _teller())


def _show(deployment: _Deployment) -> None:
    """The template and the commands of a push; and with credentials, what CloudFormation would change."""
    from botocore.exceptions import BotoCoreError

    configuration, stack = deployment.configuration, deployment.stack
    typer.echo(as_yaml(deployment.wanted.template), nl=False)
    if configuration.push:
        typer.echo(push_script(configuration.push, configuration.image, configuration.region), err=True)
    if configuration.upload:
        typer.echo(f"{configuration.upload} would be uploaded to {configuration.model}", err=True)
    if not deployment.aws.has_credentials:
        typer.echo("slipway: note: no change set, as there are no AWS credentials", err=True)
        return
    try:
        if stack.status() is not None:
            stack.check_updatable()
        change = stack.propose(deployment.wanted)
    except (Conflict, BotoCoreError) as error:
        typer.echo(f"slipway: note: no change set: {error_in_words(error)}", err=True)
        return
    if change is None:
        typer.echo("nothing would change", err=True)
        return
    typer.echo("a new stack:" if change.creates else "changes:", err=True)
    for each in change.changes:
        replaced = f", replaced: {each.replacement}" if each.replacement else ""
        typer.echo(f"  {each.action} {each.resource} ({each.kind}){replaced}", err=True)
    stack.discard(change)


def _deploy(deployment: _Deployment, *, rollback: bool) -> None:
    stack = deployment.stack
    new = stack.ready_to_create()
    change = stack.propose(deployment.wanted, rollback=rollback)
    if change and not new:
        stack.discard(change)
        differing = ", ".join(each.resource for each in change.changes) or "its tags"
        raise Conflict(f"{deployment.name} exists and differs in {differing}; run `slipway update` to change it")
    _send(deployment, change)
    if change:
        with _log_of_what_does_not_start(deployment):
            stack.create(change, rollback=rollback)


def _update(deployment: _Deployment) -> ChangeSet | None:
    stack = deployment.stack
    stack.check_updatable()
    change = stack.propose(deployment.wanted)
    _send(deployment, change)
    if change:
        with _log_of_what_does_not_start(deployment):
            for problem in stack.update(change, deployment.wanted):
                typer.echo(f"slipway: note: not deleted: {problem}", err=True)
    return change


def _send(deployment: _Deployment, change: ChangeSet | None) -> None:
    """Push the image and upload the model, where that is asked for; a proposal is forgotten if it fails."""
    aws, configuration, tell = deployment.aws, deployment.configuration, _teller()
    try:
        if configuration.push:
            push_image(aws.client("ecr"), configuration.push, configuration.image, deployment.wanted.tags, tell)
        if configuration.upload:
            upload_model(aws.client("s3"), Path(configuration.upload), configuration.model, tell)
    except BaseException:
        if change:
            deployment.stack.discard(change)
        raise


@contextlib.contextmanager
def _log_of_what_does_not_start(deployment: _Deployment) -> Iterator[None]:
    """Show the last lines that the containers have logged, if the endpoint or a component does not start."""
    begun, name = time.time(), deployment.name
    try:
        yield
    except Failed as error:
        if error.started:
            group = reading.group(name, name if deployment.configuration.component else None)
            for line in reading.last_lines(deployment.aws.client("logs"), group, _LOG_LINES, begun):
                typer.echo(f"  log: {line}", err=True)
        raise


def _removed(aws: Aws, name: str, *, dry_run: bool) -> list[str]:
    """Delete the stack; gives what was in it."""
    from botocore.exceptions import ClientError

    stack = _stack(aws, name)
    if stack.description() is None:
        try:
            aws.client("sagemaker").describe_endpoint(EndpointName=name)
        except ClientError as error:
            if is_missing(error):
                return []
            raise
        raise Conflict(
            f"the endpoint {name} was not made by a stack of Slipway, so it is kept; "
            f"`aws sagemaker delete-endpoint --endpoint-name {name}` removes it"
        )
    found = stack.resources()
    if not dry_run:
        with _termination_interrupts():
            stack.delete()
    return found


def _repository_removed(aws: Aws, name: str, repository: str, *, dry_run: bool) -> bool:
    """Remove an image repository that `deploy --push` has made for this deployment.

    Raises:
        Conflict: it was made for something else.
    """
    ecr = aws.client("ecr")
    try:
        found = ecr.describe_repositories(repositoryNames=[repository])["repositories"][0]
    except ecr.exceptions.RepositoryNotFoundException:
        return False
    tags = ecr.list_tags_for_resource(resourceArn=found["repositoryArn"])["tags"]
    if {"Key": ENDPOINT_TAG, "Value": name} not in tags:
        raise Conflict(
            f"the image repository {repository} was not made for {name}, so it is kept; "
            f"`aws ecr delete-repository --force --repository-name {repository}` removes it"
        )
    if not dry_run:
        ecr.delete_repository(repositoryName=repository, force=True)
    return True


def _teller() -> Callable[[str], None]:
    """Writes lines to standard error, with the seconds since the start; what failed is red on a terminal."""
    start = time.monotonic()

    def tell(line: str) -> None:
        color = typer.colors.RED if "_FAILED" in line else None
        typer.secho(f"[{time.monotonic() - start:6.0f} s] {line}", fg=color, err=True)

    return tell


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM, with which a CI system cancels a job, is what Ctrl-C is."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _errors_in_words() -> Iterator[None]:
    """Say what went wrong in one line for each problem, and end with its exit code; never with a traceback."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ConfigurationError as error:
        _end(WRONG, *error.problems)
    except Conflict as error:
        _end(CONFLICT, str(error))
    except Failed as error:
        _end(INTERRUPTED if error.interrupted else FAILED, str(error))
    except (NoEndpoint, reading.NoLog, asking.StreamBroken, UploadFailed) as error:
        _end(FAILED, str(error))
    except (BotoCoreError, Boto3Error, ClientError) as error:
        _end(FAILED, error_in_words(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _end(code: int, *problems: str) -> NoReturn:
    for problem in problems:
        typer.echo(f"slipway: {problem}", err=True)
    sys.exit(code)
