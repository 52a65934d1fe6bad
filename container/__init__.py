"""The server process: settings, sources and life cycle of models, HTTP, metrics, logs and the console."""
