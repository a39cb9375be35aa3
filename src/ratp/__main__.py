"""``python -m ratp``."""

from ratp.cli.main import main

main()
