"""What a client may ask for, whichever API it uses, as workers get it.

    sampling.py             a request's parameters: defaults, ranges, seeds of its n answers
    sampling_types.py       the parameters' types and bounds
    logprobs.py             log probabilities of tokens
    structured_outputs.py   what an answer must be: a JSON schema, a grammar, a choice

Read first: `sampling.py` (`SamplingParams` becomes a `RequestSpec`).

May import: `base`. Never torch.
"""
