"""`pagewire decode`."""

from __future__ import annotations

import typer

from pagewire.services.cli import options
from pagewire.services.cli.errors import needs_worker_extra, one_line_errors
from pagewire.shared.settings.config import WorkerSettings, load_settings


def decode(
    ctx: typer.Context,
    model: options.Model = None,
    revision: options.Revision = None,
    model_impl: options.ModelImpl = None,
    served_model_name: options.ServedModelName = None,
    worker_id: options.WorkerId = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    load_format: options.LoadFormat = None,
    kernels: options.Kernels = None,
    block_size: options.BlockSize = None,
    num_blocks: options.NumBlocks = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_waiting: options.MaxWaiting = None,
    local_prefill_tokens: options.LocalPrefillTokens = None,
    enable_prefix_caching: options.EnablePrefixCaching = None,
    cuda_graphs: options.CudaGraphs = None,
    batch_invariant: options.BatchInvariant = None,
    kv_transport: options.KvTransport = None,
    kv_network: options.KvNetwork = None,
    staging_slots: options.StagingSlots = None,
    staging_slot_bytes: options.StagingSlotBytes = None,
    host: options.Host = None,
    control_port: options.ControlPort = None,
    metrics_port: options.MetricsPort = None,
    redis_url: options.RedisUrl = None,
    drain_timeout_s: options.DrainTimeoutS = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
) -> None:
    """Run a decode worker: it streams answers.

    Without prefill workers it computes prompts, too.

    Example: pagewire decode --worker-id decode-0 --redis-url redis://127.0.0.1:6379/0
    """
    with one_line_errors():
        settings = load_settings(WorkerSettings, ctx.params)
        with needs_worker_extra():
            from pagewire.services.decode.main import run

        raise typer.Exit(run(settings))
