"""`slipway deploy | update | destroy | status | template | invoke | logs | policy`.

Exit codes: 0, it is done; 1, it failed; 2, the configuration is wrong; 3, what is there stands in the way; 130,
interrupted.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Optional

import typer

from deploy.sagemaker import configuration as fields
from deploy.sagemaker import invoke as asking
from deploy.sagemaker import logs as reading
from deploy.sagemaker import options as given
from deploy.sagemaker import status as looking
from deploy.sagemaker.aws import Aws, NoRegion, error_in_words, is_missing
from deploy.sagemaker.configuration import (
    Configuration,
    ConfigurationError,
    laid_over,
    read_configuration,
    read_file,
)
from deploy.sagemaker.roles import caller_policy, check_role, push_policy
from deploy.sagemaker.stack import ENDPOINT_TAG, ChangeSet, Conflict, Failed, Stack, Wanted
from deploy.sagemaker.template import as_yaml, parameter_values
from deploy.sagemaker.template import template as template_of
from deploy.sagemaker.uploads import UploadFailed, push_script, upload_model
from deploy.sagemaker.uploads import push as push_image

if TYPE_CHECKING:
    from rich.console import Console

FAILED, WRONG, IN_THE_WAY, INTERRUPTED = 1, 2, 3, 130
_LOG_LINES = 20

Endpoint = Annotated[str, typer.Argument(help="Name of the endpoint.")]


def register(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    for command in (deploy, update, destroy, status, invoke, logs, template, policy):
        app.command()(_errors_in_words()(command))


def deploy(
    context: typer.Context,
    file: given.File = None,
    name: given.Name = None,
    model: given.Model = None,
    upload: given.Upload = None,
    image: given.Image = None,
    push: given.Push = None,
    role: given.Role = None,
    create_role: given.CreateRole = False,
    instance_type: given.InstanceType = None,
    instances: given.Instances = None,
    env: given.Env = None,
    tag: given.Tag = None,
    account: given.Account = None,
    setting: given.Setting = None,
    region: given.Region = None,
    profile: given.Profile = None,
    dry_run: given.DryRun = False,
    rollback: Annotated[bool, typer.Option(help="Remove what was made if anything fails.")] = True,
    check: Annotated[bool, typer.Option(help="Check the execution role first.")] = True,
) -> None:
    """Deploy a model to a SageMaker endpoint, with one CloudFormation stack."""
    deployment = _prepared(context.params)
    if dry_run:
        _show(deployment)
        return
    if check:
        _check_role(deployment)
    with _termination_interrupts():
        _deploy(deployment, rollback=rollback)
    typer.echo(f"{deployment.name} is in service")
    component = f" --component {deployment.name}" if deployment.configuration.component else ""
    typer.echo(f'try: slipway invoke {deployment.name}{component} --prompt "Hello"', err=True)


def update(
    context: typer.Context,
    file: given.File = None,
    name: given.Name = None,
    model: given.Model = None,
    upload: given.Upload = None,
    image: given.Image = None,
    push: given.Push = None,
    role: given.Role = None,
    create_role: given.CreateRole = False,
    instance_type: given.InstanceType = None,
    instances: given.Instances = None,
    env: given.Env = None,
    tag: given.Tag = None,
    account: given.Account = None,
    setting: given.Setting = None,
    region: given.Region = None,
    profile: given.Profile = None,
    dry_run: given.DryRun = False,
) -> None:
    """Bring a deployment to another configuration while it serves."""
    deployment = _prepared(context.params)
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
            f"slipway: note: {' and '.join(sent)} has been sent again, and what runs stays as it is: give the "
            "image another tag, or the model another prefix, to have it rolled out",
            err=True,
        )


def template(
    context: typer.Context,
    file: given.File = None,
    name: given.Name = None,
    model: given.Model = None,
    image: given.Image = None,
    role: given.Role = None,
    create_role: given.CreateRole = False,
    instance_type: given.InstanceType = None,
    instances: given.Instances = None,
    env: given.Env = None,
    tag: given.Tag = None,
    account: given.Account = None,
    setting: given.Setting = None,
    region: given.Region = None,
) -> None:
    """Print the CloudFormation template that `deploy` makes."""
    typer.echo(as_yaml(dict(_prepared(context.params).wanted.template)), nl=False)


def destroy(
    name: Endpoint,
    region: given.Region = None,
    profile: given.Profile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
    repository: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--repository", help="Also this image repository, with its images, if it carries the tag."),
    ] = None,
) -> None:
    """Remove an endpoint and all that belongs to it: delete its stack."""
    aws = Aws(region, profile)
    removed = _removed(aws, name, dry_run=dry_run)
    for resource in removed:
        typer.echo(f"{'would remove' if dry_run else 'removed'}: {resource}")
    if repository and _repository_removed(aws, name, repository, dry_run=dry_run):
        removed.append(repository)
        typer.echo(f"{'would remove' if dry_run else 'removed'}: image repository {repository}")
    if not removed:
        typer.echo(f"there is nothing of {name}")


def status(
    name: Endpoint,
    region: given.Region = None,
    profile: given.Profile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show an endpoint's stack, variants, components, scaling and alarms."""
    aws = Aws(region, profile)
    of_stack = None
    with contextlib.suppress(Conflict):  # an endpoint that something else has made is shown as well
        of_stack = _stack(aws, name).status()
    found = looking.status(aws, name, of_stack)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _console().print(looking.table(found))


