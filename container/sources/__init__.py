"""The sources of models: a directory of this machine, S3, or the sample model."""
