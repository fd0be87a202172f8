"""Attention: one problem, one planner, one wrapper; rooms differ by tile and chip."""
