"""System calls that no program in a sandbox may make, as a seccomp filter in BPF.

Namespaces, or Landlock, hide files, processes and networks. The filter refuses what they do not cover: memory that no
limit counts, sockets, whose families reach further than namespaces do (vsock reaches a virtual machine's host), limits
and priorities of other processes of the same user, and calls that are only a larger surface of the kernel, such as more
namespaces.

Memory that no limit counts: shared anonymous pages, which stay as long as one page of their mapping does; files of
`memfd`, System V's segments and queues; pages that a pipe holds after `vmsplice`; huge pages; the queue of a socket
that listens, or of one for datagrams; watches and rules that the kernel keeps. Connected pairs of sockets are left,
with buffers of a size that is known: `usage.py` counts them.
"""

import errno
import platform
import struct

CLONE_NEW = 0x7E020000 | 0x80
"""Every flag of clone that makes a namespace."""

MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
F_SETPIPE_SZ = 1031
AF_UNIX, SOCK_STREAM, SOCK_TYPES = 1, 1, 0xF

_SAME_EVERYWHERE = {
    "pidfd_open": 434,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "memfd_secret": 447,
    "landlock_create_ruleset": 444,
}

_NAMES = (
    *("shmget", "semget", "msgget", "mq_open", "memfd_create", "ptrace", "process_vm_readv", "process_vm_writev"),
    *("kcmp", "syslog", "chroot", "pivot_root", "mount", "umount2", "swapon", "swapoff", "reboot", "acct", "quotactl"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "add_key", "request_key"),
    *("keyctl", "unshare", "setns", "perf_event_open", "name_to_handle_at", "open_by_handle_at", "bpf", "userfaultfd"),
    *("move_pages", "migrate_pages", "socket", "setsockopt", "vmsplice"),
    *("inotify_add_watch", "fanotify_init", "io_setup"),
)

_NUMBERS = {
    "x86_64": (
        *(29, 64, 68, 240, 319, 101, 310, 311, 312, 103, 161, 155, 165),
        *(166, 167, 168, 169, 163, 179, 175, 313, 176, 246, 320, 248),
        *(249, 250, 272, 308, 298, 303, 304, 321, 323, 279, 256),
        *(41, 54, 278, 254, 300, 206),
    ),
    "aarch64": (
        *(194, 190, 186, 180, 279, 117, 270, 271, 272, 116, 51, 41, 40),
        *(39, 224, 225, 142, 89, 60, 105, 273, 106, 104, 294, 217),
        *(218, 219, 97, 268, 241, 264, 265, 280, 282, 239, 238),
        *(198, 208, 75, 27, 262, 0),
    ),
}
"""The numbers of `_NAMES` on each machine."""

_OWN = (
    *(
        ("prlimit64", 0),
        ("sched_setaffinity", 0),
        ("sched_setscheduler", 0),
        ("sched_setparam", 0),
        ("sched_setattr", 0),
    ),
    *(("setpriority", 1), ("ioprio_set", 1)),
)
"""Calls that name a process in this argument: 0, the caller itself, is allowed."""

_OWN_NUMBERS = {"x86_64": (302, 203, 144, 142, 314, 141, 251), "aarch64": (261, 122, 119, 118, 274, 140, 30)}

_CHANGES_METADATA = {
    "x86_64": (90, 91, 92, 93, 94, 132, 235, 260, 261, 268, 280, 188, 189, 190, 197, 198, 199, 452, 463, 466, 469),
    "aarch64": (52, 53, 54, 55, 88, 5, 6, 7, 14, 15, 16, 452, 463, 466, 469),
}
"""chmod, chown, utime, setxattr, removexattr and their kin, up to file_setattr."""

# machine -> (AUDIT_ARCH, clone, mmap, fcntl, socketpair); clone3 is 435 on both.
_MACHINES = {"x86_64": (0xC000003E, 56, 9, 72, 53), "aarch64": (0xC00000B7, 220, 222, 25, 199)}
_CLONE3 = 435
_X32 = 0x40000000

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NR, _ARCH, _ARGUMENT_0 = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def has_filter() -> bool:
    """Whether the numbers of the calls of this machine are known."""
    return platform.machine() in _MACHINES


def filter_program(*, keeps_metadata: bool = False) -> bytes:
    """The filter for this machine, as an array of `struct sock_filter`.

    Args:
        keeps_metadata: also refuse to change modes, owners, times and attributes of files, which Landlock allows for
            every file of the user.
    """
    machine = platform.machine()
    arch, clone, mmap, fcntl, socketpair = _MACHINES[machine]
    denied = [*_NUMBERS[machine], *_SAME_EVERYWHERE.values(), *(_CHANGES_METADATA[machine] if keeps_metadata else ())]
    code = [
        _op(_LOAD, _ARCH),
        _op(_JUMP_EQ, arch, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NR),
        *_refuse_if(_JUMP_GE, _X32, errno.ENOSYS),
        # glibc falls back to clone, whose flags can be read.
        *_refuse_if(_JUMP_EQ, _CLONE3, errno.ENOSYS),
    ]
    for number in denied:
        code += _refuse_if(_JUMP_EQ, number, errno.EPERM)
    for (_, argument), number in zip(_OWN, _OWN_NUMBERS[machine], strict=True):
        code += _with_argument(number, argument, *_refuse_unless(0, errno.EPERM))
    code += [
        *_with_argument(clone, 0, *_refuse_if(_JUMP_SET, CLONE_NEW, errno.EPERM)),
        *_with_argument(
            *(mmap, 3),
            *_refuse_if(_JUMP_SET, MAP_HUGETLB, errno.EPERM),
            *(_op(_JUMP_SET, MAP_ANONYMOUS, 0, 2), *_refuse_if(_JUMP_SET, MAP_SHARED, errno.EPERM)),
        ),
        *_with_argument(fcntl, 1, *_refuse_if(_JUMP_EQ, F_SETPIPE_SZ, errno.EPERM)),
        *_with_argument(
            *(socketpair, 0),
            *_refuse_unless(AF_UNIX, errno.EAFNOSUPPORT),
            *(_op(_LOAD, _ARGUMENT_0 + 8), _op(_AND, SOCK_TYPES), *_refuse_unless(SOCK_STREAM, errno.EPERM)),
        ),
        _op(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _with_argument(number: int, argument: int, *code: bytes) -> list[bytes]:
    """`code` about an argument of this call, which is allowed at its end; for any other call nothing."""
    return [
        _op(_JUMP_EQ, number, 0, len(code) + 2),
        _op(_LOAD, _ARGUMENT_0 + 8 * argument),
        *code,
        _op(_RETURN, _ALLOW),
    ]


def _refuse_unless(value: int, error: int) -> list[bytes]:
    return [_op(_JUMP_EQ, value, 1, 0), _op(_RETURN, _ERRNO | error)]


def _refuse_if(jump: int, value: int, error: int) -> list[bytes]:
    return [_op(jump, value, 0, 1), _op(_RETURN, _ERRNO | error)]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
