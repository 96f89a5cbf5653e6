"""The settings of all services: environment variables and command-line options of one name.

    config.py       the settings of each service, and how they are read
    base.py         what all services have; common.py: fields that several have; keys.py: API keys
    names.py        refuses unknown and misspelt names
    texts.py        a setting's description, for help, `.env.example` and docs
    types.py        types of values

Entry point: `load_settings` (config.py).

May import: `base`. Never torch.
"""
