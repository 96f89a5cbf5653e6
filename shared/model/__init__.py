"""Model families: source, configuration, weights, layers, and a model's own sampling defaults.

Read first: `source.py` (where a model comes from), `config.py`, `loader.py` (weights),
`generation.py` (the defaults of `generation_config.json`; in shared/sampling.py
`SamplingParams.resolve` applies them, for `max_tokens` `SamplingDefaults.answer_length`).

Importing this package, `source` or `config` never imports torch; `loader` and the layers do.
"""
