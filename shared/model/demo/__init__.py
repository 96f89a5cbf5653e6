"""The demo model that the package carries."""
