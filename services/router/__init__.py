"""The router."""
