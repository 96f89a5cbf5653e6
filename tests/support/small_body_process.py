"""The program that reads bodies, with less memory for each than it has by default."""

import sys

from pagewire.services.router.http.bodies import protocol
from pagewire.services.router.http.bodies.body_process import serve
from pagewire.services.router.http.bodies.child_serving import run

if __name__ == "__main__":
    protocol.MEMORY_PER_MIB = 8 << 20
    sys.exit(run(serve))
