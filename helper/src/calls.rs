//! The table of system calls that are mediated: which of them, with which arguments, what kind of decision each needs, and its name in facts.
use dsh_policy::denial::Operation;

use crate::bpf::When;

/// What kind of decision a call needs, and so who enforces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Names and contents of files. Landlock enforces; the supervisor tells refusals.
    File,
    /// Mode, owner, times, attributes, flags. Nothing else enforces: the supervisor does the call itself on a pinned object.
    Metadata,
    /// A question about write access.
    Access,
    /// Reading: only when paths are hidden. The supervisor enforces.
    Read,
    /// Another process is the target. Landlock's scopes enforce signals; the supervisor the rest.
    Process,
    /// A signal to another process.
    Signal,
    /// A socket that the network axis may exclude.
    Socket,
    /// A socket that may name others when it sends: the supervisor has to know.
    Datagram,
    /// A socket address.
    Address,
    /// Closed to confined commands.
    Closed(Operation),
}

/// One entry of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// Number on this architecture.
    pub(crate) number: i64,
    /// Name in the kernel.
    pub(crate) name: &'static str,
    /// Kind of decision.
    pub(crate) class: Class,
    /// Which calls of this number matter.
    pub(crate) when: When,
}

const fn call(number: i64, name: &'static str, class: Class, when: When) -> Call {
    Call {
        number,
        name,
        class,
        when,
    }
}

/// A call that confined commands do not have, whatever its arguments.
const fn closed(number: i64, name: &'static str, operation: Operation) -> Call {
    call(number, name, Class::Closed(operation), When::Always)
}

/// Write intent in the flags of `open`: access mode (3 included: it opens for `ioctl`), creation, truncation, unnamed files.
pub(crate) const WRITE_INTENT: u32 =
    (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | (libc::O_TMPFILE & !libc::O_DIRECTORY)).cast_unsigned();
const NAMESPACE_FLAGS: u32 = 0x7e02_0000;
const NEW_TIME: u32 = 0x80;
const W_OK: u32 = 2;
const IOPRIO_WHO_USER: u32 = 3;
/// The bit that `SOCK_DGRAM` and `SOCK_RAW` have, and streams have not.
const DATAGRAM: u32 = 2;
/// `FS_IOC_SETFLAGS`, its 32-bit twin, `FS_IOC_FSSETXATTR`, `FS_IOC_SETVERSION`, the fscrypt and verity commands that change a file.
pub(crate) const FLAG_COMMANDS: &[u32] = &[0x4008_6602, 0x4004_6602, 0x401c_5820, 0x4008_7602];
/// `TIOCSTI` and `TIOCLINUX` type into a terminal on behalf of its user.
pub(crate) const TERMINAL_INJECTION: &[u32] = &[0x5412, 0x541c];
const PTRACE_ATTACH: &[u32] = &[16, 0x4206];
/// The Go runtime interrupts its own threads with SIGURG all the time; Landlock confines that without being told of.
const PREEMPTION: &[u32] = &[libc::SIGURG.cast_unsigned()];

/// Numbers of calls that the libc crate does not know yet (the same on every architecture).
pub(crate) const SYS_SETXATTRAT: i64 = 463;
pub(crate) const SYS_REMOVEXATTRAT: i64 = 466;
pub(crate) const SYS_FILE_SETATTR: i64 = 469;
const SYS_OPEN_TREE_ATTR: i64 = 467;

