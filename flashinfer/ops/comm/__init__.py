"""Collectives between the ranks of a process group: peer memory, flags and deadlines, and the rooms that use them."""
