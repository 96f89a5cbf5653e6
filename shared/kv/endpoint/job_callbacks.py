"""The callbacks by which a KV receiver reports on prefill jobs.

`RemoteJobs` in the decode service implements them.
"""

from __future__ import annotations

from pagewire.shared.kv.endpoint.expectations import Expected
from pagewire.shared.kv.endpoint.receiver_link import ReceiverLink
from pagewire.shared.kv.job_messages import JobReport


class JobCallbacks:
    """The owner of the jobs overrides these; all are called in the engine's thread.

    What one raises fails all requests of the step that is launched then.
    """

    def on_reserved(self, expected: Expected) -> None:
        """Ask a prefill worker for a sequence's blocks; a plan is on its way to the device."""

    def on_withdrawn(self, request_id: str) -> None:
        """Drop a request's job: its blocks belong to others from now on."""

    def on_activated(self, expected: Expected) -> None:
        """Note that a sequence runs on with the blocks of this job."""

    def on_message(self, link: ReceiverLink, message: JobReport) -> None:
        """Take what a prefill worker reports."""

    def on_link_closed(self, link: ReceiverLink) -> None:
        """Give a link's jobs to others."""

    def check_deadlines(self) -> None:
        """Give jobs to others that show no sign of life; called several times a second."""
