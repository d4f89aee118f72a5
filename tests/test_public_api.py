"""Cheap guards: imports point one way, importing does nothing, and the documented names are there."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dspark

ROOT = Path(dspark.__file__).parent

# each part of the package, and the parts it may import; stages meet at files, training alone reads its data's modules
BELOW = {
    "errors": set(),
    "numbers": set(),
    "pace": set(),
    "core": {"errors"},
    "artifacts": {"errors", "numbers"},
    "maths": {"core", "errors"},
    "models": {"core", "errors", "artifacts", "maths"},
    "chat": {"core", "errors", "artifacts", "models"},
    "decode": {"core", "errors", "maths", "models"},
}
BELOW |= {"schedule_files": {"core", "errors", "artifacts", "maths", "models"}}
STAGE = {"core", "errors", "numbers", "pace", "artifacts", "maths", "models", "chat", "decode", "schedule_files"}
BELOW |= {"data": STAGE, "train": STAGE | {"data"}, "evaluate": STAGE}
BELOW |= {"export": STAGE, "formats_cli": STAGE | {"export"}}
BELOW |= {"bundle": STAGE | {"evaluate"}}
BELOW |= {"console": STAGE | {"evaluate", "bundle"}}
BELOW |= {"train_cli": STAGE | {"evaluate", "bundle", "train", "data", "assignments"}}
BELOW |= {"assignments": {"core", "errors", "artifacts"}}
BELOW |= {"answers_cli": STAGE | {"data"}, "prompts_cli": STAGE | {"data"}, "audit_cli": STAGE | {"evaluate", "bundle"}}
BELOW |= {"cache_cli": STAGE | {"data", "train", "train_cli", "cache_runs"}, "cache_runs": STAGE | {"data", "train"}}
BELOW |= {name: STAGE | {"evaluate", "bundle", "export"} for name in ("calibrate_cli", "profile_cli")}
BELOW |= {"eval_sources": STAGE | {"data", "evaluate"}}
BELOW |= {"eval_plays": STAGE | {"data", "evaluate", "bundle", "eval_sources"}}
BELOW |= {"eval_cli": STAGE | {"evaluate", "eval_plays"}, "report": STAGE | {"evaluate"}}
STAGES = {"data", "train", "evaluate", "bundle", "train_cli", "prompts_cli", "calibrate_cli", "profile_cli"}
BELOW |= {"road": STAGE | STAGES, "accelerate_cli": {"errors", "numbers", "pace", "road"}}
BELOW |= {"loadbench": STAGE | {"evaluate"}, "serve": STAGE | {"bundle", "evaluate"}}
BELOW |= {"simulate": STAGE | {"evaluate", "assignments"}}
BELOW |= {"verbs": {*BELOW}}
BELOW |= {"cli": {*BELOW}, "__main__": {"cli"}}
ABOVE = {"models/registry.py": {"export"}}  # the door to drafters of any format stands above the formats

PUBLIC = {
    "dspark.core": ("SamplingParams", "Proposal", "DraftDistribution", "RoundRecord", "Completion"),
    "dspark.errors": ("DsparkError", "ConfigError", "ModelError", "CheckpointError", "DataError"),
    "dspark.decode": ("generate", "stream"),
    "dspark.chat": ("ChatFormat", "TextStream"),
    "dspark.models.target": ("Target", "TargetInfo", "TargetOutput", "KVMemory"),
    "dspark.models.drafter": ("Drafter", "NoDrafter"),
    "dspark.models.dspark": ("DsparkDrafter",),
    "dspark.models.loading": ("load_target",),
    "dspark.models.registry": ("load_drafter", "default_drafter_folder"),
    "dspark.maths.scheduling": ("FixedScheduler", "ThresholdScheduler", "GreedyScheduler"),
    "dspark.bundle": ("Bundle",),
    "dspark.cli": ("app", "main"),
}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported(path: Path) -> set[str]:
    """Parts of the package that a module imports, inside functions as well."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide their direction"
            names |= {
                f"{node.module}.{alias.name}" if node.module == "dspark" else str(node.module) for alias in node.names
            }
    return {name.split(".")[1] for name in names if name.startswith("dspark.")}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert part in BELOW, f"{part} is new: say in this test what it may import"
    allowed = BELOW[part] | {part} | ABOVE.get(path.relative_to(ROOT).as_posix(), set())
    assert imported(path) <= allowed, f"{path.name} imports {sorted(imported(path) - allowed)}"


def test_maths_is_pure() -> None:
    """No config, logger, file or process group in there."""
    for path in (ROOT / "maths").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        foreign = {name.split(".")[0] for name in names} & {"logging", "os", "pathlib", "io", "json", "transformers"}
        assert not foreign and not any(name.startswith("torch.distributed") for name in names), path.name


def run_python(code: str, home: Path) -> str:
    environment = {**os.environ, "DSPARK_HOME": str(home), "PYTHONPATH": os.pathsep.join([str(ROOT.parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_costs_nothing(tmp_path: Path) -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'tokenizers', 'jaxtyping', 'typer', 'rich'}"
    assert run_python(f"import sys, dspark; print({heavy} & set(sys.modules))", tmp_path) == "set()\n"


def test_importing_any_module_does_nothing(tmp_path: Path) -> None:
    names = [".".join(("dspark", *path.relative_to(ROOT).with_suffix("").parts)) for path in modules()]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = f"""
import importlib, torch
before = torch.get_num_threads(), torch.get_default_dtype(), torch.get_rng_state().tolist(), torch.is_grad_enabled()
for name in {names}:
    importlib.import_module(name)
after = torch.get_num_threads(), torch.get_default_dtype(), torch.get_rng_state().tolist(), torch.is_grad_enabled()
assert before == after
"""
    home = tmp_path / "home"
    assert run_python(code, home) == "" and not home.exists()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_there_and_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    for public in PUBLIC[name]:
        assert getattr(module, public).__doc__ or public == "app", f"{name}.{public}"
