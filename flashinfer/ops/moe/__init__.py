"""Mixtures of experts: tokens find their experts, the experts' products, and their weighted sums."""
