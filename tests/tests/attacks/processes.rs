//! A process of the user's that the command did not start.
use dsh_policy::denial::Operation as O;

use super::{Attack, NO_NAME, NO_PROCESS, OWN, OWN_USER, attack, control, door, nothing, perhaps};

pub(crate) const DOORS: &[Attack] = &[
    door(&["kill-term", "VICTIM"], "kill", O::ControlProcess),
    door(&["kill-group", "VICTIM"], "kill", O::ControlProcess),
    door(&["tkill", "VICTIM"], "tkill", O::ControlProcess),
    door(&["tgkill", "VICTIM"], "tgkill", O::ControlProcess),
    door(&["sigqueue", "VICTIM"], "rt_sigqueueinfo", O::ControlProcess),
    door(&["tgsigqueue", "VICTIM"], "rt_tgsigqueueinfo", O::ControlProcess),
    door(&["pidfd-signal", "VICTIM"], "pidfd_send_signal", O::ControlProcess).but(NO_PROCESS),
    // A question is answered as Landlock sees it; the one signal that is never asked about is ignored by everybody.
    nothing(&["kill-zero", "VICTIM"], "EPERM").but(NO_PROCESS),
    // To everything the kernel says yes, whatever it left out.
    door(&["kill-all-zero"], "kill", O::ControlProcess),
    nothing(&["tgkill-urgent", "VICTIM"], "EPERM").but(NO_PROCESS),
    door(&["setpriority", "VICTIM"], "setpriority", O::ControlProcess),
    door(&["setpriority-group", "VICTIM"], "setpriority", O::ControlProcess),
    perhaps(&["setpriority-user"], "setpriority", O::ControlProcess).but(OWN),
    perhaps(&["setpriority-own-user"], "setpriority", O::ControlProcess).but(OWN),
    perhaps(&["ioprio-own-user"], "ioprio_set", O::ControlProcess).but(OWN_USER),
    door(&["ioprio-set", "VICTIM"], "ioprio_set", O::ControlProcess),
    door(&["affinity", "VICTIM"], "sched_setaffinity", O::ControlProcess),
    door(&["setscheduler", "VICTIM"], "sched_setscheduler", O::ControlProcess),
    door(&["setparam", "VICTIM"], "sched_setparam", O::ControlProcess),
    door(&["setattr", "VICTIM"], "sched_setattr", O::ControlProcess),
    door(&["prlimit-set", "VICTIM"], "prlimit64", O::ControlProcess),
    door(&["ptrace-attach", "VICTIM"], "ptrace", O::ControlProcess),
    door(&["ptrace-seize", "VICTIM"], "ptrace", O::ControlProcess),
    door(&["vm-read", "VICTIM", "ADDRESS"], "process_vm_readv", O::ControlProcess),
    door(
        &["vm-write", "VICTIM", "ADDRESS"],
        "process_vm_writev",
        O::ControlProcess,
    ),
    door(&["pidfd-getfd", "VICTIM"], "pidfd_getfd", O::ControlProcess).but(NO_PROCESS),
    perhaps(&["madvise", "VICTIM", "ADDRESS"], "process_madvise", O::ControlProcess).but(NO_PROCESS),
    perhaps(&["mrelease", "VICTIM"], "process_mrelease", O::ControlProcess).but(NO_PROCESS),
    perhaps(&["move-pages", "VICTIM"], "move_pages", O::ControlProcess),
    perhaps(&["migrate-pages", "VICTIM"], "migrate_pages", O::ControlProcess),
    nothing(&["owner-sigio", "VICTIM"], "OK").but(NO_PROCESS),
    perhaps(&["open-wronly", "/proc/VICTIM/oom_score_adj"], "openat", O::WriteFile).but(NO_NAME),
    perhaps(&["open-wronly", "/proc/VICTIM/comm"], "openat", O::WriteFile).but(NO_NAME),
    perhaps(&["open-rdwr", "/proc/VICTIM/mem"], "openat", O::WriteFile).but(NO_NAME),
    nothing(&["open-rdonly", "/proc/VICTIM/environ"], "EACCES").but(NO_NAME),
    nothing(&["open-rdonly", "/proc/VICTIM/mem"], "EACCES").but(NO_NAME),
    nothing(&["open-rdonly", "/proc/VICTIM/fd/0"], "EACCES").but(NO_NAME),
    nothing(&["ptrace-traceme"], "OK"),
];

#[test]
fn processes_outside_are_left_alone() {
    attack("full", DOORS);
}

#[test]
fn unconfined_the_doors_to_processes_are_open() {
    control(DOORS);
}
