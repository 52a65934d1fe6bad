"""The models of a server: loaded, watched, scaled and unloaded."""
