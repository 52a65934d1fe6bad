"""Deploys a model to Amazon SageMaker: one CloudFormation stack, and commands for it."""
