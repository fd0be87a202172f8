"""Copies of classes that are made of wrappers."""

from copy import copy

from flashinfer.ops.attention.wrapper import AttentionWrapper


class MadeOfWrappers:
    """A class whose attributes are wrappers, or lists of them: a copy has copies of those."""

    def __copy__(self):
        new = object.__new__(type(self))
        new.__dict__.update({name: _copied(value) for name, value in self.__dict__.items()})
        return new


def _copied(value):
    if isinstance(value, list):
        return [_copied(x) for x in value]
    return copy(value) if isinstance(value, AttentionWrapper) else value
