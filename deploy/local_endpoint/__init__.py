"""SageMaker's runtime API in front of a container on this machine, for unmodified clients."""