def invoke(
    name: Endpoint,
    prompt: Annotated[str, typer.Option("--prompt", help="The prompt.")] = "",
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in a chat's form.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 256,
    component: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--component", help="Inference component: the model's is named like the endpoint."),
    ] = None,
    body: Annotated[Optional[str], typer.Option("--body", help="The request's JSON, instead of a prompt.")] = None,  # noqa: UP045
    input_location: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--input-location", help="s3:// request of an asynchronous endpoint; prints where the answer is."),
    ] = None,
    region: given.Region = None,
    profile: given.Profile = None,
) -> None:
    """Ask an endpoint; AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME names another than AWS's."""
    if not (prompt or body or input_location):
        raise given.WrongOption("--prompt: missing; expected a text (or --body, or --input-location)")
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
    name: Endpoint,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
    since: Annotated[int, typer.Option("--since", min=1, help="Minutes back.")] = 60,
    component: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--component", help="Inference component: the model's is named like the endpoint."),
    ] = None,
    region: given.Region = None,
    profile: given.Profile = None,
) -> None:
    """Show what the containers of an endpoint log."""
    client = Aws(region, profile).client("logs")
    group = reading.group_of_component(component) if component else reading.group_of_endpoint(name)
    start = int((time.time() - since * 60) * 1000)
    for line in (reading.follow if follow else reading.read)(client, group, start):
        typer.echo(str(line))


def policy(
    account: Annotated[str, typer.Option("--account", help="Twelve digits.")],
    role: Annotated[str, typer.Option("--role", help="ARN of the execution role.")],
    region: Annotated[str, typer.Option("--region")],
    repository: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--repository", help="Also what `deploy --push` needs, for this image repository."),
    ] = None,
) -> None:
    """Print the IAM policy that someone needs who deploys, looks, asks and removes."""
    fields.check_fields(
        account=(fields.Account, account),
        region=(fields.Region, region),
        role=(fields.Roles, role),
        repository=(fields.Repository, repository),
    )
    document = caller_policy(role, region, account)
    if repository:
        document["Statement"] += push_policy(role, region, account, repository)["Statement"]
    typer.echo(json.dumps(document, indent=2))


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


