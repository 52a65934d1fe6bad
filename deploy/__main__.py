"""`python -m deploy`: the same as `slipway`."""

from deploy.cli import main

if __name__ == "__main__":
    main()
