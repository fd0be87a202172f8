"""python -m examples.serve: Ctrl-C ends it in one line, while it imports too."""

import sys

try:
    from .demo import main

    status = main()
except KeyboardInterrupt:
    print("\nInterrupted", file=sys.stderr)
    status = 130
sys.exit(status)
