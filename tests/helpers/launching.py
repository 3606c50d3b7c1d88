"""dsplan's launch in a process of its own, so that it can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LAUNCH = """
import sys
from pathlib import Path
from dsplan.runtime.launching.launcher import launch
target, script = map(Path, sys.argv[1:])
sys.exit(launch(target, script, [], ranks=2, run_dir=target.parent))
"""


def start_launch(target: Path, script: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LAUNCH, str(target), str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
