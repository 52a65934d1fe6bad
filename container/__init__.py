"""The process: settings, life cycle, HTTP, metrics, the command line."""
