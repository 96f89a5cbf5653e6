"""Models: source, configuration, weights, families, layers, and a model's own sampling defaults.

Read first: `source.py` (where a model comes from), `config.py`, `families/` (which architectures
there are, and how each is composed), `loader.py` (weights), `generation.py` (the defaults of
`generation_config.json`; in shared/sampling.py `SamplingParams.resolve` applies them, for
`max_tokens` `SamplingDefaults.answer_length`).

Importing this package, `source`, `config` or `families` never imports torch; `loader`, `rope` and
`layers` do.
"""
