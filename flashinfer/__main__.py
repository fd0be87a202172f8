"""`python -m flashinfer`: the same commands as the `flashinfer` script."""

import sys

from flashinfer.cli import main

sys.exit(main())
