"""What is installed where: the base install stays light, and the lists of packages agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CARD = {"jupyterlab", "ipywidgets", "torch", "sglang", "speculators", "matplotlib", "pandas", "papermill"}


def name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def names(requirements: list[str]) -> set[str]:
    return {name(requirement) for requirement in requirements} - {"eaglelab"}


def lock(file: str) -> dict[str, str]:
    """Name -> version of a lock file, with the locks that it includes."""
    pins = {}
    for line in (ROOT / "requirements" / file).read_text().splitlines():
        if line.startswith("-r "):
            pins |= lock(line[3:])
        elif line and not line.startswith("#"):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line
            pins[name(line)] = line.partition("==")[2]
    return pins


def extra(which: str) -> set[str]:
    return names(PROJECT["optional-dependencies"][which])


def test_the_gpu_box_has_the_whole_card_and_what_pyproject_asks_for():
    yaml = pytest.importorskip("yaml")
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (from_pip,) = [entry["pip"] for entry in dependencies if isinstance(entry, dict)]
    assert "python=3.12" in dependencies
    assert "-e ." in from_pip
    listed = names([entry for entry in from_pip if not entry.startswith("-")])
    assert listed >= CARD
    assert listed == extra("lab") | extra("train") | {"sglang"}


@pytest.mark.parametrize(
    "file,extras",
    [("lab.txt", ["lab"]), ("test.txt", ["lab", "train", "test"]), ("server.txt", [])],
)
def test_each_lock_has_all_that_pyproject_asks_for(file, extras):
    wanted = names(PROJECT["dependencies"]).union(*(extra(which) for which in extras))
    assert wanted - lock(file).keys() == set()


@pytest.mark.parametrize("file", ["lab.txt", "test.txt", "server.txt"])
def test_locks_pin_the_torch_that_has_cpu_wheels(file):
    assert lock(file)["torch"] == "2.13.0"
    assert ("torchvision" in lock(file)) == (file == "server.txt")


def test_the_server_is_the_version_that_the_facts_are_about():
    assert lock("server.txt")["sglang"] == "0.5.23"
    assert lock("test.txt")["speculators"] == "0.9.0"


@pytest.mark.parametrize(
    ("user", "ci", "apt", "playwright", "asked"),
    [
        (0, "true", 0, 0, ["apt-get update -qq", "apt-get install -y -qq --no-install-recommends chromium"]),
        (0, "true", 1, 0, ["apt-get update -qq", "playwright install chromium"]),
        (0, "", 0, 0, ["playwright install chromium"]),
        (7, "true", 0, 0, ["playwright install chromium"]),
        (7, "true", 0, 1, ["playwright install chromium"]),
    ],
)
def test_a_browser_is_found_or_had(tmp_path, user, ci, apt, playwright, asked):
    """browser.sh: nothing where there is one; Debian's only in CI and as root; else playwright's own."""
    home, tools, log = tmp_path / "a checkout", tmp_path / "bin", tmp_path / "log"

    def make(path, code, says="", logs=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        line = f'echo "{path.name} $*" >>"{log}"\n' if logs else ""
        path.write_text(f"#!{shutil.which('sh')}\n{line}{says}\nexit {code}\n")
        path.chmod(0o755)

    make(home / ".venv/bin/playwright", playwright)
    make(tools / "apt-get", apt)
    make(tools / "id", 0, f"echo {user}", logs=False)
    for name in ("dirname", "timeout"):
        (tools / name).symlink_to(shutil.which(name) or name)
    (home / "requirements").mkdir()
    script = shutil.copy(ROOT / "requirements/browser.sh", home / "requirements")

    def run():
        environment = {"PATH": str(tools), "CI": ci}
        return subprocess.run([shutil.which("sh"), script], env=environment, capture_output=True, text=True)

    done = run()
    lines = log.read_text().splitlines()
    assert [line[: len(a)] for line, a in zip(lines, asked, strict=True)] == asked
    assert done.returncode == 0 and ("no browser could be had" in done.stderr) == bool(playwright)
    make(tools / "chromium", 0, logs=False)
    log.unlink()
    assert run().returncode == 0 and not log.exists()


def test_import_is_light():
    """In a fresh process, best of three: no torch, no sglang, under half a second."""
    code = (
        "import sys, time; start = time.perf_counter(); import eaglelab; took = time.perf_counter() - start;"
        "print(took, 'torch' in sys.modules, 'sglang' in sys.modules)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
        for _ in range(3)
    ]
    answers = [run.stdout.split() for run in runs]
    assert {tuple(answer[1:]) for answer in answers} == {("False", "False")}
    assert min(float(answer[0]) for answer in answers) < 0.5


BASE = ["numpy", "safetensors", "pydantic", "httpx", "typer", "tqdm"]


@pytest.mark.parametrize(
    "module", ["capture", "launch", "wiring", "checkpoint", "server", "serve", "cli", "probe"]
)
def test_base_modules_need_only_the_base(module):
    """Importing one where everything beyond the base install is missing."""
    heavy = [
        "torch",
        "sglang",
        "transformers",
        "pandas",
        "matplotlib",
        "papermill",
        "nbconvert",
        "IPython",
        "yaml",
    ]
    code = f"import sys; [sys.modules.__setitem__(name, None) for name in {heavy}]; import eaglelab.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_base_dependencies_are_these_without_upper_bounds():
    """All six are in a production SGLang environment already; a bound could move one of its pins."""
    assert sorted(map(name, PROJECT["dependencies"])) == sorted(BASE)
    assert not [r for r in PROJECT["dependencies"] if re.search(r"[<=~]=|<", r.replace(">=", ""))]


def test_cpu_platform_is_a_distribution_of_its_own():
    """SGLang skips the general plugins of a platform distribution that is not selected; the probe is one."""
    cpu = tomllib.loads((ROOT / "eaglelab_cpu" / "pyproject.toml").read_text())["project"]
    assert list(PROJECT["entry-points"]) == ["sglang.srt.plugins"]
    assert list(cpu["entry-points"]) == ["sglang.srt.platforms"]
    assert not cpu.get("dependencies")
