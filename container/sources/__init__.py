"""The sources of models: a directory on this machine, S3, or the sample model."""
