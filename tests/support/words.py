"""Random words in Python's own integers: what every implementation must make."""

from __future__ import annotations

from ttrace.values.words import WordStream

NAME = "0/-/layers.3.mlp.fc1.weight/param"
OTHERS = ("0/-/layers.4.mlp.fc1.weight/param", "0/-/layers.3.mlp.fc2.weight/param", "1/-/layers.3.mlp.fc1.weight/param")
MASK = (1 << 64) - 1


def mixed(word: int) -> int:
    """Splitmix64 in Python's own integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def word(name: str, index: int, seed: int = 0) -> int:
    stream = WordStream.of(name, seed)
    return mixed((index * stream.step + stream.key) & MASK)
