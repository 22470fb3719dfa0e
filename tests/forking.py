"""The loop of a process that forks another for every order, so that no start costs an import."""

import json
import os
import signal
import sys


def serve(run):
    """Read orders from stdin until it ends.

    ``{"wait": pid}`` prints the exit status and the answer of a fork. Any other order is carried out by a fork, whose
    process id is printed: ``run(order, pipe)`` writes the answer to the pipe and never returns.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.fsync = lambda fd: None  # a kill leaves the page cache alone: no need to wait for the disk
    pipes = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            pid = order["wait"]
            with os.fdopen(pipes.pop(pid), "rb") as answers:
                answer = answers.read()
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            print(json.dumps([status, json.loads(answer or b"null")]), flush=True)
            continue
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            run(order, theirs)
        os.close(theirs)
        pipes[pid] = ours
        print(pid, flush=True)
