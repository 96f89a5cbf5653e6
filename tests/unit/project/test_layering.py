"""The rules of the source tree, held by reading it: imports, torch, pickle, the environment."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LAYERS = ("kernels", "shared", "services")  # each may import itself and those before it
SERVICES = ("cli", "decode", "prefill", "router")
CLI_ENTRY_POINTS = {f"pagewire.services.{role}.main" for role in ("decode", "prefill", "router")}
SIMULATED = "pagewire.services.router.placement."  # pure: the simulator runs it as routers do
NEEDS_TORCH = ("torch", "triton", "transformers", "safetensors")
# Each package may import those before it. Modules next to packages come first in
# `services.router.http`, and last in a service, which they compose; those of `cli` may do both.
PACKAGES = (
    "kernels",
    "shared.base",
    "shared.costs",
    "shared.settings",
    "shared.request",
    "shared.kv",
    "shared.control",
    "shared.cluster",
    "shared.http",
    "shared.metrics",
    "shared.model",
    "shared.index",
    "shared.text",
    "shared.grammar",
    "shared.tool_calls",
    "shared.engine.scheduling",
    "shared.engine.execution",
    "shared.engine.ranks",
    "shared.engine",
    "shared.engine.offline",
    "shared.transfer",
    "shared.transfer.transports",
    "shared.transfer.endpoint",
    "shared.worker",
    "services.router.cluster",
    "services.router.placement",
    "services.router.metrics",
    "services.router.dashboard",
    "services.router.dispatch",
    "services.router.text",
    "services.router.http",
    "services.router.http.api.openai",
    "services.router.http.api.anthropic",
    "services.router.http.api.responses",
    "services.router.http.api",
    "services.router.http.body_processes",
    "services.router.http.connection",
    "services.router.http.routes",
    "services.router.http.openapi",
    "services.router.http.server",
    "services.cli.client",
    "services.cli.up",
    "services.cli.batch",
    "services.cli.bench",
    "services.cli.doctor",
    "services.decode",
    "services.prefill",
    "services.cli.prove",
    "services.cli.simulation",
)
COMPOSERS = ("pagewire", "shared", "services", "services.router", "services.cli")
UNSAFE_MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "np.load", "numpy.load"}
# Distributions whose module has another name.
DISTRIBUTIONS = {
    "opentelemetry": "opentelemetry-sdk",
    "zmq": "pyzmq",
    "ucxx": "ucxx-cu13",
    "cuda": "cuda-bindings",
    "google": "protobuf",
}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
MAY_TOUCH_THE_ENVIRONMENT = {
    "shared/settings/base.py": "OpenTelemetry's own name of a setting",
    "shared/settings/config.py": "the one reader of settings",
    "services/cli/up/processes.py": "children inherit it",
    "services/cli/up/machine.py": "CUDA_VISIBLE_DEVICES says which GPUs may be given to workers",
    "shared/transfer/transports/ucx_settings.py": "UCX is configured through it",
}


@dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        module: the module, or the module's attribute: `from a import b` gives "a.b".
        is_lazy: inside a function.
        is_for_types: under TYPE_CHECKING.
    """

    module: str
    line: int
    is_lazy: bool
    is_for_types: bool


def source_files() -> list[Path]:
    files = [ROOT / "__init__.py"]
    for layer in LAYERS:
        files += sorted((ROOT / layer).rglob("*.py"))
    return files


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("pagewire", *(part for part in parts if part != "__init__")))


@cache
def syntax_tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@cache
def imports_of(file: Path) -> list[Import]:
    return list(_walk_imports(syntax_tree(file), is_lazy=False, is_for_types=False))


def _walk_imports(node: ast.AST, is_lazy: bool, is_for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, is_lazy, is_for_types)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", child.lineno, is_lazy, is_for_types)
        else:
            in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _walk_imports(child, is_lazy or in_function, is_for_types or typing_only)


@cache
def modules() -> dict[str, Path]:
    return {name_of(file): file for file in source_files()}


def our_module(name: str) -> str | None:
    """The module of ours that an imported name is or lies in."""
    while name.startswith("pagewire"):
        if name in modules():
            return name
        name = name.rpartition(".")[0]
    return None


