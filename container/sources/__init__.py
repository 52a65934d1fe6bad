"""Where models come from when they are not on this machine: S3, and archives."""
