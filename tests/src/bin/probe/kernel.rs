//! Doors that are no files: processes, namespaces, mounts, interfaces of the kernel.
use std::cell::Cell;
use std::ffi::CString;

use super::{Answer, CWD, Door, at, magic, number, open, path, sys};

const SYS_OPEN_TREE_ATTR: i64 = 467;
const BAD: usize = usize::MAX;

fn pidfd(argument: &CString) -> Answer {
    sys(libc::SYS_pidfd_open, &[number(argument), 0])
}
fn unshare(flag: i32) -> Answer {
    sys(libc::SYS_unshare, &[flag as usize])
}
/// `struct sched_attr` of the batch class with the least weight.
fn batch() -> [u32; 12] {
    [48, libc::SCHED_BATCH as u32, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]
}
/// A `siginfo_t` that says `SI_QUEUE`.
fn queued() -> [i32; 32] {
    let mut information = [0; 32];
    (information[0], information[2]) = (libc::SIGUSR1, -1);
    information
}

/// Other processes.
pub(super) const PROCESSES: &[Door] = &[
    ("kill-term", 1, |a| {
        sys(libc::SYS_kill, &[number(&a[0]), libc::SIGTERM as usize])
    }),
    ("kill-zero", 1, |a| sys(libc::SYS_kill, &[number(&a[0]), 0])),
    ("kill-group", 1, |a| {
        sys(libc::SYS_kill, &[number(&a[0]).wrapping_neg(), libc::SIGUSR1 as usize])
    }),
    ("kill-all-zero", 0, |_| sys(libc::SYS_kill, &[BAD, 0])),
    ("tkill", 1, |a| {
        sys(libc::SYS_tkill, &[number(&a[0]), libc::SIGUSR1 as usize])
    }),
    ("tgkill", 1, |a| {
        let pid = number(&a[0]);
        sys(libc::SYS_tgkill, &[pid, pid, libc::SIGUSR1 as usize])
    }),
    ("tgkill-urgent", 1, |a| {
        let pid = number(&a[0]);
        sys(libc::SYS_tgkill, &[pid, pid, libc::SIGURG as usize])
    }),
    ("sigqueue", 1, |a| {
        sys(
            libc::SYS_rt_sigqueueinfo,
            &[number(&a[0]), libc::SIGUSR1 as usize, at(&queued())],
        )
    }),
    ("tgsigqueue", 1, |a| {
        let pid = number(&a[0]);
        sys(
            libc::SYS_rt_tgsigqueueinfo,
            &[pid, pid, libc::SIGUSR1 as usize, at(&queued())],
        )
    }),
    ("pidfd-signal", 1, |a| {
        sys(
            libc::SYS_pidfd_send_signal,
            &[pidfd(&a[0])?, libc::SIGUSR1 as usize, 0, 0],
        )
    }),
    ("setpriority", 1, |a| {
        sys(libc::SYS_setpriority, &[libc::PRIO_PROCESS as usize, number(&a[0]), 19])
    }),
    ("setpriority-group", 1, |a| {
        sys(libc::SYS_setpriority, &[libc::PRIO_PGRP as usize, number(&a[0]), 19])
    }),
    ("setpriority-user", 0, |_| {
        let user = sys(libc::SYS_geteuid, &[])?;
        sys(libc::SYS_setpriority, &[libc::PRIO_USER as usize, user, 19])
    }),
    // Zero is the caller's own user, and so everything that the user runs.
    ("setpriority-own-user", 0, |_| {
        sys(libc::SYS_setpriority, &[libc::PRIO_USER as usize, 0, 19])
    }),
    ("ioprio-own-user", 0, |_| sys(libc::SYS_ioprio_set, &[3, 0, 3 << 13])),
    ("ioprio-set", 1, |a| {
        sys(libc::SYS_ioprio_set, &[1, number(&a[0]), 3 << 13])
    }),
    ("affinity", 1, |a| {
        sys(libc::SYS_sched_setaffinity, &[number(&a[0]), 8, at(&1u64)])
    }),
    ("setscheduler", 1, |a| {
        sys(
            libc::SYS_sched_setscheduler,
            &[number(&a[0]), libc::SCHED_IDLE as usize, at(&0u64)],
        )
    }),
    ("setparam", 1, |a| {
        sys(libc::SYS_sched_setparam, &[number(&a[0]), at(&0u64)])
    }),
    ("setattr", 1, |a| {
        sys(libc::SYS_sched_setattr, &[number(&a[0]), at(&batch()), 0])
    }),
    ("prlimit-set", 1, |a| {
        let limit = [7u64, 7];
        sys(
            libc::SYS_prlimit64,
            &[number(&a[0]), libc::RLIMIT_CORE as usize, at(&limit), 0],
        )
    }),
    ("ptrace-attach", 1, |a| {
        sys(libc::SYS_ptrace, &[libc::PTRACE_ATTACH as usize, number(&a[0]), 0, 0])
    }),
    ("ptrace-seize", 1, |a| {
        sys(libc::SYS_ptrace, &[libc::PTRACE_SEIZE as usize, number(&a[0]), 0, 0])
    }),
    ("ptrace-traceme", 0, |_| {
        sys(libc::SYS_ptrace, &[libc::PTRACE_TRACEME as usize, 0, 0, 0])
    }),
    ("vm-read", 2, |a| vm(libc::SYS_process_vm_readv, &a[0], &a[1])),
    ("vm-write", 2, |a| vm(libc::SYS_process_vm_writev, &a[0], &a[1])),
    ("pidfd-getfd", 1, |a| sys(libc::SYS_pidfd_getfd, &[pidfd(&a[0])?, 0, 0])),
    ("madvise", 2, |a| {
        let part = [number(&a[1]), 4096];
        sys(
            libc::SYS_process_madvise,
            &[pidfd(&a[0])?, at(&part), 1, libc::MADV_COLD as usize, 0],
        )
    }),
    ("mrelease", 1, |a| sys(libc::SYS_process_mrelease, &[pidfd(&a[0])?, 0])),
    ("move-pages", 1, |a| {
        sys(libc::SYS_move_pages, &[number(&a[0]), 0, 0, 0, 0, 0])
    }),
    ("migrate-pages", 1, |a| {
        sys(libc::SYS_migrate_pages, &[number(&a[0]), 1, at(&1u64), at(&1u64)])
    }),
    ("kcmp", 1, |a| {
        sys(libc::SYS_kcmp, &[number(&a[0]), sys(libc::SYS_getpid, &[])?, 2, 0, 0])
    }),
    ("owner-sigio", 1, |a| {
        // Data on a pipe whose owner is somebody else's process would signal it.
        let pair = Cell::new([0i32; 2]); // the kernel writes to it
        sys(libc::SYS_pipe2, &[at(&pair), libc::O_NONBLOCK as usize])?;
        let [reader, writer] = pair.get().map(|fd| fd as usize);
        sys(libc::SYS_fcntl, &[reader, libc::F_SETOWN as usize, number(&a[0])])?;
        sys(libc::SYS_fcntl, &[reader, 10, libc::SIGUSR1 as usize])?;
        sys(
            libc::SYS_fcntl,
            &[reader, libc::F_SETFL as usize, libc::O_ASYNC as usize],
        )?;
        sys(libc::SYS_write, &[writer, at(b"x"), 1])
    }),
];