def _prepared(options: dict[str, Any]) -> _Deployment:
    """What the options and the file say; AWS is asked for the account alone, where a push needs it."""

    overrides = given.overrides(options)
    file: Path | None = options["file"]
    values = laid_over(read_file(file) if file else {}, overrides.values)
    region = values.get("region")
    aws = Aws(region if isinstance(region, str) else None, options.get("profile"))
    values.setdefault("region", aws.region)
    if values.get("push") and not values.get("account") and not values.get("role") and aws.has_credentials:
        values["account"] = str(aws.client("sts").get_caller_identity()["Account"])
    configuration = read_configuration(values, overrides.origins)
    tags = {**configuration.tags, ENDPOINT_TAG: configuration.name}
    wanted = Wanted(template_of(configuration), parameter_values(configuration), tags)
    return _Deployment(aws, configuration, _stack(aws, configuration.name), wanted)


def _stack(aws: Aws, name: str) -> Stack:

    return Stack(aws.client("cloudformation"), name, _teller())


def _show(deployment: _Deployment) -> None:
    """The template and the commands of a push; and with credentials, what CloudFormation would change."""
    from botocore.exceptions import BotoCoreError

    configuration, stack = deployment.configuration, deployment.stack
    typer.echo(as_yaml(dict(deployment.wanted.template)), nl=False)
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
    except Conflict as error:
        typer.echo(f"slipway: note: no change set: {error}", err=True)
        return
    except BotoCoreError as error:
        typer.echo(f"slipway: note: no change set: {error_in_words(error)}", err=True)
        return
    _show_changes(change)
    if change:
        stack.discard(change)


def _show_changes(change: ChangeSet | None) -> None:
    from rich.table import Table

    if change is None:
        typer.echo("nothing would change", err=True)
        return
    table = Table("", "Resource", "Type", "Replaced", title="A new stack" if change.creates else "Changes")
    for each in change.changes:
        table.add_row(each.action, each.resource, each.kind, each.replacement)
    _console(stderr=True).print(table)


def _check_role(deployment: _Deployment) -> None:

    aws = deployment.aws
    findings = tuple(check_role(aws.client("iam"), aws.client("sts"), deployment.configuration))
    for finding in findings:
        typer.echo(f"slipway: {'' if finding.problem else 'note: '}{finding.text}", err=True)
    if any(finding.problem for finding in findings):
        sys.exit(WRONG)


def _deploy(deployment: _Deployment, *, rollback: bool) -> None:

    stack = deployment.stack
    new = stack.ready_to_create()
    change = stack.propose(deployment.wanted, rollback=rollback)
    if change and not new:
        stack.discard(change)
        differing = ", ".join(each.resource for each in change.changes) or "its tags"
        raise Conflict(f"{deployment.name} is there and differs in {differing}; `slipway update` changes it")
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
                typer.echo(f"left: {problem}", err=True)
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
            component = deployment.configuration.component is not None
            group = reading.group_of_component(name) if component else reading.group_of_endpoint(name)
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
        raise Conflict(f"the endpoint {name} is there, and no stack of Slipway has made it: kept")
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
        raise Conflict(f"not of this deployment, kept: image repository {repository}")
    if not dry_run:
        ecr.delete_repository(repositoryName=repository, force=True)
    return True


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 400  # what reads it is a program, for which nothing is to be cut
    return console


def _teller() -> Callable[[str], None]:
    """Writes lines to standard error, with the seconds since the start; what failed is red on a terminal."""
    start, console = time.monotonic(), _console(stderr=True)

    def tell(line: str) -> None:
        style = "red" if "_FAILED" in line else None
        console.print(f"[{time.monotonic() - start:6.0f} s] {line}", style=style, soft_wrap=True)

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
    except (given.WrongOption, NoRegion) as error:
        _end(WRONG, str(error))
    except Conflict as error:
        _end(IN_THE_WAY, str(error))
    except Failed as error:
        _end(INTERRUPTED if error.interrupted else FAILED, str(error))
    except (looking.NoEndpoint, reading.NoLog, asking.StreamBroken, UploadFailed) as error:
        _end(FAILED, str(error))
    except (BotoCoreError, Boto3Error, ClientError) as error:
        _end(FAILED, error_in_words(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _end(code: int, *problems: str) -> NoReturn:
    for problem in problems:
        typer.echo(f"slipway: {problem}", err=True)
    sys.exit(code)
