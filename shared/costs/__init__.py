"""What a worker's work takes: how long its next steps will last, and how long KV takes to arrive.

    step_work.py    what a step computes, in numbers
    step_prices.py  `StepPrices`: predicts the seconds of a step, and of a prompt; in worker records
    step_costs.py   `StepCosts`: learns them from the steps of one engine
    first_steps.py  the steps that it learns from before there is work
    load.py         `Load`: how busy a worker is, as workers report it and routers add it up
    link_speed.py   `LinkSpeed`: learns latency and bandwidth of a KV link from what it carries

Read first: `step_prices.py`. Everything here is pure: the callers measure, nothing reads a clock.

May import: nothing of ours. Never torch.
"""
