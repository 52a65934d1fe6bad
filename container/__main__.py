"""`python -m container`: the same as `slipway`."""

from container.cli import app

if __name__ == "__main__":
    app()
