"""A kernel module whose import takes its process down, as a compiler that crashes does."""

import os

os._exit(7)