/// Calls that exist on every architecture.
const COMMON: &[Call] = &[
    call(libc::SYS_openat, "openat", Class::File, When::AnyBit(2, WRITE_INTENT)),
    call(libc::SYS_mkdirat, "mkdirat", Class::File, When::Always),
    call(libc::SYS_mknodat, "mknodat", Class::File, When::Always),
    call(libc::SYS_unlinkat, "unlinkat", Class::File, When::Always),
    call(libc::SYS_renameat2, "renameat2", Class::File, When::Always),
    call(libc::SYS_linkat, "linkat", Class::File, When::Always),
    call(libc::SYS_symlinkat, "symlinkat", Class::File, When::Always),
    call(libc::SYS_truncate, "truncate", Class::File, When::Always),
    call(libc::SYS_fchmod, "fchmod", Class::Metadata, When::Always),
    call(libc::SYS_fchmodat, "fchmodat", Class::Metadata, When::Always),
    call(libc::SYS_fchmodat2, "fchmodat2", Class::Metadata, When::Always),
    call(libc::SYS_fchown, "fchown", Class::Metadata, When::Always),
    call(libc::SYS_fchownat, "fchownat", Class::Metadata, When::Always),
    call(libc::SYS_utimensat, "utimensat", Class::Metadata, When::Always),
    call(libc::SYS_setxattr, "setxattr", Class::Metadata, When::Always),
    call(libc::SYS_lsetxattr, "lsetxattr", Class::Metadata, When::Always),
    call(libc::SYS_fsetxattr, "fsetxattr", Class::Metadata, When::Always),
    call(libc::SYS_removexattr, "removexattr", Class::Metadata, When::Always),
    call(libc::SYS_lremovexattr, "lremovexattr", Class::Metadata, When::Always),
    call(libc::SYS_fremovexattr, "fremovexattr", Class::Metadata, When::Always),
    call(SYS_SETXATTRAT, "setxattrat", Class::Metadata, When::Always),
    call(SYS_REMOVEXATTRAT, "removexattrat", Class::Metadata, When::Always),
    call(SYS_FILE_SETATTR, "file_setattr", Class::Metadata, When::Always),
    call(libc::SYS_ioctl, "ioctl", Class::Metadata, When::OneOf(1, FLAG_COMMANDS)),
    call(libc::SYS_faccessat, "faccessat", Class::Access, When::AnyBit(2, W_OK)),
    call(libc::SYS_faccessat2, "faccessat2", Class::Access, When::AnyBit(2, W_OK)),
    call(libc::SYS_kill, "kill", Class::Signal, When::Always),
    call(libc::SYS_tkill, "tkill", Class::Signal, When::NoneOf(1, PREEMPTION)),
    call(libc::SYS_tgkill, "tgkill", Class::Signal, When::NoneOf(2, PREEMPTION)),
    call(
        libc::SYS_rt_sigqueueinfo,
        "rt_sigqueueinfo",
        Class::Signal,
        When::Always,
    ),
    call(
        libc::SYS_rt_tgsigqueueinfo,
        "rt_tgsigqueueinfo",
        Class::Signal,
        When::Always,
    ),
    call(
        libc::SYS_pidfd_send_signal,
        "pidfd_send_signal",
        Class::Signal,
        When::Always,
    ),
    call(
        libc::SYS_prlimit64,
        "prlimit64",
        Class::Process,
        When::NotZeroAndNotNull(0, 2),
    ),
    call(libc::SYS_setpriority, "setpriority", Class::Process, When::NotZero(1)),
    call(libc::SYS_ioprio_set, "ioprio_set", Class::Process, When::NotZero(1)),
    call(
        libc::SYS_sched_setaffinity,
        "sched_setaffinity",
        Class::Process,
        When::NotZero(0),
    ),
    call(
        libc::SYS_sched_setparam,
        "sched_setparam",
        Class::Process,
        When::NotZero(0),
    ),
    call(
        libc::SYS_sched_setscheduler,
        "sched_setscheduler",
        Class::Process,
        When::NotZero(0),
    ),
    call(
        libc::SYS_sched_setattr,
        "sched_setattr",
        Class::Process,
        When::NotZero(0),
    ),
    call(
        libc::SYS_migrate_pages,
        "migrate_pages",
        Class::Process,
        When::NotZero(0),
    ),
    call(libc::SYS_move_pages, "move_pages", Class::Process, When::NotZero(0)),
    call(
        libc::SYS_process_vm_readv,
        "process_vm_readv",
        Class::Process,
        When::Always,
    ),
    call(
        libc::SYS_process_vm_writev,
        "process_vm_writev",
        Class::Process,
        When::Always,
    ),
    call(
        libc::SYS_ptrace,
        "ptrace",
        Class::Process,
        When::OneOf(0, PTRACE_ATTACH),
    ),
    call(libc::SYS_pidfd_getfd, "pidfd_getfd", Class::Process, When::Always),
    call(
        libc::SYS_process_madvise,
        "process_madvise",
        Class::Process,
        When::Always,
    ),
    call(
        libc::SYS_process_mrelease,
        "process_mrelease",
        Class::Process,
        When::Always,
    ),
    call(libc::SYS_connect, "connect", Class::Address, When::Always),
    call(libc::SYS_bind, "bind", Class::Address, When::Always),
    call(libc::SYS_sendto, "sendto", Class::Address, When::NotNull(4)),
    call(
        libc::SYS_unshare,
        "unshare",
        Class::Closed(Operation::Namespace),
        When::AnyBit(0, NAMESPACE_FLAGS | NEW_TIME),
    ),
    call(
        libc::SYS_clone,
        "clone",
        Class::Closed(Operation::Namespace),
        When::AnyBit(0, NAMESPACE_FLAGS),
    ),
    closed(libc::SYS_setns, "setns", Operation::Namespace),
    closed(libc::SYS_mount, "mount", Operation::Mount),
    closed(libc::SYS_umount2, "umount2", Operation::Mount),
    closed(libc::SYS_pivot_root, "pivot_root", Operation::Mount),
    closed(libc::SYS_chroot, "chroot", Operation::Mount),
    closed(libc::SYS_open_tree, "open_tree", Operation::Mount),
    closed(SYS_OPEN_TREE_ATTR, "open_tree_attr", Operation::Mount),
    closed(libc::SYS_move_mount, "move_mount", Operation::Mount),
    closed(libc::SYS_fsopen, "fsopen", Operation::Mount),
    closed(libc::SYS_fsmount, "fsmount", Operation::Mount),
    closed(libc::SYS_fspick, "fspick", Operation::Mount),
    closed(libc::SYS_fsconfig, "fsconfig", Operation::Mount),
    closed(libc::SYS_mount_setattr, "mount_setattr", Operation::Mount),
    closed(libc::SYS_swapon, "swapon", Operation::Mount),
    closed(libc::SYS_swapoff, "swapoff", Operation::Mount),
    closed(libc::SYS_quotactl, "quotactl", Operation::Mount),
    closed(libc::SYS_quotactl_fd, "quotactl_fd", Operation::Mount),
    closed(libc::SYS_io_uring_setup, "io_uring_setup", Operation::KernelInterface),
    closed(libc::SYS_bpf, "bpf", Operation::KernelInterface),
    closed(libc::SYS_perf_event_open, "perf_event_open", Operation::KernelInterface),
    closed(libc::SYS_userfaultfd, "userfaultfd", Operation::KernelInterface),
    closed(
        libc::SYS_open_by_handle_at,
        "open_by_handle_at",
        Operation::KernelInterface,
    ),
    closed(libc::SYS_fanotify_init, "fanotify_init", Operation::KernelInterface),
    closed(libc::SYS_kexec_load, "kexec_load", Operation::KernelInterface),
    closed(libc::SYS_init_module, "init_module", Operation::KernelInterface),
    closed(libc::SYS_finit_module, "finit_module", Operation::KernelInterface),
    closed(libc::SYS_delete_module, "delete_module", Operation::KernelInterface),
    closed(libc::SYS_acct, "acct", Operation::KernelInterface),
    closed(libc::SYS_keyctl, "keyctl", Operation::Ipc),
    closed(libc::SYS_add_key, "add_key", Operation::Ipc),
    closed(libc::SYS_request_key, "request_key", Operation::Ipc),
    closed(libc::SYS_shmget, "shmget", Operation::Ipc),
    closed(libc::SYS_shmat, "shmat", Operation::Ipc),
    closed(libc::SYS_shmctl, "shmctl", Operation::Ipc),
    closed(libc::SYS_msgget, "msgget", Operation::Ipc),
    closed(libc::SYS_msgsnd, "msgsnd", Operation::Ipc),
    closed(libc::SYS_msgrcv, "msgrcv", Operation::Ipc),
    closed(libc::SYS_msgctl, "msgctl", Operation::Ipc),
    closed(libc::SYS_semget, "semget", Operation::Ipc),
    closed(libc::SYS_semop, "semop", Operation::Ipc),
    closed(libc::SYS_semtimedop, "semtimedop", Operation::Ipc),
    closed(libc::SYS_semctl, "semctl", Operation::Ipc),
    closed(libc::SYS_mq_unlink, "mq_unlink", Operation::Ipc),
];

