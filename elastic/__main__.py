"""``python -m elastic`` is the command ``elastic``."""

from elastic.cli import main

main()
