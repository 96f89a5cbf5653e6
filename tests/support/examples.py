"""How many examples Hypothesis tries of what takes microseconds."""

from hypothesis import settings

# Of readers of what others send. The profile's number is for tests that take longer.
MANY_EXAMPLES = settings(max_examples=5 * settings().max_examples)
