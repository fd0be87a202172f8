"""Arguments of any kind as an op takes them: tensors, numbers, and the rest as one text."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from flashinfer._core.checks import require

# Between texts that an op takes as one, for a schema has no lists of texts. Not a new line: torch's compiler writes an
# op's arguments into comments of its code as they are, and what followed would be code.
SEPARATOR = ";"

# Other types whose values go as texts: {type: (its name there, the text of a value, the value of a text)}.
others: dict[type, tuple[str, Callable, Callable]] = {}


def joined(texts: Iterable[tuple[str, str]]) -> str:
    """The texts of (argument, text) as one; ValueError names the argument whose text would be read as several."""
    for argument, text in texts:
        plain = SEPARATOR not in text and text.isprintable()
        require(plain, argument, repr(text), f"a text of printable characters without {SEPARATOR!r}")
    return SEPARATOR.join([text for _, text in texts])


def packed(given: dict) -> tuple[list, list, list, str, str]:
    """Arguments as an op takes them: tensors, floats, ints, the names of these in this order, and the rest as text.

    Arguments that are None are left out; within a dict or a tuple, None is a value.
    """
    tensors, floats, ints, words = {}, {}, {}, []
    for name, value in _named(given).items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, (float, torch.SymFloat)):
            floats[name] = value
        elif isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            ints[name] = value
        else:
            words.append((name.rpartition(".")[2], f"{name}={_text(value)}"))
    names = " ".join([*tensors, *floats, *ints])
    return list(tensors.values()), list(floats.values()), list(ints.values()), names, joined(words)


def _named(given: dict, prefix: str = "") -> dict:
    """Entries of nested dicts and tuples by their names with dots between: "kv.0" is the first of a pair."""
    found = {}
    for name, value in given.items():
        if isinstance(value, (dict, tuple, list)):
            inner = value if isinstance(value, dict) else {str(i): x for i, x in enumerate(value)}
            found.update(_named(inner, f"{prefix}{name}."))
        elif value is not None or prefix:
            found[f"{prefix}{name}"] = value
    return found


def _text(value) -> str:
    if value is None:
        return "none:"
    if isinstance(value, bool):
        return f"bool:{int(value)}"
    if isinstance(value, torch.dtype):
        return f"dtype:{str(value).removeprefix('torch.')}"
    for kind, (name, text_of, _) in others.items():
        if isinstance(value, kind):
            return f"{name}:{text_of(value)}"
    return f"str:{value}"


_READ = {
    "none": lambda text: None, "bool": lambda text: text == "1", "dtype": lambda text: getattr(torch, text), "str": str,
}  # fmt: skip


def unpacked(tensors, floats, ints, names: str, words: str) -> dict:
    """What `packed` was given, but for arguments that were None."""
    given = dict(zip(names.split(), (*tensors, *floats, *ints), strict=True))
    read = _READ | {name: value_of for name, _, value_of in others.values()}
    for line in words.split(SEPARATOR) if words else ():
        name, _, text = line.partition("=")
        kind, _, text = text.partition(":")
        given[name] = read[kind](text)
    nested: dict = {}
    for name, value in given.items():
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return {name: _as_given(value) for name, value in nested.items()}


def _as_given(value):
    if not isinstance(value, dict):
        return value
    value = {name: _as_given(x) for name, x in sorted(value.items(), key=_place)}
    return tuple(value.values()) if all(map(str.isdigit, value)) else value


def _place(item: tuple) -> int:
    """Of an element of a tuple: those of one may be of several kinds."""
    return int(item[0]) if item[0].isdigit() else 0
