"""Where models come from: a directory of this machine, S3, or the sample model."""
