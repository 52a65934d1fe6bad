"""Deploys a model to Amazon SageMaker, as one CloudFormation stack, and provides the commands for it."""
