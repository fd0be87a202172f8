"""Attention: one problem, one plan, one wrapper; rooms differ by tile and chip."""
