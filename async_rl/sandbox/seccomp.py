"""System calls that no program in a sandbox may make, as a seccomp filter in BPF; bubblewrap installs it.

Namespaces hide files, processes and networks. The filter refuses what they do not cover: socket families that have no
namespace (a virtual machine's vsock reaches its host), memory that no limit counts, and calls that are only a larger
surface of the kernel, such as further namespaces.
"""

import errno
import platform
import struct

CLONE_NEW = 0x7E020000 | 0x80
"""Every flag of clone that makes a namespace."""

ALLOWED_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: the sandbox has a network namespace without interfaces."""

_SAME_EVERYWHERE = {
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
}

_NAMES = (
    *("shmget", "semget", "msgget", "mq_open", "memfd_create", "ptrace", "process_vm_readv", "process_vm_writev"),
    *("kcmp", "syslog", "chroot", "pivot_root", "mount", "umount2", "swapon", "swapoff", "reboot", "acct", "quotactl"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "add_key", "request_key"),
    *("keyctl", "unshare", "setns", "perf_event_open", "name_to_handle_at", "open_by_handle_at", "bpf", "userfaultfd"),
)

_NUMBERS = {
    "x86_64": (
        *(29, 64, 68, 240, 319, 101, 310, 311, 312, 103, 161, 155, 165),
        *(166, 167, 168, 169, 163, 179, 175, 313, 176, 246, 320, 248),
        *(249, 250, 272, 308, 298, 303, 304, 321, 323),
    ),
    "aarch64": (
        *(194, 190, 186, 180, 279, 117, 270, 271, 272, 116, 51, 41, 40),
        *(39, 224, 225, 142, 89, 60, 105, 273, 106, 104, 294, 217),
        *(218, 219, 97, 268, 241, 264, 265, 280, 282),
    ),
}
"""The numbers of `_NAMES` on each machine."""

# machine -> (AUDIT_ARCH, clone, socket); clone3 is 435 on both.
_MACHINES = {"x86_64": (0xC000003E, 56, 41), "aarch64": (0xC00000B7, 220, 198)}
_CLONE3 = 435
_X32 = 0x40000000

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGUMENT_0 = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def filter_program() -> bytes | None:
    """The filter for this machine, as an array of `struct sock_filter`; None where its numbers are not known."""
    machine = platform.machine()
    if machine not in _MACHINES:
        return None
    arch, clone, socket = _MACHINES[machine]
    denied = [*zip(_NAMES, _NUMBERS[machine], strict=True), *_SAME_EVERYWHERE.items()]
    code = [
        _op(_LOAD, _ARCH),
        _op(_JUMP_EQ, arch, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NR),
        *_refuse_if(_JUMP_GE, _X32, errno.ENOSYS),
        # glibc falls back to clone, whose flags can be read.
        *_refuse_if(_JUMP_EQ, _CLONE3, errno.ENOSYS),
    ]
    for _, number in denied:
        code += _refuse_if(_JUMP_EQ, number, errno.EPERM)
    code += [
        *(_op(_JUMP_EQ, clone, 0, 4), _op(_LOAD, _ARGUMENT_0), _op(_JUMP_SET, CLONE_NEW, 0, 1)),
        *(_op(_RETURN, _ERRNO | errno.EPERM), _op(_RETURN, _ALLOW)),
        *(_op(_JUMP_EQ, socket, 1, 0), _op(_RETURN, _ALLOW), _op(_LOAD, _ARGUMENT_0)),
    ]
    for family in ALLOWED_FAMILIES:
        code += [_op(_JUMP_EQ, family, 0, 1), _op(_RETURN, _ALLOW)]
    code.append(_op(_RETURN, _ERRNO | errno.EAFNOSUPPORT))
    return b"".join(code)


def _refuse_if(jump: int, value: int, error: int) -> list[bytes]:
    return [_op(jump, value, 0, 1), _op(_RETURN, _ERRNO | error)]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
