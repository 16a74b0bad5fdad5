"""The beginning of a child process: one between the code of others and this process, which ends all with either.

It runs nobody else's code, so that it always sees the end of this process, and is what the code finds as its parent.
What the code starts and leaves behind becomes a child of it, whichever session that is in.
"""

from __future__ import annotations

GUARDIAN = """
import os, signal, threading, time
reply_to, parent = map(int, sys.argv[2].split())
def adopt():
    import ctypes
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
try:
    adopt()  # before there is a worker, which may have started something and be gone at once
except Exception:
    pass  # a system that has no such thing: what leaves the group may go on
worker = os.fork()
if worker:
    os.close(reply_to)
    def end_others():
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for pid in map(int, file.read().split()):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)  # whose children are this process's from then on
    def end_with_parent():
        os.read(parent, 1)  # until nobody has the other end any more, however that came
        os.kill(worker, signal.SIGKILL)
        time.sleep(2)
        os.killpg(0, signal.SIGKILL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    ended = 0
    while ended != worker:
        ended, status = os.waitpid(-1, 0)
    status = os.waitstatus_to_exitcode(status)
    try:
        end_others()
    except OSError:
        pass  # there are none any more, or nothing tells of them
    if status < 0:
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's own is the one to look at
        if status not in (-signal.SIGKILL, -signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
os.close(parent)
silent = os.open(os.devnull, os.O_WRONLY)
os.register_at_fork(after_in_child=lambda: os.dup2(silent, reply_to))  # nobody else answers in its place
data = json.load(sys.stdin)
"""
