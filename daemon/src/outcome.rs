//! From what the helper reported to what the client gets: the result of a run, or the infrastructure failure.
use dsh_policy::mode::{EnforcementLevel, SandboxMode, Tier};
use dsh_policy::plan::{ExitStatus, Failure, Plan, Report, Step};
use dsh_policy::request::BashExecSpec;
use dsh_policy::result::{ConfinedReport, EnvironmentReport, SandboxReport, StreamResult, Unenforced};
use dsh_policy::{BashRunResult, ErrorCode, ExecError};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::probe::runner_failure;

/// Why the daemon ended a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Its time was over.
    Timeout,
    /// The client, its absence, or the end of the daemon.
    Abort,
}

/// What the helper said when the shell had started.
#[derive(Clone, Debug, Default)]
pub(crate) struct Start {
    pub(crate) unenforced: Vec<Unenforced>,
    pub(crate) unobserved: Option<String>,
}

/// All that is known about a command that has ended.
pub(crate) struct Ended {
    pub(crate) report: Report,
    pub(crate) start: Start,
    pub(crate) cause: Option<Cause>,
    pub(crate) tier: Option<Tier>,
    pub(crate) environment: EnvironmentReport,
    pub(crate) stdout: StreamResult,
    pub(crate) stderr: StreamResult,
}

/// The result of a run.
pub(crate) fn result(spec: &BashExecSpec, ended: Ended) -> BashRunResult {
    let (exit_code, signal) = match ended.report.status {
        ExitStatus::Code(code) => (Some(code), None),
        ExitStatus::Signal(number) => (None, Some(signal_name(number))),
    };
    // The cause counts only if it reached the shell while that was running: otherwise the exit came first.
    let cause = ended.cause.filter(|_| ended.report.terminated);
    BashRunResult {
        exit_code,
        signal,
        timed_out: cause == Some(Cause::Timeout),
        aborted: cause == Some(Cause::Abort),
        timeout_ms: spec.timeout_ms,
        stdout: ended.stdout,
        stderr: ended.stderr,
        survivors: ended.report.survivors,
        usage: ended.report.usage,
        environment: ended.environment,
        sandbox: sandbox(spec, exit_code, ended.tier, ended.start, ended.report),
    }
}

fn sandbox(
    spec: &BashExecSpec,
    exit_code: Option<i32>,
    tier: Option<Tier>,
    start: Start,
    report: Report,
) -> SandboxReport {
    let policy = &spec.sandbox_policy;
    let Some(tier) = tier else {
        return SandboxReport {
            mode: policy.mode,
            denied: Some(false),
            confined: None,
        };
    };
    let refused = !report.denials.is_empty() || report.denials_dropped > 0;
    let failed = exit_code.is_some_and(|code| code != 0);
    let observed = start.unobserved.is_none();
    SandboxReport {
        mode: policy.mode,
        denied: observed.then_some(refused && failed),
        confined: Some(ConfinedReport {
            enforcement: if start.unenforced.is_empty() {
                EnforcementLevel::Full
            } else {
                EnforcementLevel::Partial
            },
            unenforced: start.unenforced,
            tier,
            network: policy.network,
            requested_mode: policy.requested_mode,
            observed,
            unobserved_reason: start.unobserved,
            denials: report.denials,
            denials_dropped: report.denials_dropped,
        }),
    }
}

/// How much a command's environment takes of what the kernel passes to a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EnvironmentSize {
    entries: usize,
    bytes: usize,
}

impl EnvironmentSize {
    /// As the kernel counts: `name=value`, a NUL byte, and a pointer to each.
    pub(crate) fn of(plan: &Plan) -> Self {
        let entry = |name: usize, value: usize| name + value + 2 + size_of::<usize>();
        Self {
            entries: plan.env.len(),
            bytes: plan
                .env
                .iter()
                .map(|(name, value)| entry(name.0.len(), value.0.len()))
                .sum(),
        }
    }
}

/// What `execve` takes of arguments and environment: a quarter of the stack's limit within the kernel's bounds. The helper has the daemon's limit.
fn exec_limit() -> u64 {
    let stack = getrlimit(Resource::Stack).current.unwrap_or(u64::MAX);
    (stack / 4).clamp(128 << 10, 6 << 20)
}

/// A set-up that failed: nothing ran.
pub(crate) fn setup_failure(
    spec: &BashExecSpec,
    shell: &str,
    environment: EnvironmentSize,
    failure: &Failure,
) -> ExecError {
    let is = |errno: Errno| failure.errno == errno.raw_os_error();
    match failure.step {
        Step::Workdir => ExecError::new(
            ErrorCode::WorkdirUnusable,
            format!(
                "cannot use working directory {}: {}",
                spec.workdir.display(),
                describe(failure.errno)
            ),
        ),
        Step::Exec if is(Errno::NOENT) => ExecError::new(
            ErrorCode::ShellMissing,
            format!("{shell} is not on this host; install bash, or set `shell` in the configuration"),
        ),
        Step::Exec if is(Errno::TOOBIG) => ExecError::new(
            ErrorCode::LimitExceeded,
            format!(
                "the command ({} bytes) and its environment ({} entries, {} bytes as the kernel counts) are more than the {} bytes \
                 that the kernel passes to a program; pass large values by standard input or in a file",
                spec.command.0.len(),
                environment.entries,
                environment.bytes,
                exec_limit(),
            ),
        ),
        step => runner_failure(
            spec.sandbox_policy.mode,
            &format!("{}: {}: {}", step.name(), errno_name(failure.errno), failure.detail),
        ),
    }
}

