"""From a model to an endpoint: deploy to SageMaker, and SageMaker's runtime API on a laptop."""
