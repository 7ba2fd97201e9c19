//! Namespaces, mounts, System V objects, keys, and interfaces that are closed to confined commands.
use dsh_policy::denial::Operation as O;

use super::{Attack, NO_ID, NO_NAME, NO_OBJECT, OWN, Seen, attack, control, door, nothing, perhaps, privileged};

pub(crate) const NAMESPACES: &[Attack] = &[
    door(&["unshare-user"], "unshare", O::Namespace),
    door(&["unshare-user-mount"], "unshare", O::Namespace),
    privileged(&["unshare-mount"], "unshare", O::Namespace, "EPERM"),
    privileged(&["unshare-pid"], "unshare", O::Namespace, "EPERM"),
    privileged(&["unshare-net"], "unshare", O::Namespace, "EPERM"),
    privileged(&["unshare-ipc"], "unshare", O::Namespace, "EPERM"),
    privileged(&["unshare-uts"], "unshare", O::Namespace, "EPERM"),
    privileged(&["unshare-cgroup"], "unshare", O::Namespace, "EPERM"),
    privileged(&["unshare-time"], "unshare", O::Namespace, "EPERM"),
    perhaps(&["clone-user"], "clone", O::Namespace),
    nothing(&["clone3-user"], "ENOSYS"),
    privileged(&["setns", "/proc/self/ns/uts"], "setns", O::Namespace, "EPERM"),
    privileged(&["mount-tmpfs", "O/dir"], "mount", O::Mount, "EPERM"),
    privileged(&["mount-bind", "O/dir", "O/full"], "mount", O::Mount, "EPERM"),
    privileged(&["umount", "/proc"], "umount2", O::Mount, "EPERM"),
    privileged(&["pivot-root", "O/dir"], "pivot_root", O::Mount, "EPERM"),
    privileged(&["chroot", "O/dir"], "chroot", O::Mount, "EPERM"),
    privileged(&["open-tree", "O/dir"], "open_tree", O::Mount, "EPERM"),
    privileged(&["open-tree-attr", "O/dir"], "open_tree_attr", O::Mount, "EPERM"),
    privileged(&["move-mount", "O/dir"], "move_mount", O::Mount, "EPERM"),
    privileged(&["fsopen"], "fsopen", O::Mount, "EPERM"),
    privileged(&["fsmount"], "fsmount", O::Mount, "EPERM"),
    privileged(&["fspick", "O/dir"], "fspick", O::Mount, "EPERM"),
    privileged(&["fsconfig"], "fsconfig", O::Mount, "EPERM"),
    privileged(&["mount-setattr", "O/dir"], "mount_setattr", O::Mount, "EPERM"),
    privileged(&["swapon", "O/file"], "swapon", O::Mount, "EPERM"),
    privileged(&["swapoff", "O/file"], "swapoff", O::Mount, "EPERM"),
    privileged(&["quotactl"], "quotactl", O::Mount, "EPERM"),
];

pub(crate) const IPC: &[Attack] = &[
    perhaps(&["shmget"], "shmget", O::Ipc).but(OWN),
    door(&["shmat", "SHM"], "shmat", O::Ipc).but(NO_OBJECT),
    door(&["shmctl-remove", "SHM"], "shmctl", O::Ipc).but(NO_OBJECT),
    perhaps(&["msgget", "MSG"], "msgget", O::Ipc).but(NO_NAME),
    door(&["msgsnd", "MSG"], "msgsnd", O::Ipc).but(NO_OBJECT),
    perhaps(&["msgrcv", "MSG"], "msgrcv", O::Ipc).but(NO_OBJECT),
    door(&["msgctl-remove", "MSG"], "msgctl", O::Ipc).but(NO_OBJECT),
    perhaps(&["semget"], "semget", O::Ipc).but(OWN),
    door(&["semop", "SEM"], "semop", O::Ipc).but(NO_OBJECT),
    door(&["semctl-set", "SEM"], "semctl", O::Ipc).but(NO_OBJECT),
    perhaps(&["mq-unlink", "dsh-test-none"], "mq_unlink", O::Ipc).but(NO_NAME),
    perhaps(&["add-key"], "add_key", O::Ipc),
    perhaps(&["keyctl"], "keyctl", O::Ipc),
    perhaps(&["request-key"], "request_key", O::Ipc),
];

pub(crate) const INTERFACES: &[Attack] = &[
    door(&["io-uring"], "io_uring_setup", O::KernelInterface),
    perhaps(&["perf"], "perf_event_open", O::KernelInterface),
    perhaps(&["userfaultfd"], "userfaultfd", O::KernelInterface),
    perhaps(&["fanotify"], "fanotify_init", O::KernelInterface),
    privileged(&["bpf"], "bpf", O::KernelInterface, "EPERM"),
    privileged(&["open-by-handle"], "open_by_handle_at", O::KernelInterface, "EPERM"),
    privileged(&["kexec"], "kexec_load", O::KernelInterface, "EPERM"),
    privileged(&["init-module"], "init_module", O::KernelInterface, "EPERM"),
    privileged(&["finit-module"], "finit_module", O::KernelInterface, "EPERM"),
    privileged(&["delete-module"], "delete_module", O::KernelInterface, "EPERM"),
    privileged(&["acct"], "acct", O::KernelInterface, "EPERM"),
    // Powers that the command has not, because the helper gave all of them up before it looked at the command.
    nothing(&["sethostname"], "EPERM"),
    nothing(&["settime"], "EPERM"),
    nothing(&["syslog-clear"], "EPERM"),
    nothing(&["reboot"], "EPERM"),
    nothing(&["vhangup"], "EPERM"),
    nothing(&["capset-all"], "EPERM"),
    nothing(&["no-new-privs-off"], "EINVAL"),
    // No terminal: what there is to refuse on one is in `terminals.rs`.
    nothing(&["tiocsti-0"], "ENOTTY"),
];

#[test]
fn no_namespace_is_made_and_no_mount_changed() {
    attack("full", NAMESPACES);
}

#[test]
fn objects_of_the_kernel_are_out_of_reach() {
    attack("full", IPC);
}

#[test]
fn closed_interfaces_stay_closed() {
    attack("full", INTERFACES);
    // What is nobody's in particular: becoming root works for root alone, and gives nothing.
    let become_root = Attack {
        root: Seen::Plain("OK"),
        ..nothing(&["setuid-zero"], "EPERM").but(NO_ID)
    };
    let become_another = nothing(&["setresuid-other"], "EPERM").but(NO_ID);
    attack("full", &[become_root, become_another]);
}

#[test]
fn unconfined_the_doors_of_the_kernel_are_open() {
    control(NAMESPACES);
    control(IPC);
    control(INTERFACES);
}
