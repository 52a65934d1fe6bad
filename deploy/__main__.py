"""`python -m deploy`: the command line."""

from deploy.cli import main

main()
