"""Device code of matrix products."""