fn vm(call: i64, pid: &CString, address: &CString) -> Answer {
    let byte = Cell::new([b'!'; 1]);
    let local = [at(&byte), 1];
    let remote = [number(address), 1];
    sys(call, &[number(pid), at(&local), 1, at(&remote), 1, 0])
}

/// Namespaces and mounts.
pub(super) const NAMESPACES: &[Door] = &[
    ("unshare-user", 0, |_| unshare(libc::CLONE_NEWUSER)),
    ("unshare-mount", 0, |_| unshare(libc::CLONE_NEWNS)),
    ("unshare-pid", 0, |_| unshare(libc::CLONE_NEWPID)),
    ("unshare-net", 0, |_| unshare(libc::CLONE_NEWNET)),
    ("unshare-ipc", 0, |_| unshare(libc::CLONE_NEWIPC)),
    ("unshare-uts", 0, |_| unshare(libc::CLONE_NEWUTS)),
    ("unshare-cgroup", 0, |_| unshare(libc::CLONE_NEWCGROUP)),
    ("unshare-time", 0, |_| unshare(0x80)),
    ("unshare-user-mount", 0, |_| {
        unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS)
    }),
    // Without a stack of its own the child returns here and prints; the answer is the parent's, or the one error.
    ("clone-user", 0, |_| {
        sys(
            libc::SYS_clone,
            &[(libc::CLONE_NEWUSER | libc::SIGCHLD) as usize, 0, 0, 0, 0],
        )
    }),
    ("clone3-user", 0, |_| {
        let mut arguments = [0u64; 11];
        (arguments[0], arguments[4]) = (libc::CLONE_NEWUSER as u64, libc::SIGCHLD as u64);
        sys(libc::SYS_clone3, &[at(&arguments), size_of_val(&arguments)])
    }),
    ("setns", 1, |a| {
        sys(
            libc::SYS_setns,
            &[open(&a[0], libc::O_RDONLY)?, libc::CLONE_NEWUTS as usize],
        )
    }),
    ("mount-tmpfs", 1, |a| {
        sys(libc::SYS_mount, &[at(b"x\0"), path(&a[0]), at(b"tmpfs\0"), 0, 0])
    }),
    ("mount-bind", 2, |a| {
        sys(
            libc::SYS_mount,
            &[path(&a[0]), path(&a[1]), 0, libc::MS_BIND as usize, 0],
        )
    }),
    ("umount", 1, |a| sys(libc::SYS_umount2, &[path(&a[0]), 2])),
    ("pivot-root", 1, |a| {
        sys(libc::SYS_pivot_root, &[path(&a[0]), path(&a[0])])
    }),
    ("chroot", 1, |a| sys(libc::SYS_chroot, &[path(&a[0])])),
    ("open-tree", 1, |a| sys(libc::SYS_open_tree, &[CWD, path(&a[0]), 1])),
    ("open-tree-attr", 1, |a| {
        sys(SYS_OPEN_TREE_ATTR, &[CWD, path(&a[0]), 1, 0, 0])
    }),
    ("move-mount", 1, |a| {
        sys(libc::SYS_move_mount, &[CWD, path(&a[0]), CWD, path(&a[0]), 0])
    }),
    ("fsopen", 0, |_| sys(libc::SYS_fsopen, &[at(b"tmpfs\0"), 0])),
    ("fsmount", 0, |_| sys(libc::SYS_fsmount, &[BAD, 0, 0])),
    ("fspick", 1, |a| sys(libc::SYS_fspick, &[CWD, path(&a[0]), 0])),
    ("fsconfig", 0, |_| sys(libc::SYS_fsconfig, &[BAD, 6, 0, 0, 0])),
    ("mount-setattr", 1, |a| {
        let attributes = [1u64, 0, 0, 0];
        sys(libc::SYS_mount_setattr, &[CWD, path(&a[0]), 0, at(&attributes), 32])
    }),
    ("swapon", 1, |a| sys(libc::SYS_swapon, &[path(&a[0]), 0])),
    ("swapoff", 1, |a| sys(libc::SYS_swapoff, &[path(&a[0])])),
    ("quotactl", 0, |_| sys(libc::SYS_quotactl, &[0x8000_0700, 0, 0, 0])),
];

