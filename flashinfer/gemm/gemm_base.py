"""The path by which engines reach the size of the workspace that they allocate for upstream's products."""

# Bytes, upstream's number. Products here need no workspace.
DEFAULT_WORKSPACE_SIZE = 40 * 1024 * 1024

__all__ = ["DEFAULT_WORKSPACE_SIZE"]
