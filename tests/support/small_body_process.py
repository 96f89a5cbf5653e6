"""The program that reads bodies, with less memory for each than it has by default."""

import sys

from pagewire.services.router.http.body_processes import body_messages
from pagewire.services.router.http.body_processes.body_process import serve
from pagewire.services.router.http.body_processes.child_serving import run

if __name__ == "__main__":
    body_messages.MEMORY_PER_MIB = 8 << 20
    sys.exit(run(serve))
