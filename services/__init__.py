"""The services: router, prefill, decode, command line."""
