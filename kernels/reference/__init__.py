"""Plain torch references of every kernel: the CPU path and the tests' truth."""
