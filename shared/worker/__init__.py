"""What prefill and decode services have in common: an engine with a network around it."""
