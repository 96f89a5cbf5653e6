"""Tensor parallelism: several processes compute a model's steps together, a rank each.

    scheduler, core ---StepPlan, GrammarMasks (about 85 bytes)---> rank 1, rank 2, ...
          |                                                    |
        rank 0 <---------- sums and logits, each step ---------+

The process of the scheduler is rank 0, so that with one rank nothing is sent, and with several no
result is: all ranks compute the same logits and sample the same tokens, because sampling depends
only on seed and position. Rank 0's are the result, without a hop to another process and back.

    messages.py           what passes between rank 0 and another rank, and how it is encoded
    group.py              starts the other ranks, waits for them, says why one is lost, ends them
    communicator.py       sums and logits among ranks on CPUs; all ranks meet over its sockets
    cuda_communicator.py  those among ranks on GPUs
    gpu_communicator.py   those of a rank on a GPU, which is alone while it loads
    executor.py           the executor over all ranks, and the comparison of what they sample
    moves.py              moves of KV blocks, of which each rank moves its part
    shared_staging.py     the memory from and to which all ranks move them

`shared/engine/rank_process.py` is the program of the other ranks.

All ranks fail together: if one is lost or fails, the engine ends with a `RankError` that names it,
and all start again.

May import: `kernels`, `shared.model`, `shared.kv`, `shared.engine.scheduling`,
`shared.engine.execution`, `base`, `settings`.
"""
