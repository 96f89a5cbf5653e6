"""The callbacks by which a KV receiver reports on prefill jobs.

`RemoteJobs` in the decode service implements them.
"""

from __future__ import annotations

from pagewire.shared.kv.endpoint.expectations import Expected
from pagewire.shared.kv.endpoint.receiver_link import ReceiverLink
from pagewire.shared.kv.job_messages import JobReport


class JobCallbacks:
    """The owner of the jobs overrides these; all are called in the engine's thread.

    An exception in one of them fails all requests of the step that is being launched.
    """

    def on_reserved(self, expected: Expected) -> None:
        """Send a job for a sequence's blocks to a prefill worker, while a plan is launched."""

    def on_withdrawn(self, expected: Expected) -> None:
        """Cancel a sequence's job: its blocks may belong to other sequences from now on."""

    def on_activated(self, expected: Expected) -> None:
        """Note that a sequence was activated with the blocks of this job."""

    def on_message(self, link: ReceiverLink, message: JobReport) -> None:
        """Handle a prefill worker's report about a job."""

    def on_link_closed(self, link: ReceiverLink) -> None:
        """Send the jobs of an ended link to other workers."""

    def check_deadlines(self) -> None:
        """Send silent jobs to other workers; called several times a second."""