/// Calls whose second argument says "my own" when it is zero, of a kind that takes in processes outside: everything of a user.
const OF_USER: &[Call] = &[
    call(
        libc::SYS_setpriority,
        "setpriority",
        Class::Process,
        When::OneOf(0, &[libc::PRIO_USER]),
    ),
    call(
        libc::SYS_ioprio_set,
        "ioprio_set",
        Class::Process,
        When::OneOf(0, &[IOPRIO_WHO_USER]),
    ),
];

/// Older forms that only some architectures have.
#[cfg(target_arch = "x86_64")]
const OLDER: &[Call] = &[
    call(libc::SYS_open, "open", Class::File, When::AnyBit(1, WRITE_INTENT)),
    call(libc::SYS_creat, "creat", Class::File, When::Always),
    call(libc::SYS_mkdir, "mkdir", Class::File, When::Always),
    call(libc::SYS_mknod, "mknod", Class::File, When::Always),
    call(libc::SYS_unlink, "unlink", Class::File, When::Always),
    call(libc::SYS_rmdir, "rmdir", Class::File, When::Always),
    call(libc::SYS_rename, "rename", Class::File, When::Always),
    call(libc::SYS_renameat, "renameat", Class::File, When::Always),
    call(libc::SYS_link, "link", Class::File, When::Always),
    call(libc::SYS_symlink, "symlink", Class::File, When::Always),
    call(libc::SYS_chmod, "chmod", Class::Metadata, When::Always),
    call(libc::SYS_chown, "chown", Class::Metadata, When::Always),
    call(libc::SYS_lchown, "lchown", Class::Metadata, When::Always),
    call(libc::SYS_utime, "utime", Class::Metadata, When::Always),
    call(libc::SYS_utimes, "utimes", Class::Metadata, When::Always),
    call(libc::SYS_futimesat, "futimesat", Class::Metadata, When::Always),
    call(libc::SYS_access, "access", Class::Access, When::AnyBit(1, W_OK)),
    closed(libc::SYS_kexec_file_load, "kexec_file_load", Operation::KernelInterface),
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[Call] = &[call(libc::SYS_renameat, "renameat", Class::File, When::Always)];

/// Sockets, notified only when the network is restricted. `AF_UNIX` is never excluded by kind.
const SOCKETS: &[Call] = &[call(
    libc::SYS_socket,
    "socket",
    Class::Socket,
    When::NoneOf(0, &[libc::AF_UNIX.cast_unsigned()]),
)];

/// Datagram sockets, of which the supervisor has to know whether they are of the Unix family, and the calls that send by name with their arguments in memory.
/// Notified only where the supervisor can send by itself.
const SENDS: &[Call] = &[
    call(libc::SYS_socket, "socket", Class::Datagram, When::AnyBit(1, DATAGRAM)),
    call(
        libc::SYS_socketpair,
        "socketpair",
        Class::Datagram,
        When::AnyBit(1, DATAGRAM),
    ),
    call(libc::SYS_sendmsg, "sendmsg", Class::Address, When::Always),
    call(libc::SYS_sendmmsg, "sendmmsg", Class::Address, When::Always),
];

/// Reading opens, notified only when paths are hidden.
const READS: &[Call] = &[
    call(libc::SYS_openat, "openat", Class::Read, When::Always),
    #[cfg(target_arch = "x86_64")]
    call(libc::SYS_open, "open", Class::Read, When::Always),
];

/// What of the table a plan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scope {
    /// The network is restricted.
    pub(crate) sockets: bool,
    /// Paths are hidden from reading.
    pub(crate) reads: bool,
    /// The supervisor can take over sockets, and so send by itself.
    pub(crate) sends: bool,
    /// System V objects and message queues are those of the host.
    pub(crate) ipc: bool,
}

