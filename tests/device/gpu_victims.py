"""A worker of ``benchmarks.gpu`` whose cases crash, hang, stop or end as they are named."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main():
    for case in sys.argv[sys.argv.index("--cases") + 1 :]:
        print(json.dumps({"begins": case}), flush=True)
        if case == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if case == "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(os.environ["TRAK_LITE_CHILD"]).write_text(str(child.pid))
            time.sleep(600)
        if case == "exits":
            sys.exit("no memory")
        print("{a warning of a library}")
        print(json.dumps({"case": case, "ms": 1}), flush=True)


if __name__ == "__main__":
    main()
