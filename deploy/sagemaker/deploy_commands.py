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
    from deploy.sagemaker.aws import AwsCloud
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
    plain |= {"instance_type": instance_type, "instances": instances, "push": push, "account": account}
    with reported_errors():
        cloud = None if dry_run else cloud_of(region, profile, file)
        prepared = _prepared(file, given.overrides(plain, env, tag, setting), region, cloud)
        if cloud is None:
            _show(prepared)
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
    account: given.Account = None,
    setting: given.Setting = None,
    region: given.Region = None,
    profile: given.Profile = None,
    dry_run: given.DryRun = False,
) -> None:
    """Bring a deployment to another configuration while it serves."""
    plain: given.Plain = {"name": name, "model": model, "image": image, "role": role, "create_role": create_role}
    plain |= {"instance_type": instance_type, "instances": instances, "account": account}
    with reported_errors():
        from deploy.sagemaker import update as updating

        cloud = None if dry_run else cloud_of(region, profile, file)
        prepared = _prepared(file, given.overrides(plain, env, tag, setting), region, cloud)
        if cloud is None:
            calls = updating.update_calls(prepared.plan, prepared.configuration)
            typer.echo(json.dumps([call.shown() for call in calls], indent=2))
            return
        with termination_interrupts():
            done = updating.update(surroundings(cloud), prepared.plan, prepared.configuration)
        typer.echo(f"{prepared.plan.name} is up to date" if not done.changed else f"{prepared.plan.name} is updated")
        for key in done.left:
            typer.echo(f"left: {key}", err=True)


def template(
    file: given.File = None,
    name: given.Name = None,
    model: given.Model = None,
    image: given.Image = None,
    role: given.Role = None,
    create_role: given.CreateRole = False,
    instance_type: given.InstanceType = None,
    env: given.Env = None,
    tag: given.Tag = None,
    account: given.Account = None,
    setting: given.Setting = None,
    region: given.Region = None,
) -> None:
    """Print the same deployment as a CloudFormation template."""
    plain: given.Plain = {"name": name, "model": model, "image": image, "role": role, "create_role": create_role}
    plain |= {"instance_type": instance_type, "account": account}
    with reported_errors():
        from deploy.sagemaker.template import template_yaml

        prepared = _prepared(file, given.overrides(plain, env, tag, setting), region, None)
        typer.echo(template_yaml(prepared.plan, prepared.configuration), nl=False)


def _show(prepared: Prepared) -> None:
    from deploy.sagemaker.images import push_script

    typer.echo(prepared.plan.shown())
    if prepared.configuration.push:
        typer.echo(push_script(prepared.configuration), err=True)


def _deploy(cloud: AwsCloud, prepared: Prepared, *, rollback: bool, check: bool) -> None:
    from deploy.sagemaker.executor import Executor
    from deploy.sagemaker.resource import REPOSITORY
    from deploy.sagemaker.role import check_role

    around, configuration = surroundings(cloud), prepared.configuration
    findings = check_role(cloud, configuration) if check else ()
    for finding in findings:
        typer.echo(f"slipway: {'' if finding.problem else 'note: '}{finding.text}", err=True)
    if any(finding.problem for finding in findings):
        sys.exit(WRONG)
    hooks = {resource.key: lambda: _push(cloud, prepared) for resource in prepared.plan.of(REPOSITORY)}
    with termination_interrupts():
        Executor(around, rollback=rollback, hooks=hooks).deploy(prepared.plan)
    typer.echo(f"{prepared.plan.name} is in service")
    component = f" --component {prepared.plan.name}" if configuration.component else ""
    typer.echo(f'try: slipway invoke {prepared.plan.name}{component} --prompt "Hello"', err=True)


def _push(cloud: AwsCloud, prepared: Prepared) -> None:
    import base64

    from deploy.sagemaker.api_call import ApiCall
    from deploy.sagemaker.images import push

    answer = cloud.call(ApiCall("ecr", "get_authorization_token"))
    token = base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode()
    push(prepared.configuration, token.partition(":")[2])


def _prepared(file: Path | None, overrides: given.Overrides, region: str | None, cloud: AwsCloud | None) -> Prepared:
    from deploy.sagemaker.preparation import prepare

    return prepare(file, overrides, region or (cloud.region if cloud else None), cloud)
