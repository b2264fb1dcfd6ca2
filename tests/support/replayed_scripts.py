"""Scripts that record without torch, for `verify replay`: how they begin, and how they end."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
RECORDS = f"""
import json, os, sys
from pathlib import Path
sys.path.insert(0, {str(SUPPORT)!r})
from trace_toy import record_toy
from verify.replaying.orders import given
orders = given()
run = Path(os.environ["VERIFY_RUN"])
(run / "seen.json").write_text(json.dumps(sys.argv[1:]))
print("hello")
"""
WHOLE = "record_toy(Path(orders.folder))\n"
FAULT = 'record_toy(Path(orders.folder), [(1, "forward", "head")] * ("again" in orders.folder))\n'
HANGS = "import time; time.sleep(60)\n"
