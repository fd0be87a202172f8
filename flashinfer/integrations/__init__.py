"""This library inside other projects: the only modules that import them."""
