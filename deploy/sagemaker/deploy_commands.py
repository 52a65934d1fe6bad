"""`slipway deploy | update | template`: the commands that make something of a configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.sagemaker import options as given
from deploy.sagemaker.command_run import WRONG, cloud_of, reported_errors, surroundings, termination_interrupts

if TYPE_CHECKING:
    from deploy.sagemaker.api_call import ApiCall
    from deploy.sagemaker.aws import AwsCloud
    from deploy.sagemaker.executor import Hook
    from deploy.sagemaker.preparation import Prepared


def deploy(
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
    push: given.Push = None,
    account: given.Account = None,
    setting: given.Setting = None,
    region: given.Region = None,
    profile: given.Profile = None,
    dry_run: given.DryRun = False,
    rollback: Annotated[bool, typer.Option(help="Remove what was made if anything fails.")] = True,
    check: Annotated[bool, typer.Option(help="Check the execution role first.")] = True,
) -> None:
    """Deploy a model to a SageMaker endpoint; run again, it goes on where it was interrupted."""
    plain: given.Plain = {"name": name, "model": model, "image": image, "role": role, "create_role": create_role}
    plain |= {
        "instance_type": instance_type,
        "instances": instances,
        "push": push,
        "account": account,
        "region": region,
    }
    with reported_errors():
        cloud, prepared = _prepared(file, given.overrides(plain, env, tag, setting), profile, ask=not dry_run)
        if dry_run:
            _show(prepared, prepared.plan.calls)
            return
        _deploy(cloud, prepared, rollback=rollback, check=check)


def update(
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
    push: given.Push = None,
    account: given.Account = None,
    setting: given.Setting = None,
    region: given.Region = None,
    profile: given.Profile = None,
    dry_run: given.DryRun = False,
) -> None:
    """Bring a deployment to another configuration while it serves."""
    plain: given.Plain = {"name": name, "model": model, "image": image, "role": role, "create_role": create_role}
    plain |= {
        "instance_type": instance_type,
        "instances": instances,
        "push": push,
        "account": account,
        "region": region,
    }
    with reported_errors():
        from deploy.sagemaker.update import update_calls

        cloud, prepared = _prepared(file, given.overrides(plain, env, tag, setting), profile, ask=not dry_run)
        if dry_run:
            _show(prepared, update_calls(prepared.plan, prepared.configuration))
            return
        _update(cloud, prepared)


def template(
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
    """Print the same deployment as a CloudFormation template."""
    plain: given.Plain = {"name": name, "model": model, "image": image, "role": role, "create_role": create_role}
    plain |= {"instance_type": instance_type, "instances": instances, "account": account, "region": region}
    with reported_errors():
        from deploy.sagemaker.template import template_yaml

        _, prepared = _prepared(file, given.overrides(plain, env, tag, setting), None, ask=False)
        typer.echo(template_yaml(prepared.plan, prepared.configuration), nl=False)


def _show(prepared: Prepared, calls: tuple[ApiCall, ...]) -> None:
    from deploy.sagemaker.images import push_script

    typer.echo(json.dumps([call.shown() for call in calls], indent=2))
    if prepared.configuration.push:
        typer.echo(push_script(prepared.configuration), err=True)


def _deploy(cloud: AwsCloud, prepared: Prepared, *, rollback: bool, check: bool) -> None:
    from deploy.sagemaker.executor import Executor
    from deploy.sagemaker.role import check_role

    around, configuration = surroundings(cloud), prepared.configuration
    findings = check_role(cloud, configuration) if check else ()
    for finding in findings:
        typer.echo(f"slipway: {'' if finding.problem else 'note: '}{finding.text}", err=True)
    if any(finding.problem for finding in findings):
        sys.exit(WRONG)
    with termination_interrupts():
        Executor(around, rollback=rollback, hooks=_hooks(cloud, prepared)).deploy(prepared.plan)
    typer.echo(f"{prepared.plan.name} is in service")
    component = f" --component {prepared.plan.name}" if configuration.component else ""
    typer.echo(f'try: slipway invoke {prepared.plan.name}{component} --prompt "Hello"', err=True)


def _update(cloud: AwsCloud, prepared: Prepared) -> None:
    from deploy.sagemaker.resource import MODEL
    from deploy.sagemaker.update import update as bring

    plan, configuration = prepared.plan, prepared.configuration
    with termination_interrupts():
        done = bring(surroundings(cloud), plan, configuration, _hooks(cloud, prepared))
    typer.echo(f"{plan.name} is up to date" if not done.changed else f"{plan.name} is updated")
    if configuration.push and not any(model.key in done.changed for model in plan.of(MODEL)):
        typer.echo(
            f"slipway: note: {configuration.image} has been pushed again, and what runs stays as it is: push an image "
            "with another tag to have it rolled out",
            err=True,
        )
    for key in done.left:
        typer.echo(f"left: {key}", err=True)


def _hooks(cloud: AwsCloud, prepared: Prepared) -> dict[str, Hook]:
    from deploy.sagemaker.resource import REPOSITORY

    return {resource.key: lambda: _push(cloud, prepared) for resource in prepared.plan.of(REPOSITORY)}


def _push(cloud: AwsCloud, prepared: Prepared) -> None:
    import base64

    from deploy.sagemaker.api_call import ApiCall
    from deploy.sagemaker.images import push

    answer = cloud.call(ApiCall("ecr", "get_authorization_token"))
    token = base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode()
    push(prepared.configuration, token.partition(":")[2])


def _prepared(
    file: Path | None, overrides: given.Overrides, profile: str | None, *, ask: bool
) -> tuple[AwsCloud, Prepared]:
    """The connection to AWS, and what is to be done there; only with `ask` is AWS asked for what nothing else says."""
    from deploy.sagemaker.preparation import prepare

    cloud = cloud_of(overrides.values.get("region"), profile, file)
    return cloud, prepare(file, overrides, cloud.region, cloud if ask else None)
