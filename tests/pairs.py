"""Few rows of parameters in which every two values of any two parameters stand together (all-pairs testing)."""

from itertools import combinations, product


def pairs(*values):
    """Of the product of `values`, in its order: each row adds most pairs to those before it."""
    shows = {
        row: frozenset(combinations(enumerate(row), 2)) for row in product(*(range(len(its)) for its in values))
    }
    left, taken = frozenset().union(*shows.values()), []
    while left:
        taken.append(max(shows, key=lambda row: len(shows[row] & left)))
        left -= shows.pop(taken[-1])
    return [tuple(its[place] for its, place in zip(values, row)) for row in sorted(taken)]
