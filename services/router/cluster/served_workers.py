"""Decides which workers serve the router's model, where workers with several models are alive."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pagewire.services.router.cluster.worker_links import WorkerLinks
from pagewire.shared.base.logs import Complaints
from pagewire.shared.cluster.worker_directory import WorkerDirectory
from pagewire.shared.cluster.worker_record import WorkerRecord
from pagewire.shared.kv.model_identity import ModelIdentity, first_difference

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ServedWorkers:
    """The workers that may get requests: reachable, ready, and all with one model.

    Args:
        directory: has all workers' records.
        config_digest: of the router's own config.json. A worker with another one never gets
            requests: its weights do not belong to this tokenizer, or compute something else.
    """

    directory: WorkerDirectory
    decode_links: WorkerLinks
    prefill_links: WorkerLinks
    config_digest: str
    _complaints: Complaints = field(default_factory=lambda: Complaints(logger))

    def decodes(self) -> list[WorkerRecord]:
        """Return the records of the decode workers that take requests and can be reached."""
        ready = self._ready(self.decode_links)
        return self._with_model(self._choose(ready), ready)

    def prefills(self) -> list[WorkerRecord]:
        """Return the records of the reachable prefill workers with the decode workers' model."""
        ready = self._ready(self.prefill_links)
        return self._with_model(self._choose(self.decodes() or ready), ready)

    def _ready(self, links: WorkerLinks) -> list[WorkerRecord]:
        known = (self.directory.get(link.worker_id) for link in links)
        return [record for record in known if record is not None and record.state == "ready"]

    def _has_config(self, record: WorkerRecord) -> bool:
        return record.config_digest in ("", self.config_digest)

    def _choose(self, records: Iterable[WorkerRecord]) -> ModelIdentity | None:
        identities = {each.model_identity for each in records if self._has_config(each)}
        if len(identities) < 2:  # nearly always, and this runs for each request
            return next(iter(identities), None)
        return most_common_model(identities, self.directory.workers())

    def _with_model(
        self, identity: ModelIdentity | None, records: Collection[WorkerRecord]
    ) -> list[WorkerRecord]:
        """Return the records with a model, and log why the other workers get no requests."""
        own = [record for record in records if self._has_config(record)]
        chosen = [record for record in own if record.model_identity == identity]
        if len(chosen) < len(records):
            for record in records:
                self._complain(record, identity)
        return chosen

    def _complain(self, record: WorkerRecord, identity: ModelIdentity | None) -> None:
        why: str | None = "its model's config.json is not that of this router's --model"
        if identity is not None and self._has_config(record):
            why = first_difference(record.model_identity, identity, "it", "the served model")
        if why is not None:
            text = f"{record.worker_id} gets no requests: {why}"
            self._complaints.say(record.worker_id, record.epoch, text)


def most_common_model(
    identities: Iterable[ModelIdentity], records: Collection[WorkerRecord]
) -> ModelIdentity:
    """Return the model that most decode workers have; of several, that of most prefill workers.

    If as many have several models, it is that of the worker that started first. The records alone
    decide, so all routers choose alike, and so does one that restarts.

    Args:
        identities: at least one.
        records: of all live workers; those that drain do not count.
    """
    ready = [record for record in records if record.state == "ready"]

    def rank(identity: ModelIdentity) -> tuple[int, int, list[tuple[int, str]]]:
        same = [record for record in ready if record.model_identity == identity]
        roles = Counter(record.role for record in same)
        starts = sorted((record.epoch, record.worker_id) for record in same)
        return -roles["decode"], -roles["prefill"], starts

    return min(identities, key=rank)
