"""The beginning of a child process: a guardian, and below the guardian a worker for foreign code.

The guardian runs no foreign code, so nothing keeps the guardian from seeing the end of this
process or of the worker. Either end ends everything. Processes that the worker leaves behind become
children of the guardian, in any session.
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
    adopt()  # before the fork: a worker may start a process and end at once
except Exception:
    pass  # on another system, processes outside of the group may go on
worker = os.fork()
if worker:
    os.close(reply_to)
    def end_others():
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for pid in map(int, file.read().split()):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)  # the guardian inherits the children of the ended process
    def end_with_parent():
        os.read(parent, 1)  # returns when nobody holds the other end: the parent has ended
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
        pass  # no child is left, or the system has no list of children
    if status < 0:
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core file of the worker is enough
        if status not in (-signal.SIGKILL, -signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
os.close(parent)
silent = os.open(os.devnull, os.O_WRONLY)
# Processes of the worker cannot answer.
os.register_at_fork(after_in_child=lambda: os.dup2(silent, reply_to))
data = json.load(sys.stdin)
"""
