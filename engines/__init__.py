"""The engines: one package for each runtime, all behind one protocol."""