/// System V objects, queues, keys.
pub(super) const IPC: &[Door] = &[
    ("shmget", 0, |_| sys(libc::SYS_shmget, &[0, 4096, 0o1600])),
    ("shmat", 1, |a| sys(libc::SYS_shmat, &[number(&a[0]), 0, 0])),
    ("shmctl-remove", 1, |a| {
        sys(libc::SYS_shmctl, &[number(&a[0]), libc::IPC_RMID as usize, 0])
    }),
    ("msgget", 1, |a| sys(libc::SYS_msgget, &[number(&a[0]), 0])),
    ("msgsnd", 1, |a| {
        let message = [1u64, 0];
        sys(
            libc::SYS_msgsnd,
            &[number(&a[0]), at(&message), 1, libc::IPC_NOWAIT as usize],
        )
    }),
    ("msgrcv", 1, |a| {
        let message = Cell::new([0u64; 9]);
        sys(
            libc::SYS_msgrcv,
            &[number(&a[0]), at(&message), 8, 0, libc::IPC_NOWAIT as usize],
        )
    }),
    ("msgctl-remove", 1, |a| {
        sys(libc::SYS_msgctl, &[number(&a[0]), libc::IPC_RMID as usize, 0])
    }),
    ("semget", 0, |_| sys(libc::SYS_semget, &[0, 1, 0o1600])),
    ("semop", 1, |a| {
        let operation = [0u16, 1, 0o4000];
        sys(libc::SYS_semop, &[number(&a[0]), at(&operation), 1])
    }),
    ("semctl-set", 1, |a| sys(libc::SYS_semctl, &[number(&a[0]), 0, 16, 7])),
    ("mq-open", 1, |a| {
        sys(
            libc::SYS_mq_open,
            &[path(&a[0]), (libc::O_CREAT | libc::O_RDWR) as usize, 0o600, 0],
        )
    }),
    ("mq-unlink", 1, |a| sys(libc::SYS_mq_unlink, &[path(&a[0])])),
    ("add-key", 0, |_| {
        sys(
            libc::SYS_add_key,
            &[at(b"user\0"), at(b"dsh\0"), at(b"x"), 1, -4isize as usize],
        )
    }),
    ("keyctl", 0, |_| sys(libc::SYS_keyctl, &[0, -4isize as usize, 1])),
    ("request-key", 0, |_| {
        sys(libc::SYS_request_key, &[at(b"user\0"), at(b"dsh-none\0"), 0, 0])
    }),
];

