"""Programs that attack whoever runs them. Each prints, as JSON, the list of what it reached: it must be empty.

They read facts about the attacked process from their standard input: see `sandbox_worker.py`.
"""

PRELUDE = """
import ctypes, json, os, resource, signal, socket, stat, sys, time
facts = json.loads(sys.stdin.readline() or "{}")
libc = ctypes.CDLL(None, use_errno=True)
reached = []

def attack(name, function, *arguments):
    try:
        found = function(*arguments)
    except (OSError, ValueError, AttributeError, EOFError):
        return
    # System calls of libc return -1.
    if found != -1:
        reached.append(name)

def say():
    print(json.dumps(reached), flush=True)
"""

READS = """
def read(path):
    with open(path, "rb") as file:
        return file.read(100)
"""

REACHING = {
    "reads files of the run, of homes and of the system": READS
    + """
for path in [*facts["secrets"], "/etc/passwd", "/etc/shadow", "/root/.bashrc", "/proc/kcore", "/dev/mem", "/dev/vda"]:
    attack(path, read, path)
for path in [facts["folder"], "/root", "/home", "/etc", "/var", "/sys", "/run"]:
    attack(path, os.listdir, path)
say()
""",
    "reads its parents through /proc": READS
    + """
for pid in (1, os.getppid(), facts["pid"]):
    for name in ("environ", "maps", "mem", "cwd/x", "root/etc/passwd", "fd/0"):
        attack(f"{pid} {name}", lambda: None if b"secret" not in read(f"/proc/{pid}/{name}") else -1)
        attack(f"{pid} {name}", lambda: -1 if b"secret" not in read(f"/proc/{pid}/{name}") else 0)
reached = [name for name in reached if name.split()[0] == str(facts["pid"])]
if "secret" in str(dict(os.environ)):
    reached.append("environment")
say()
""",
    "follows links out of its directory": READS
    + """
for number, path in enumerate([*facts["secrets"], "/etc/passwd", facts["folder"], ".."]):
    attack(f"link to {path}", lambda: (os.symlink(path, f"link{number}"), read(f"link{number}/passwd")))
    attack(f"read {path}", lambda: read(f"link{number}"))
    attack(f"hard link to {path}", lambda: os.link(path, f"hard{number}"))
attack("write through a link", lambda: open(f"link2/made", "w"))
say()
""",
    "writes outside its directory": """
library = os.path.dirname(os.__file__)
places = [facts["folder"], "/usr", "/usr/bin", "/etc", "/", "/dev", "/var/tmp", sys.prefix, library]
for place in places:
    attack(place, lambda: os.mkdir(place + "/made"))
    attack(place + " file", lambda: open(place + "/made", "w"))
    attack(place + " mode", os.chmod, place, 0o777)
    attack(place + " owner", os.chown, place, 12345, 12345)
    attack(place + " time", os.utime, place, (1, 1))
attack("rename", os.rename, "/usr/bin/env", "/usr/bin/env2")
attack("truncate", os.truncate, os.__file__, 0)
say()
""",
    "connects to the network": """
def connect(family, kind, address, protocol=0):
    with socket.socket(family, kind, protocol) as client:
        client.settimeout(1)
        client.connect(address)
        if kind == socket.SOCK_DGRAM:
            client.send(b"x")
attack("loopback", connect, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", facts["port"]))
attack("loopback 6", connect, socket.AF_INET6, socket.SOCK_STREAM, ("::1", facts["port"]))
attack("outside", connect, socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 80))
attack("datagram", connect, socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53))
attack("metadata", connect, socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80))
attack("unix", connect, socket.AF_UNIX, socket.SOCK_STREAM, facts["socket"])
attack("abstract", connect, socket.AF_UNIX, socket.SOCK_STREAM, "\\0" + facts["abstract"])
attack("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
attack("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attack("packet", lambda: socket.socket(17, socket.SOCK_RAW, 3))
say()
""",
    "signals and adjusts other processes": """
for pid in (facts["pid"], facts["pid"] + 1, 1):
    if pid != 1 or os.getppid() != 1:
        attack(f"signal {pid}", os.kill, pid, 0)
pid = facts["pid"]
attack("term", os.kill, pid, signal.SIGTERM)
attack("group", os.killpg, pid, signal.SIGTERM)
attack("limits", resource.prlimit, pid, resource.RLIMIT_NOFILE, (3, 3))
attack("affinity", os.sched_setaffinity, pid, {0})
attack("priority", os.setpriority, os.PRIO_PROCESS, pid, 19)
attack("scheduler", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
say()
attack("all", os.kill, -1, signal.SIGTERM)
""",
    "traces other processes": """
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
attack("attach", libc.ptrace, PTRACE_ATTACH, facts["pid"], 0, 0)
attack("seize", libc.ptrace, PTRACE_SEIZE, facts["pid"], 0, 0)
word, where = ctypes.create_string_buffer(8), ctypes.c_void_p(facts["address"])
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
ours, theirs = Part(ctypes.addressof(word), 8), Part(where, 8)
attack("memory", libc.process_vm_readv, facts["pid"], ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
attack("pidfd", os.pidfd_open, facts["pid"])
attack("pages", libc.syscall, 256 if os.uname().machine == "x86_64" else 238, facts["pid"], 0, 0, 0)
say()
""",
    "makes namespaces and mounts": """
attack("user namespace", libc.unshare, 0x10000000)
attack("mount namespace", libc.unshare, 0x00020000)
attack("mount", libc.mount, b"none", b"/usr", b"tmpfs", 0, 0)
attack("bind", libc.mount, b"/", os.getcwd().encode(), 0, 4096, 0)
attack("unmount", libc.umount2, b"/usr", 2)
attack("chroot", os.chroot, os.getcwd())
attack("device", os.mknod, "device", 0o666 | stat.S_IFBLK, os.makedev(8, 0))
attack("host name", socket.sethostname, "hostile")
attack("clock", time.clock_settime, time.CLOCK_REALTIME, 0.0)
attack("keyring", libc.syscall, 250 if os.uname().machine == "x86_64" else 219, 0, -4, 1)
handle, mount = ctypes.create_string_buffer(200), ctypes.create_string_buffer(8)
attack("handle", libc.name_to_handle_at, -100, b"/usr", handle, mount, 0)
say()
""",
    "becomes another user": """
attack("root", os.setuid, 0)
attack("group", os.setgroups, [0])
attack("sandbox's own parent", os.setresuid, facts["uid"] + 1, facts["uid"] + 1, facts["uid"] + 1)
PR_GET_NO_NEW_PRIVS = 39
if libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
    reached.append("a setuid program would give its privileges")
for name in ("su", "mount", "passwd", "newgrp"):
    same_user = f"test $(id -u) = {os.getuid()}"
    if os.system(f"/usr/bin/{name} --version >/dev/null 2>&1 </dev/null; {same_user}"):
        reached.append(name)
say()
""",
    "raises its limits": """
for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CORE"):
    kind = getattr(resource, name)
    soft, hard = resource.getrlimit(kind)
    attack(name, resource.setrlimit, kind, (hard + 1, hard + 1))
    attack(name, resource.setrlimit, kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if hard == resource.RLIM_INFINITY:
        reached.append(name + " is infinite")
say()
""",
    "hides memory from its limits": """
import mmap
MiB = 2**20
x86 = os.uname().machine == "x86_64"
def call(name, x86_64, aarch64, *arguments):
    attack(name, libc.syscall, x86_64 if x86 else aarch64, *arguments)

def system_v():
    number = libc.shmget(0, 2048 * MiB, 0o1600)
    return number if number == -1 else (libc.shmat(number, 0, 0), 0)[1]
attack("System V", system_v)
call("message queue", 68, 186, 0, 0o1600)
attack("memfd", os.memfd_create, "x")
call("memfd_secret", 447, 447, 0)
# Its pages would stay with the last page of the mapping, however little of it is.
attack("shared anonymous", mmap.mmap, -1, MiB)
libc.mmap.restype = ctypes.c_ssize_t
MAP_HUGETLB, MAP_LOCKED, ANONYMOUS, READ_WRITE = 0x40000, 0x2000, 0x20, 3
for name, flags in {"shared": 1, "validated": 3, "huge": 2 | MAP_HUGETLB, "locked": 2 | MAP_LOCKED}.items():
    attack("map " + name, libc.mmap, None, ctypes.c_size_t(2 * MiB), READ_WRITE, ANONYMOUS | flags, -1, 0)
own = ctypes.create_string_buffer(MiB)
attack("mlock", libc.mlock, own, MiB)
attack("mlockall", libc.mlockall, 1)
say()
""",
    "hides memory in buffers": """
import fcntl
x86 = os.uname().machine == "x86_64"
source, sink = os.pipe()
attack("larger pipe", fcntl.fcntl, sink, fcntl.F_SETPIPE_SZ, 2**20)
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
own = ctypes.create_string_buffer(4096)
attack("pages of a pipe", libc.vmsplice, sink, ctypes.byref(Part(ctypes.addressof(own), 4096)), 1, 0)
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16, 17, 40):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
        attack(f"socket {family} {kind}", socket.socket, family, kind)
        if (family, kind) != (socket.AF_UNIX, socket.SOCK_STREAM):
            attack(f"pair {family} {kind}", socket.socketpair, family, kind)
ours, theirs = socket.socketpair()
attack("larger buffer", ours.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 2**30)
attack("listen", lambda: (ours.bind("name"), ours.listen(4096)))
for name, x86_64, aarch64 in (("inotify", 254, 27), ("fanotify", 300, 262), ("io_setup", 206, 0)):
    attack(name, libc.syscall, x86_64 if x86 else aarch64, 1, b".", 1, 0, 0)
attack("Landlock", libc.syscall, 444, 0, 0, 1)
say()
""",
    "keeps what it was started with": """
import os
open_files = []
for number in range(3, 256):
    try:
        os.fstat(number)
        open_files.append(number)
    except OSError:
        pass
# Of a socket or file of the caller; what the interpreter opened itself is a file below its directory.
reached += [f"descriptor {number}" for number in open_files if not stat.S_ISREG(os.fstat(number).st_mode)]
say()
""",
}
"""These end by themselves, with what they reached."""

