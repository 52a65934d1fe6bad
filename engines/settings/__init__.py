"""How a setting is declared and parsed, and the settings of an engine."""
