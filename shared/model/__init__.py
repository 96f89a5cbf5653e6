"""Models: source, configuration, weights, families, layers, and a model's own sampling defaults.

Read first: `source.py` (where a model comes from), `config.py` (reads config.json), `families/`
(which architectures there are, and how each is composed), `layers/`, `loader.py` (weights).
`generation.py` reads the sampling defaults of `generation_config.json`; `SamplingParams.resolve`
in shared/request/sampling.py applies them.

Importing this package, `source`, `config` or `families` never imports torch; `loader`, `rope` and
`layers` do.
"""
