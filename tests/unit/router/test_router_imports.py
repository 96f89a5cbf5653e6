import subprocess
import sys

PROGRAM = """
import sys
import pagewire.services.router.main
heavy = {"torch", "triton", "transformers", "numpy", "ucxx"} & set(sys.modules)
sys.exit(f"the router imports {sorted(heavy)}" if heavy else 0)
"""


def test_the_router_imports_nothing_of_model_execution():
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
