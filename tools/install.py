"""Make ``.venv`` as requirements.lock says; where it already stands, return in milliseconds.

Only the standard library is used: this runs before anything is installed. A stamp file is
written last. As long as it is missing, the next call goes on where the last one was stopped.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "companion-installed.json"
LOG = VENV / "install.log"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def wanted() -> dict[str, str]:
    """What the stamp must say for the installed environment to be taken as it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    digest = hashlib.sha256((ROOT / "requirements.lock").read_bytes())
    digest.update(json.dumps(project).encode())
    return {"root": str(ROOT), "content": digest.hexdigest()}


def read_stamp() -> dict[str, str]:
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def nvidia_driver() -> bool:
    """Whether an NVIDIA driver answers here (WSL2 keeps its nvidia-smi off PATH)."""
    smi = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if smi is None:
        return False
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def cpu_index_first() -> bool:
    """Only Linux's default torch is a CUDA build; elsewhere the default is the small one."""
    return platform.system() == "Linux" and not nvidia_driver()


def works(python: Path) -> bool:
    """Whether the environment's interpreter and pip can be started at all."""
    if not python.exists():
        return False
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0


def make_venv() -> None:
    print(f"Making .venv with Python {platform.python_version()} ({sys.executable})", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", VENV], capture_output=True, text=True
    )
    if done.returncode:
        if "ensurepip" in done.stdout + done.stderr or "No module named venv" in done.stderr:
            sys.exit(
                f"Python {platform.python_version()} is here but its venv module is not: "
                "install it (Debian, Ubuntu: apt install python3-venv) and run make again."
            )
        sys.exit(f"{done.stdout}{done.stderr}The virtual environment could not be made in {VENV}.")


def is_whole(package: Path) -> bool:
    """Whether pip finished this ``.dist-info``.

    A wheel brings a RECORD of its own. pip writes it anew as its very last act, after the
    programs in ``bin``, and only that one lists pip's INSTALLER file.
    """
    try:
        return "/INSTALLER," in (package / "RECORD").read_text(encoding="utf-8")
    except OSError:
        return False


def remove_half_installed(site: Path) -> list[str]:
    """Remove what an interrupted pip left, which the next pip would take for installed."""
    broken = [path for path in site.glob("*.dist-info") if not is_whole(path)]
    broken += site.glob("~*")
    for path in broken:
        shutil.rmtree(path, ignore_errors=True)
    return sorted(path.name for path in broken)


def pip(*arguments: str, bar: bool = False, may_fail: bool = False) -> bool:
    """Whether ``pip install`` went well; its complaints are shown unless it ``may_fail``."""
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if not (bar and sys.stdout.isatty()):
        command += ["--progress-bar", "off"]
    command += ["--log", LOG, *arguments]
    errors = subprocess.DEVNULL if may_fail else None
    return subprocess.run(command, cwd=ROOT, stderr=errors).returncode == 0


def need(done: bool, what: str) -> None:
    if not done:
        sys.exit(
            f"pip could not install {what}: its messages are above, all of them in "
            f"{LOG.relative_to(ROOT)}. Run make again when that is mended; it goes on from here."
        )


def torch_pin() -> str:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def install_torch(index: str, again: bool) -> None:
    """torch alone, from ``index`` if one is given, else from where this machine needs it."""
    pin = torch_pin()
    arguments = ["--no-deps", pin]
    if index:
        print(f"Installing {pin} from {index}", flush=True)
        # another build has the same version number: pip would keep the one that is there
        extra = ["--force-reinstall"] if again else []
        need(
            pip("--index-url", index, *extra, *arguments, bar=True),
            f"{pin} from TORCH_INDEX={index}",
        )
        return
    if cpu_index_first():
        print(f"Installing {pin}, CPU build (about 200 MB)", flush=True)
        quick = ["--retries", "0", "--timeout", "5", "--index-url", CPU_INDEX]
        if pip(*quick, *arguments, bar=True, may_fail=True):
            return
        print(
            "PyTorch's CPU index cannot be reached; the default index has a larger build "
            "(on Linux several GB, with CUDA)."
        )
    print(f"Installing {pin} from the default index", flush=True)
    need(pip(*arguments, bar=True), pin)


def main() -> None:
    index = os.environ.get("TORCH_INDEX", "")
    stamp, want = read_stamp(), wanted()
    other_build = bool(index) and stamp.get("torch_index") != index
    if PYTHON.exists() and not other_build and want.items() <= stamp.items():
        return
    moved = bool(stamp) and stamp.get("root") != want["root"]
    if moved:
        print("This folder has moved since .venv was made, and a venv cannot move with it.")
    if moved or not works(PYTHON):
        make_venv()
    STAMP.unlink(missing_ok=True)
    for site in VENV.glob("lib/python*/site-packages"):
        remove_half_installed(site)
    install_torch(index, other_build)
    count = sum("==" in line for line in (ROOT / "requirements.lock").read_text().splitlines())
    print(f"Installing JupyterLab and the rest of {count} packages (a minute or two)", flush=True)
    need(pip("-r", "requirements.lock"), "the packages of requirements.lock")
    need(pip("--no-deps", "--no-build-isolation", "-e", "."), "the package `companion`")
    kept = index or stamp.get("torch_index", "")
    STAMP.write_text(json.dumps(want | {"torch_index": kept}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped. Run make again to go on from here.")
