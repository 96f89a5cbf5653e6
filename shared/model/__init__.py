"""Model families: configuration, weights, layers."""
