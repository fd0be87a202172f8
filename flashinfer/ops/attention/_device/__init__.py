"""Device pieces that more than one attention kernel uses."""
