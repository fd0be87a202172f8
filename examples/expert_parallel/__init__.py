"""A mixture-of-experts layer whose experts are spread over ranks."""
