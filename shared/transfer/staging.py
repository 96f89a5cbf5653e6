"""Staging slots: the bounded memory that KV pieces are moved through."""
