"""`python -m fedstale`: the command line."""

from fedstale.cli.main import main

main()
