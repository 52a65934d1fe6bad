"""Engines, one file each, behind one protocol."""
