"""Model families: source, configuration, weights, layers.

Importing this package, `source` or `config` never imports torch; `loader` and the layers do.
"""
