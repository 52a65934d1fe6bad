"""Engines, a package for each runtime, behind one protocol."""
