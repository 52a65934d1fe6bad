"""The declaration and parsing of settings, and the settings of an engine."""
