"""A process that reads large bodies, where that cannot stall the router's event loop.

    python -P -m pagewire.services.router.http.body_processes.body_process FILE_DESCRIPTOR

It serves one socket, the router's, and ends when the router closes it or dies. A bug also ends it,
with a traceback on stderr; so does a body that takes too much memory, or brings a chat template
that takes too much CPU time.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from pagewire.services.router.http.api.anthropic.inputs import read_message, read_message_count
from pagewire.services.router.http.api.openai.embeddings import read_embedding
from pagewire.services.router.http.api.openai.generation import (
    GenerationInput,
    InputReader,
    read_chat,
    read_completion,
)
from pagewire.services.router.http.api.openai.tokens import read_detokenize, read_tokenize
from pagewire.services.router.http.api.responses.inputs import read_response, read_response_count
from pagewire.services.router.http.body_processes.body_messages import (
    TEMPLATE_CPU_S,
    BodyJob,
    BodyKind,
    BodyRefusal,
    BodyReply,
    most_memory,
    too_costly,
)
from pagewire.services.router.http.body_processes.child_serving import (
    added_memory,
    limit_cpu,
    memory_bytes,
    run,
)
from pagewire.services.router.http.body_processes.framing import (
    receive_bytes,
    receive_message,
    send_message,
)
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.settings.config import RouterSettings

READERS: dict[BodyKind, InputReader] = {
    "chat": read_chat,
    "completion": read_completion,
    "message": read_message,
    "message count": read_message_count,
    "tokenize": read_tokenize,
    "detokenize": read_detokenize,
    "response": read_response,
    "embedding": read_embedding,
    "response count": read_response_count,
}


def read_body(kind: BodyKind, raw: bytes | bytearray, model: ServedModel) -> GenerationInput:
    """Check and tokenize a body.

    Raises:
        InvalidRequestError: the client's fault; names the field.
    """
    try:
        return READERS[kind](raw, model)
    except RecursionError as exc:  # where a part of it is decoded, encoded again or rendered
        raise InvalidRequestError(
            "the body is nested too deeply: hundreds of objects and lists within each other"
        ) from exc


def serve(connection: socket.socket) -> None:
    """Read bodies.

    Raises:
        ChannelError: the router has closed the connection.
    """
    settings = RouterSettings(**receive_message(connection, dict[str, Any]))
    model = ServedModel.load(settings)
    if model.before_template is not None:
        model = replace(model, before_template=partial(limit_cpu, TEMPLATE_CPU_S))
    model.tokenizer.encode("a")  # starts threads, whose memory is not a body's
    while True:
        job = receive_message(connection, BodyJob)
        raw = receive_bytes(connection, job.num_bytes)
        try:
            with added_memory(most_memory(job.num_bytes)):
                bounded = replace(model, max_model_len=job.max_model_len)
                generation = read_body(job.kind, raw, bounded)
        except InvalidRequestError as exc:
            send_message(connection, BodyReply(BodyRefusal.of(exc), memory_bytes()))
            continue
        except MemoryError:
            send_message(
                connection, BodyReply(BodyRefusal.of(too_costly(job.num_bytes)), memory_bytes())
            )
            return  # what it holds now is scattered: the next body would have less
        finally:
            limit_cpu(0)
        head = msgspec.structs.replace(generation, prompts=())
        send_message(connection, BodyReply(head, memory_bytes(), len(generation.prompts)))
        for prompt in generation.prompts:
            send_message(connection, prompt)


if __name__ == "__main__":
    sys.exit(run(serve))
