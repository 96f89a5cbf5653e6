"""The layers of which families compose models, for inference only.

They are plain objects around tensors: without `nn.Module`'s hooks, a call takes less CPU time. A
layer allocates its parameters uninitialised and names the checkpoint's tensors that fill them.

Read first: `factory.py` (how a family makes layers), `decoder.py` (decoder layers and the model),
`linear.py` (projections and the methods that store and multiply their weights), `methods.py` (which
method a projection gets).

May import: torch, `kernels`, and the modules of `shared.model` except families and loader.
"""
