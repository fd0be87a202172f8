"""Few rows of parameters in which every two values of any two parameters stand together (all-pairs testing)."""

from itertools import combinations, product


def pairs(*values, where=lambda *row: True):
    """Of the product of `values`, in its order: each row adds most pairs to those before it. Only rows `where` says."""
    named = lambda row: tuple(its[place] for its, place in zip(values, row))
    rows = filter(lambda row: where(*named(row)), product(*(range(len(its)) for its in values)))
    shows = {row: frozenset(combinations(enumerate(row), 2)) for row in rows}
    left, taken = frozenset().union(*shows.values()), []
    while left:
        taken.append(max(shows, key=lambda row: len(shows[row] & left)))
        left -= shows.pop(taken[-1])
    return [named(row) for row in sorted(taken)]
