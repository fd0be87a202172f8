"""Device code that more than one attention kernel uses."""
