"""Spans of prefill jobs end even if their worker stops before they do."""

from __future__ import annotations

from unittest.mock import Mock

from pagewire.shared.base.tracing import Tracing
from pagewire.shared.request.sampling import RequestSpec
from pagewire.shared.transfer.endpoint.sender import KvSender
from pagewire.shared.transfer.endpoint.sender_link import SenderLink
from pagewire.shared.transfer.job_messages import Prefill
from pagewire.shared.worker.engine_handle import EngineHandle
from pagewire.shared.worker.prefill_jobs import PrefillJobs
from pagewire.tests.support.fake_engine import make_core

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_spans_of_unfinished_jobs_end_with_their_worker() -> None:
    core, _device = make_core(block_size=4)
    engine = Mock(EngineHandle, core=core, vocab_size=50, eos_token_ids=())
    tracing = Mock(Tracing)
    jobs = PrefillJobs(engine, Mock(KvSender), lambda: False, Mock(), tracing)
    spec = RequestSpec(max_tokens=4)
    message = Prefill(
        job_id="a", token_ids=[1, 2, 3], num_prompt_tokens=3, spec=spec, first_block=0, trace=TRACE
    )
    jobs.on_request(Mock(SenderLink, peer="decode-0"), message)
    assert jobs.link_of("a") is not None
    jobs.end_all("the worker has stopped")
    assert jobs.link_of("a") is None
    [ended] = tracing.start.return_value.end.call_args_list
    assert ended.args[1] == "the worker has stopped"
