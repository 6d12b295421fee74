"""TTrace in tests: a training function on several ranks is equivalent to the same on one, or the finding is printed."""

from ttrace.testing.equivalent import assert_equivalent

__all__ = ["assert_equivalent"]