/// Interfaces that are closed to confined commands, or ask for powers that they have not.
pub(super) const INTERFACES: &[Door] = &[
    ("io-uring", 0, |_| {
        let parameters = Cell::new([0u64; 15]); // the kernel writes to it
        sys(libc::SYS_io_uring_setup, &[1, at(&parameters)])
    }),
    ("bpf", 0, |_| {
        let attributes = [2u32, 4, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        sys(libc::SYS_bpf, &[0, at(&attributes), 48])
    }),
    ("perf", 0, |_| {
        let mut attributes = [0u32; 32];
        (attributes[0], attributes[1]) = (1, 128);
        sys(libc::SYS_perf_event_open, &[at(&attributes), 0, BAD, BAD, 0])
    }),
    ("userfaultfd", 0, |_| sys(libc::SYS_userfaultfd, &[1])),
    ("open-by-handle", 0, |_| {
        let handle = [8u32, 1, 2, 0];
        sys(libc::SYS_open_by_handle_at, &[CWD, at(&handle), 0])
    }),
    ("fanotify", 0, |_| sys(libc::SYS_fanotify_init, &[0x200, 0])),
    ("kexec", 0, |_| sys(libc::SYS_kexec_load, &[0, 0, 0, 0])),
    ("init-module", 0, |_| {
        sys(libc::SYS_init_module, &[at(b"x"), 1, at(b"\0")])
    }),
    ("finit-module", 0, |_| sys(libc::SYS_finit_module, &[0, at(b"\0"), 0])),
    ("delete-module", 0, |_| {
        sys(libc::SYS_delete_module, &[at(b"dsh_none\0"), 0])
    }),
    ("acct", 0, |_| sys(libc::SYS_acct, &[0])),
    ("openat2", 1, |a| {
        let how = [libc::O_WRONLY as u64, 0, 0];
        sys(libc::SYS_openat2, &[CWD, path(&a[0]), at(&how), 24])
    }),
    ("sethostname", 0, |_| sys(libc::SYS_sethostname, &[at(b"dsh"), 3])),
    ("settime", 0, |_| {
        let time = [0i64, 0];
        sys(libc::SYS_clock_settime, &[0, at(&time)])
    }),
    ("syslog-clear", 0, |_| sys(libc::SYS_syslog, &[5, 0, 0])),
    ("reboot", 0, |_| sys(libc::SYS_reboot, &[0, 0, 0, 0])),
    ("vhangup", 0, |_| sys(libc::SYS_vhangup, &[])),
    ("setuid-zero", 0, |_| sys(libc::SYS_setuid, &[0])),
    ("setresuid-other", 0, |_| {
        sys(libc::SYS_setresuid, &[12345, 12345, 12345])
    }),
    ("capset-all", 0, |_| {
        let (header, sets) = ([0x2008_0522u32, 0], [BAD as u32; 6]);
        sys(libc::SYS_capset, &[at(&header), at(&sets)])
    }),
    ("terminal-pair", 0, |_| {
        const UNLOCK: usize = 0x4004_5431;
        const NUMBER: usize = 0x8004_5430;
        let master = sys(
            libc::SYS_openat,
            &[CWD, at(b"/dev/ptmx\0"), (libc::O_RDWR | libc::O_NOCTTY) as usize],
        )?;
        let index = Cell::new(0u32); // the kernel writes to it
        sys(libc::SYS_ioctl, &[master, UNLOCK, at(&0u32)])?;
        sys(libc::SYS_ioctl, &[master, NUMBER, at(&index)])?;
        let name = CString::new(format!("/dev/pts/{}", index.get())).unwrap_or_default();
        open(&name, libc::O_RDWR | libc::O_NOCTTY)
    }),
    ("tiocsti", 1, |a| {
        let terminal = open(&a[0], libc::O_RDONLY | libc::O_NOCTTY)?;
        sys(libc::SYS_ioctl, &[terminal, 0x5412, at(b"x")])
    }),
    ("tiocsti-0", 0, |_| sys(libc::SYS_ioctl, &[0, 0x5412, at(b"x")])),
    ("landlock-abi", 0, |_| {
        sys(libc::SYS_landlock_create_ruleset, &[0, 0, 1])
    }),
    ("no-new-privs", 0, |_| {
        sys(libc::SYS_prctl, &[libc::PR_GET_NO_NEW_PRIVS as usize, 0, 0, 0, 0])
    }),
    ("no-new-privs-off", 0, |_| {
        sys(libc::SYS_prctl, &[libc::PR_SET_NO_NEW_PRIVS as usize, 0, 0, 0, 0])
    }),
    ("seccomp-notify", 0, |_| {
        sys(libc::SYS_seccomp, &[2, 0, at(&0x7fc0_0000u32)])
    }),
    ("seccomp-off", 0, |_| {
        sys(libc::SYS_prctl, &[libc::PR_SET_SECCOMP as usize, 0, 0, 0, 0])
    }),
    ("x32-chmod", 1, |a| sys(0x4000_0000 + 90, &[path(&a[0]), 0o777])),
    ("int80-chmod", 1, |a| super::int80_chmod(&a[0])),
    ("chmod-proc-exe", 1, |a| {
        let fd = open(&a[0], libc::O_RDONLY)?;
        sys(libc::SYS_fchmodat, &[CWD, path(&magic(fd)), 0o777])
    }),
];