def dotted_name(node: ast.AST) -> str:
    """Return what a name or an attribute of names is written as; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return owner and f"{owner}.{node.attr}"
    return ""


def dotted_names(file: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.Attribute | ast.Name) and (name := dotted_name(node)):
            yield name, node.lineno


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else None


def each_import_of_ours() -> Iterator[tuple[Path, str, Import]]:
    for file in source_files():
        for imported in imports_of(file):
            target = our_module(imported.module)
            if target is not None:
                yield file, target, imported


def test_imports_go_one_way() -> None:
    wrong = []
    for file, target, imported in each_import_of_ours():
        source_layer, target_layer = layer_of(name_of(file)), layer_of(target)
        if source_layer is not None and target_layer is not None and target_layer > source_layer:
            wrong.append(f"{file.relative_to(ROOT)}:{imported.line} imports {target}")
    assert wrong == []


def package_of(module: str) -> str:
    """The longest package of `PACKAGES` or `COMPOSERS` that a module lies in."""
    path = module.removeprefix("pagewire.")
    lies_in = [p for p in (*PACKAGES, *COMPOSERS) if path == p or path.startswith(f"{p}.")]
    return max(lies_in, key=len, default="pagewire")


def test_packages_import_those_before_them() -> None:
    wrong = []
    for file, target, imported in each_import_of_ours():
        source, other = package_of(name_of(file)), package_of(target)
        if target == "pagewire" or name_of(file) == "pagewire" or imported.is_for_types:
            continue
        if source in COMPOSERS or other in COMPOSERS:
            continue
        if PACKAGES.index(other) > PACKAGES.index(source):
            wrong.append(f"{file.relative_to(ROOT)}:{imported.line}: {source} imports {other}")
    assert wrong == []


def test_each_package_has_its_place_and_an_introduction() -> None:
    found = {package_of(name_of(file)) for file in source_files()}
    assert found == {*PACKAGES, *COMPOSERS}
    packages = [file for file in source_files() if file.name == "__init__.py"]
    unknown = [
        name_of(file)
        for file in packages
        if len(file.relative_to(ROOT).parts) > 2
        and name_of(file).removeprefix("pagewire.") not in (*PACKAGES, *COMPOSERS)
        and not name_of(file).startswith(("pagewire.kernels.", "pagewire.shared.model."))
    ]
    assert unknown == []
    short = [name_of(f) for f in packages if len(ast.get_docstring(syntax_tree(f)) or "") < 90]
    assert [n for n in short if n != "pagewire" and not n.startswith("pagewire.kernels.")] == []


def test_services_do_not_import_each_other() -> None:
    wrong = []
    for file, target, imported in each_import_of_ours():
        source, target_parts = name_of(file).split("."), target.split(".")
        if source[1:2] != ["services"] or target_parts[1:2] != ["services"]:
            continue
        if len(target_parts) > 2 and source[2] != target_parts[2]:
            is_entry = source[2] == "cli" and imported.is_lazy and target in CLI_ENTRY_POINTS
            is_simulated = source[2:4] == ["cli", "simulation"] and target.startswith(SIMULATED)
            if not (is_entry or is_simulated):
                wrong.append(f"{file.relative_to(ROOT)}:{imported.line} imports {target}")
    assert wrong == []


def test_the_rules_see_every_service() -> None:
    found = {name.split(".")[2] for name in modules() if name.startswith("pagewire.services.")}
    assert found == set(SERVICES)


@pytest.mark.parametrize(
    "package", ["services.router", "services.cli.simulation", "shared.engine.scheduling"]
)
def test_nothing_that_a_package_imports_needs_torch(package: str) -> None:
    """Follows imports inside functions, too: no request may ever load torch into a router."""
    todo = [name for name in modules() if name.startswith(f"pagewire.{package}")]
    assert todo
    reached_from = dict.fromkeys(todo, "")
    wrong = []
    while todo:
        module = todo.pop()
        for imported in imports_of(modules()[module]):
            if imported.is_for_types:
                continue
            if imported.module.split(".")[0] in NEEDS_TORCH:
                wrong.append(f"{module}:{imported.line} (from {reached_from[module]})")
            target = our_module(imported.module)
            if target is not None and target != "pagewire" and target not in reached_from:
                reached_from[target] = module
                todo.append(target)
    assert wrong == []


def test_executors_know_of_scheduling_the_step_alone() -> None:
    known = {
        target
        for file, target, _ in each_import_of_ours()
        if package_of(name_of(file)) == "shared.engine.execution"
        and package_of(target) == "shared.engine.scheduling"
    }
    assert known == {"pagewire.shared.engine.scheduling.step"}


@pytest.mark.parametrize(
    "module", ["pagewire", "pagewire.services.router.main", "pagewire.services.cli.main"]
)
def test_import_leaves_torch_unloaded(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print(sorted({set(NEEDS_TORCH)} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def calls_of(file: Path) -> set[str]:
    tree = syntax_tree(file)
    return {dotted_name(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}


def test_files_run_no_foreign_code() -> None:
    """No deserialization that can execute what it reads, and no eval."""
    wrong = {}
    for file in source_files():
        imported = {each.module.split(".")[0] for each in imports_of(file)}
        wrong[name_of(file)] = imported & UNSAFE_MODULES | calls_of(file) & UNSAFE_CALLS
    assert len(wrong) > 400
    assert {name: found for name, found in wrong.items() if found} == {}


def test_what_serves_imports_declared_packages_alone() -> None:
    """None that is there only because another package brings it, nor one for tests and tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = {
        re.split(r"[^\w.-]", line)[0]
        for line in [
            *project["dependencies"],
            *extras["worker"],
            *extras["gpu"],
            *extras["ucx"],
            *extras["transformers"],
            *extras["otel"],
        ]
    }
    wrong = []
    for file in source_files():
        for imported in imports_of(file):
            top = imported.module.split(".")[0]
            if imported.is_for_types:
                continue
            distribution = DISTRIBUTIONS.get(top, top.replace("_", "-"))
            if top not in sys.stdlib_module_names | {"pagewire"} and distribution not in declared:
                wrong.append(f"{file.relative_to(ROOT)}:{imported.line} imports {top}")
    assert wrong == []


def test_environment_is_read_in_one_place() -> None:
    wrong = []
    for file in source_files():
        where = file.relative_to(ROOT).as_posix()
        if where in MAY_TOUCH_THE_ENVIRONMENT:
            continue
        used = list(dotted_names(file)) + [(each.module, each.line) for each in imports_of(file)]
        wrong += [f"{where}:{line} {name}" for name, line in used if name in ENVIRONMENT]
    assert wrong == []
