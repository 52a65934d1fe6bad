"""`python -m slipway`: the same as `slipway`."""

from slipway.cli import main

if __name__ == "__main__":
    main()
