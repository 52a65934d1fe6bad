"""Deploys the server: to SageMaker, to Ray, and to an endpoint on this machine that has SageMaker's runtime API."""
