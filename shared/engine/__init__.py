"""The engine: scheduler, batches, model runner, step loop."""