/// The entries that a plan needs, in no particular order; a number appears once for each of its tests.
pub(crate) fn entries(scope: Scope) -> impl Iterator<Item = &'static Call> {
    let sockets = if scope.sockets { SOCKETS } else { &[] };
    let reads = if scope.reads { READS } else { &[] };
    let sends = if scope.sends { SENDS } else { &[] };
    let private = move |call: &&Call| !scope.ipc && is_ipc_object(call);
    let parts = [COMMON, OF_USER, OLDER, sockets, reads, sends];
    parts.into_iter().flatten().filter(move |call| !private(call))
}

/// Whether a call is about objects of an ipc namespace. Keyrings are not in one.
fn is_ipc_object(call: &Call) -> bool {
    call.class == Class::Closed(Operation::Ipc) && !matches!(call.name, "keyctl" | "add_key" | "request_key")
}

/// The entry of a number that was notified.
pub(crate) fn find(number: i64) -> Option<&'static Call> {
    COMMON
        .iter()
        .chain(OLDER)
        .chain(SOCKETS)
        .chain(SENDS)
        .find(|call| call.number == number)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn no_number_is_in_the_table_twice() {
        let tables = COMMON.iter().chain(OLDER).chain(SOCKETS);
        let mut numbers: Vec<_> = tables.map(|call| call.number).collect();
        let count = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), count);
    }

    #[test]
    fn plain_reading_is_not_write_intent() {
        let reading = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_DIRECTORY | libc::O_PATH | libc::O_NOFOLLOW;
        assert_eq!(reading.cast_unsigned() & WRITE_INTENT, 0);
        assert_ne!(libc::O_TMPFILE.cast_unsigned() & WRITE_INTENT, 0);
    }
}
