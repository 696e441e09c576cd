"""`python -m cauce` is the command `cauce`."""

from cauce.cli.main import main

main()
