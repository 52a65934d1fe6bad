"""From a model to an endpoint on Amazon SageMaker: a pure plan of API calls, and what executes it."""
