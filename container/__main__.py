"""`python -m container`: the same as `slipway`."""

from container.cli import main

if __name__ == "__main__":
    main()
