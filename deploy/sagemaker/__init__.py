"""From a model to an endpoint on Amazon SageMaker: one CloudFormation stack, and commands that drive it."""
