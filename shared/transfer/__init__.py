"""KV transports behind one interface."""