BREAKING = {
    "fork bomb": ("while True:\n    try: os.fork()\n    except OSError: pass", {"timeout", "error", "memory"}),
    "threads": (
        "import threading\nwhile True: threading.Thread(target=time.sleep, args=[99]).start()",
        {"timeout", "error"},
    ),
    "memory": ("x = bytearray(10**9)", {"memory"}),
    "memory of many": (
        "for _ in range(3): os.fork()\nx = b'x' * (60 * 2**20)\ntime.sleep(99)",
        {"memory"},
    ),
    "pages of forks": (
        "for _ in range(3): os.fork()\nx = bytearray(60 * 2**20)\nfor i in range(0, len(x), 4096): x[i] = 1\n"
        "libc.prctl(4, 0)\ntime.sleep(99)",
        {"memory"},
    ),
    "sockets of many": (
        "for _ in range(23):\n    if os.fork() == 0: break\npairs = []\n"
        "while True:\n    try: pairs.append(socket.socketpair())\n    except OSError: time.sleep(99)",
        {"memory"},
    ),
    "full sockets and pipes of many": (
        "for _ in range(23):\n    if os.fork() == 0: break\nends = []\nwhile True:\n    try:\n"
        "        pair, pipe = socket.socketpair(), os.pipe()\n        ends += [pair, pipe]\n"
        "        for number in (pair[0].fileno(), pipe[1]):\n            os.set_blocking(number, False)\n"
        "            try:\n                while True: os.write(number, bytes(4096))\n"
        "            except BlockingIOError: pass\n    except OSError: time.sleep(99)",
        {"memory"},
    ),
    "stacks of threads": (
        "import threading\nthreading.stack_size(60 * 2**20)\nsys.setrecursionlimit(10**9)\ndef f(): f()\n"
        "for _ in range(9): threading.Thread(target=f).start()",
        {"memory", "error", "timeout"},
    ),
    "shared memory": (
        "from multiprocessing import shared_memory\nparts = []\n"
        "while True:\n    parts.append(shared_memory.SharedMemory(create=True, size=10 * 2**20))\n"
        "    parts[-1].buf[:] = bytes(parts[-1].size)",
        {"memory", "error"},
    ),
    "endless list": ("x = []\nwhile True: x.append(bytes(10**6))", {"memory", "error"}),
    "flood of output": ("while True: os.write(1, b'x' * 65536)", {"output"}),
    "flood of errors": ("while True: os.write(2, b'x' * 65536)", {"output"}),
    "endless loop": ("while True: pass", {"timeout"}),
    "sleep": ("time.sleep(10**6)", {"timeout"}),
    "ignores signals": (
        "for number in range(1, 65):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        {"timeout", "error"},
    ),
    "huge file": ("file = open('x', 'wb')\nwhile True: file.write(bytes(10**6))", {"error", "memory"}),
    "sparse file": ("open('x', 'wb').truncate(10**15)", {"error"}),
    "closes its descriptors": ("os.closerange(0, 256)\nwhile True: pass", {"timeout"}),
    "closes its output": ("os.close(1)\nos.close(2)\ntime.sleep(10**6)", {"timeout"}),
    "daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 256)\n"
        "        os.execv('/usr/bin/sleep', [facts['mark'], '1000'])\n    os._exit(0)\nos.wait()\ntime.sleep(0.2)",
        {"ok"},
    ),
    "many daemons": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for _ in range(20):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        os.execv('/usr/bin/sleep', [facts['mark'], '1000'])\n",
        {"ok", "error", "timeout"},
    ),
    "deep recursion": ("sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", {"error", "memory", "timeout"}),
    "crash": ("ctypes.string_at(0)", {"error"}),
    "exit code": ("os._exit(2**31 - 1)", {"error"}),
    "kills itself": ("os.kill(os.getpid(), signal.SIGKILL)", {"error"}),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)", {"timeout"}),
    "garbage": ("os.write(1, bytes(range(256)) * 1000)\nos.write(2, b'\\xff\\x00' * 1000)", {"ok"}),
    "surrogates": ("print('\\ud800')", {"error"}),
    "many files": ("i = 0\nwhile True:\n    open(str(i), 'w').close()\n    i += 1", {"memory"}),
    "many large files": ("for i in range(100): open(str(i), 'wb').write(bytes(10**7))", {"error", "memory"}),
    "deleted files": (
        "files = []\nwhile True:\n    files.append(open('x', 'wb'))\n    os.unlink('x')\n"
        "    files[-1].write(bytes(10**7))\n    files[-1].flush()",
        {"error", "memory"},
    ),
    "files behind a closed door": (
        "i = 0\nwhile True:\n    os.mkdir(str(i), 0o300)\n    os.chdir(str(i))\n"
        "    open('x', 'wb').write(bytes(10**6))\n    i += 1",
        {"error", "memory"},
    ),
    "deletes its files": ("os.rmdir(os.getcwd())", {"error", "ok"}),
}
"""Program, and how it may end."""

DAEMON = """
import os, sys, time
mark = sys.stdin.read()
if os.fork() == 0:
    os.setsid()
    os.execv("/usr/bin/sleep", [mark, "1000"])
time.sleep(1000)
"""
"""Does not end; its child, in a session of its own, has the mark in its command line."""
