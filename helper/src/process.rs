//! Judges calls that act on other processes, and the kernel interfaces that are closed to confined commands.
//!
//! Process ids are registers, so nothing can be changed after they were looked at; a call on a process of the command's own tree goes on.
use dsh_policy::denial::{Operation, Rule};

use crate::facts::Refusal;
use crate::mediate::{Decision, Judge, Parked};
use crate::object::View;
use crate::{sys, tree};

/// Whom a call is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// The caller, or nobody in particular.
    Own,
    /// This process or thread.
    Process(i32),
    /// This process group.
    Group(i32),
    /// Everything of a user.
    User(u32),
    /// Everything in reach.
    All,
}

/// Judges one call of the process or signal class.
pub(crate) fn judge(judge: &Judge, parked: &Parked<'_>) -> Decision {
    let world = &judge.world;
    let (target, signal) = read_call(parked);
    let outside = match target {
        Target::Own => false,
        Target::Process(pid) => pid != parked.view.thread && exists(pid) && !world.owns_number(pid),
        // A group has the number of the process that made it, which may be gone; a group of the command was made by one of its processes.
        Target::Group(group) => exists(group) && !world.owns_number(group),
        // The user's processes in the caller's own pid namespace.
        Target::User(_) => !world.is_apart(),
        // The same answer in every tier, although a pid namespace would leave nobody outside in reach.
        Target::All => true,
    };
    // Signal 0 is a question; the kernel answers it truthfully by itself.
    // To everything it would be a yes whatever Landlock says: the kernel counts only what fails otherwise.
    let question = signal == Some(0) && target != Target::All;
    if !outside || question || fails_anyway(target) {
        return Decision::CONTINUE;
    }
    let whom = match target {
        Target::Process(pid) => format!("process {pid}"),
        Target::Group(group) => format!("process group {group}"),
        Target::User(user) => format!("user {user}"),
        Target::All => "every process".to_owned(),
        Target::Own => return Decision::CONTINUE,
    };
    let detail = signal.map_or_else(|| whom.clone(), |signal| format!("signal {signal} to {whom}"));
    Decision::Refuse(Refusal::of(Operation::ControlProcess, Rule::Confined, Some(detail)))
}

/// The target of a call, and the signal if it is one.
fn read_call(parked: &Parked<'_>) -> (Target, Option<i32>) {
    let process = |pid: i32| if pid > 0 { Target::Process(pid) } else { Target::Own };
    let by_kind = |kind: i32, who: i32, kinds: [i32; 3]| match kind {
        kind if kind == kinds[0] => process(who),
        kind if kind == kinds[1] && who > 0 => Target::Group(who),
        kind if kind == kinds[2] && who == 0 => Target::User(rustix::process::getuid().as_raw()),
        kind if kind == kinds[2] => Target::User(who.cast_unsigned()),
        _ => Target::Own,
    };
    match parked.call.name {
        "kill" => {
            let target = match parked.int(0) {
                pid if pid > 0 => Target::Process(pid),
                0 => Target::Own, // The caller's own group.
                // A real signal reaches what Landlock leaves, the command's own; the question would be answered with yes for everybody.
                -1 if parked.int(1) == 0 => Target::All,
                -1 => Target::Own,
                group => Target::Group(group.wrapping_neg()),
            };
            (target, Some(parked.int(1)))
        }
        "tkill" | "rt_sigqueueinfo" => (process(parked.int(0)), Some(parked.int(1))),
        "tgkill" | "rt_tgsigqueueinfo" => (process(parked.int(1)), Some(parked.int(2))),
        "pidfd_send_signal" => (by_descriptor(parked.view, parked.int(0)), Some(parked.int(1))),
        "pidfd_getfd" | "process_madvise" | "process_mrelease" => (by_descriptor(parked.view, parked.int(0)), None),
        "setpriority" => (by_kind(parked.int(0), parked.int(1), [0, 1, 2]), None),
        "ioprio_set" => (by_kind(parked.int(0), parked.int(1), [1, 2, 3]), None),
        "ptrace" => (process(parked.int(1)), None),
        _ => (process(parked.int(0)), None),
    }
}

/// The process behind a process descriptor of the caller's.
fn by_descriptor(view: View<'_>, fd: i32) -> Target {
    let text = tree::read_start(&format!("/proc/{}/fdinfo/{fd}", view.thread), 1024);
    let line = text
        .split(|byte| *byte == b'\n')
        .find_map(|line| line.strip_prefix(b"Pid:"));
    let pid = line.and_then(|line| std::str::from_utf8(line).ok()?.trim().parse().ok());
    // Of a process in another pid namespace than the supervisor's nobody outside can have a descriptor to give.
    let pid = pid.filter(|pid| *pid > 0 && !view.world.is_apart());
    pid.map_or(Target::Own, Target::Process)
}

fn exists(pid: i32) -> bool {
    tree::parent(pid).is_some()
}

/// Whether this user could not act on the target anyway: the helper has the same rights and is not confined itself.
fn fails_anyway(target: Target) -> bool {
    match target {
        Target::Process(pid) => sys::kill(pid, 0).is_err(),
        Target::Group(group) => sys::kill(-group, 0).is_err(),
        Target::User(user) => user != 0 && user != rustix::process::geteuid().as_raw(),
        Target::Own | Target::All => false,
    }
}

/// Refuses a closed call. For a user who could not make it anyway it is the ordinary error and no fact.
pub(crate) fn judge_closed(judge: &Judge, parked: &Parked<'_>, operation: Operation) -> Decision {
    if !judge.privileged && needs_privilege(parked) {
        return Decision::Answer(sys::Answer::Fail(libc::EPERM));
    }
    let detail = match operation {
        Operation::Namespace => describe_namespaces(parked),
        _ => None,
    };
    Decision::Refuse(Refusal::of(operation, Rule::Confined, detail))
}

/// Whether only root may make the call, whatever its arguments.
fn needs_privilege(parked: &Parked<'_>) -> bool {
    match parked.call.name {
        // A user namespace is what an ordinary user may make, and with it the others.
        "unshare" | "clone" => parked.args[0] & libc::CLONE_NEWUSER as u64 == 0,
        "setns" | "bpf" | "open_by_handle_at" | "kexec_load" | "kexec_file_load" | "init_module" | "finit_module"
        | "delete_module" | "acct" => true,
        // Copies a tree of the file system without being root.
        "open_tree" => parked.args[2] & 1 != 0,
        _ => matches!(parked.call.class, crate::calls::Class::Closed(Operation::Mount)),
    }
}

fn describe_namespaces(parked: &Parked<'_>) -> Option<String> {
    const NAMES: [(i32, &str); 7] = [
        (libc::CLONE_NEWUSER, "CLONE_NEWUSER"),
        (libc::CLONE_NEWNS, "CLONE_NEWNS"),
        (libc::CLONE_NEWPID, "CLONE_NEWPID"),
        (libc::CLONE_NEWNET, "CLONE_NEWNET"),
        (libc::CLONE_NEWIPC, "CLONE_NEWIPC"),
        (libc::CLONE_NEWUTS, "CLONE_NEWUTS"),
        (libc::CLONE_NEWCGROUP, "CLONE_NEWCGROUP"),
    ];
    let flags = if parked.call.name == "setns" {
        parked.int(1)
    } else {
        parked.int(0)
    };
    let names: Vec<_> = NAMES
        .iter()
        .filter(|(bit, _)| flags & bit != 0)
        .map(|(_, name)| *name)
        .collect();
    (!names.is_empty()).then(|| names.join("|"))
}
