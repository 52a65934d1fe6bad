"""Deploys the server: to SageMaker, to Ray, and as a local endpoint with SageMaker's runtime API."""