/// The helper is gone and has not said how the command ended.
pub(crate) fn lost(mode: SandboxMode, what: &str) -> ExecError {
    ExecError::new(
        ErrorCode::Unknown,
        format!(
            "the fate of the command is unknown: {what}. It may have run in part (mode {mode}); everything that was left of it was killed. Do not take this as success"
        ),
    )
}

fn describe(number: i32) -> String {
    let phrases = [
        (Errno::NOENT, "not found"),
        (Errno::NOTDIR, "not a directory"),
        (Errno::ACCESS, "permission denied"),
    ];
    let known = phrases.iter().find(|(errno, _)| errno.raw_os_error() == number);
    known.map_or_else(|| errno_name(number), |(_, phrase)| (*phrase).to_owned())
}

/// The kernel's name of an error, for those that a set-up can meet; the number of any other.
fn errno_name(number: i32) -> String {
    const NAMES: &[(Errno, &str)] = &[
        (Errno::PERM, "EPERM"),
        (Errno::NOENT, "ENOENT"),
        (Errno::INTR, "EINTR"),
        (Errno::IO, "EIO"),
        (Errno::TOOBIG, "E2BIG"),
        (Errno::NOEXEC, "ENOEXEC"),
        (Errno::BADF, "EBADF"),
        (Errno::CHILD, "ECHILD"),
        (Errno::AGAIN, "EAGAIN"),
        (Errno::NOMEM, "ENOMEM"),
        (Errno::ACCESS, "EACCES"),
        (Errno::FAULT, "EFAULT"),
        (Errno::BUSY, "EBUSY"),
        (Errno::EXIST, "EEXIST"),
        (Errno::NODEV, "ENODEV"),
        (Errno::NOTDIR, "ENOTDIR"),
        (Errno::ISDIR, "EISDIR"),
        (Errno::INVAL, "EINVAL"),
        (Errno::NFILE, "ENFILE"),
        (Errno::MFILE, "EMFILE"),
        (Errno::NOSPC, "ENOSPC"),
        (Errno::ROFS, "EROFS"),
        (Errno::MLINK, "EMLINK"),
        (Errno::PIPE, "EPIPE"),
        (Errno::NAMETOOLONG, "ENAMETOOLONG"),
        (Errno::NOSYS, "ENOSYS"),
        (Errno::LOOP, "ELOOP"),
        (Errno::PROTO, "EPROTO"),
        (Errno::BADMSG, "EBADMSG"),
        (Errno::OVERFLOW, "EOVERFLOW"),
        (Errno::USERS, "EUSERS"),
        (Errno::OPNOTSUPP, "EOPNOTSUPP"),
        (Errno::NOMSG, "ENOMSG"),
        (Errno::CONNRESET, "ECONNRESET"),
        (Errno::TIMEDOUT, "ETIMEDOUT"),
        (Errno::DQUOT, "EDQUOT"),
        (Errno::CANCELED, "ECANCELED"),
        (Errno::SRCH, "ESRCH"),
    ];
    if number == 0 {
        return "no errno".into();
    }
    let known = NAMES.iter().find(|(errno, _)| errno.raw_os_error() == number);
    known.map_or_else(|| format!("errno {number}"), |(_, name)| (*name).to_owned())
}

/// `SIGKILL` for 9; the numbers are those of x86-64 and aarch64.
fn signal_name(number: i32) -> String {
    const NAMES: [&str; 31] = [
        "SIGHUP",
        "SIGINT",
        "SIGQUIT",
        "SIGILL",
        "SIGTRAP",
        "SIGABRT",
        "SIGBUS",
        "SIGFPE",
        "SIGKILL",
        "SIGUSR1",
        "SIGSEGV",
        "SIGUSR2",
        "SIGPIPE",
        "SIGALRM",
        "SIGTERM",
        "SIGSTKFLT",
        "SIGCHLD",
        "SIGCONT",
        "SIGSTOP",
        "SIGTSTP",
        "SIGTTIN",
        "SIGTTOU",
        "SIGURG",
        "SIGXCPU",
        "SIGXFSZ",
        "SIGVTALRM",
        "SIGPROF",
        "SIGWINCH",
        "SIGIO",
        "SIGPWR",
        "SIGSYS",
    ];
    let index = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
    match index.and_then(|index| NAMES.get(index)) {
        Some(name) => (*name).to_owned(),
        // The C library takes two real-time signals for itself: its SIGRTMIN is 34.
        None if number == 34 => "SIGRTMIN".into(),
        None if number > 34 => format!("SIGRTMIN+{}", number - 34),
        None => format!("signal {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_their_names() {
        let names = [
            (9, "SIGKILL"),
            (15, "SIGTERM"),
            (31, "SIGSYS"),
            (34, "SIGRTMIN"),
            (36, "SIGRTMIN+2"),
            (0, "signal 0"),
        ];
        for (number, name) in names {
            assert_eq!(signal_name(number), name);
        }
    }

    #[test]
    fn errors_have_their_names_and_odd_numbers_do_no_harm() {
        for (number, name) in [
            (13, "EACCES"),
            (7, "E2BIG"),
            (0, "no errno"),
            (-5, "errno -5"),
            (9999, "errno 9999"),
        ] {
            assert_eq!(errno_name(number), name);
        }
    }
}
