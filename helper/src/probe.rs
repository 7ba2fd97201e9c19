//! Finds out what this host can enforce by doing the whole set-up in a throw-away child, which then tries what must be refused.
use std::ffi::OsStr;
use std::io::Read as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use dsh_policy::codec;
use dsh_policy::frame::{Decoder, FRAME_LIMIT};
use dsh_policy::mode::{Lifetime, Network, SandboxMode, Tier};
use dsh_policy::plan::{BUILD_ID, Confinement, ExitStatus, Failure, FromHelper, Plan, Report, Step};
use dsh_policy::probe::{ProbeReport, TierReport};
use dsh_policy::result::Unenforced;
use rustix::fs::{Access, CWD, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::channel::Channel;
use crate::launch::failure;
use crate::seccomp::Prebuilt;
use crate::sys;

/// What the throw-away child is told to run instead of a command: this program, as [`violate`].
pub(crate) const VIOLATE: &[u8] = b"try-what-must-be-refused";
/// The same in namespaces of its own, which hold less of the host.
pub(crate) const VIOLATE_INSIDE: &[u8] = b"try-what-must-be-refused-inside";
/// The argument that tries one tier.
pub(crate) const TRY_TIER: &[u8] = b"--probe-tier";
/// The child's working directory holds a file of this name, outside of what it may write.
const FORBIDDEN: &str = "forbidden";
const DEADLINE_MS: u64 = 3_000;
/// First exit code of [`violate`]: the number of the attempt that was not refused is added.
const NOT_REFUSED: i32 = 10;

/// `--probe`: prints the report as JSON.
pub(crate) fn print() -> ExitCode {
    print_json(&report())
}

fn print_json<T: Serialize>(value: &T) -> ExitCode {
    match codec::to_json(value) {
        Ok(json) => {
            println!("{}", String::from_utf8_lossy(&json));
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::from(crate::FAILED),
    }
}

fn report() -> ProbeReport {
    let system = rustix::system::uname();
    // Each in a process of its own: a try gives up the powers that the next one needs.
    let [namespace, landlock] = [Tier::Namespace, Tier::Landlock].map(ask);
    let notify_reason = landlock.reason.clone().or_else(|| landlock.unobserved.clone());
    let not_built = |which| tier(which, Some("not part of this version yet".to_owned()), Vec::new());
    let mut report = ProbeReport {
        kernel: system.release().to_string_lossy().into_owned(),
        arch: system.machine().to_string_lossy().into_owned(),
        lsm: std::fs::read_to_string("/sys/kernel/security/lsm")
            .ok()
            .map(|list| list.trim().to_owned()),
        landlock_abi: sys::landlock_abi(),
        seccomp_filter: !landlock.filter_failed,
        seccomp_notify: notify_reason.is_none(),
        seccomp_notify_reason: notify_reason,
        user_namespaces: !namespace.namespaces_failed,
        user_namespaces_reason: namespace.reason.clone().filter(|_| namespace.namespaces_failed),
        tiers: vec![
            tier(Tier::Namespace, namespace.reason, namespace.unenforced),
            tier(Tier::Landlock, landlock.reason, landlock.unenforced),
            not_built(Tier::Mount),
        ],
        advice: Vec::new(),
    };
    report.advice = advice(&report);
    report
}

/// What the try of one tier showed.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Tried {
    /// Why it cannot be used.
    reason: Option<String>,
    /// No filter could be installed.
    filter_failed: bool,
    /// The namespaces or the mounts in them were refused.
    namespaces_failed: bool,
    unenforced: Vec<Unenforced>,
    unobserved: Option<String>,
}

impl From<Failure> for Tried {
    fn from(failure: Failure) -> Self {
        Self {
            reason: Some(describe(&failure)),
            filter_failed: failure.step == Step::Seccomp,
            namespaces_failed: matches!(failure.step, Step::Namespaces | Step::Mounts),
            ..Self::default()
        }
    }
}

/// Tries a tier in another process of this program.
fn ask(tier: Tier) -> Tried {
    let io = |error: &std::io::Error| failure(Step::Fork, error.raw_os_error().unwrap_or(0), error.to_string());
    let output = std::env::current_exe().and_then(|program| {
        let mut command = std::process::Command::new(program);
        command.arg(OsStr::from_bytes(TRY_TIER)).arg(tier.as_str()).output()
    });
    match output {
        Ok(output) => codec::from_json(&output.stdout)
            .unwrap_or_else(|_| failure(Step::Exec, 0, "the probe ended before it had an answer").into()),
        Err(error) => io(&error).into(),
    }
}

/// `--probe-tier NAME`: prints what the try of one tier showed.
pub(crate) fn try_tier(name: &[u8]) -> ExitCode {
    let Some(tier) = Tier::ALL.iter().find(|tier| tier.as_str().as_bytes() == name) else {
        return ExitCode::from(crate::FAILED);
    };
    let tried = attempt_tier(*tier).unwrap_or_else(Tried::from);
    print_json(&tried)
}

fn tier(tier: Tier, reason: Option<String>, unenforced: Vec<Unenforced>) -> TierReport {
    TierReport {
        tier,
        usable: reason.is_none(),
        reason,
        unenforced,
    }
}

fn describe(failure: &Failure) -> String {
    let mut text = format!("step {} failed", failure.step.name());
    if failure.errno != 0 {
        text.push_str(&format!(": {}", std::io::Error::from_raw_os_error(failure.errno)));
    }
    if !failure.detail.is_empty() {
        text.push_str(&format!(" ({})", failure.detail));
    }
    text
}

fn advice(report: &ProbeReport) -> Vec<String> {
    let mut advice = Vec::new();
    let mut say = |condition: bool, text: String| {
        if condition {
            advice.push(text);
        }
    };
    say(
        report.landlock_abi == 0,
        "Landlock is missing: use a kernel of 5.13 or newer built with CONFIG_SECURITY_LANDLOCK, and add landlock to lsm= on the kernel's command line."
            .to_owned(),
    );
    say(
        (1..6).contains(&report.landlock_abi),
        format!(
            "Landlock ABI {} lacks guarantees that later kernels have: 6.12 or newer confines signals and abstract sockets too.",
            report.landlock_abi
        ),
    );
    say(
        !report.seccomp_filter,
        "Seccomp filters cannot be installed: the kernel needs CONFIG_SECCOMP_FILTER, and an outer sandbox must permit the seccomp call.".to_owned(),
    );
    say(
        report.seccomp_filter && !report.seccomp_notify,
        "Refusals cannot be observed: run the daemon outside of a sandbox that has a seccomp listener of its own."
            .to_owned(),
    );
    say(
        !report.user_namespaces,
        "User namespaces are not permitted: see kernel.unprivileged_userns_clone, user.max_user_namespaces and, on Ubuntu, an AppArmor profile with `userns,`."
            .to_owned(),
    );
    advice
}

fn attempt_tier(tier: Tier) -> Result<Tried, Failure> {
    let io = |error: std::io::Error| failure(Step::PrivateTmp, error.raw_os_error().unwrap_or(0), error.to_string());
    let folder = Folder::make().map_err(io)?;
    let confinement = Confinement {
        mode: SandboxMode::ReadOnly,
        tier,
        writable: Vec::new(),
        devices: vec!["/dev/null".into()],
        protect: Vec::new(),
        protect_git: false,
        deny_read: Vec::new(),
        allow_unix_socket: Vec::new(),
        network: Network::None,
        require: vec![],
        private_tmp_root: None,
    };
    let shell = std::env::current_exe().map_err(io)?;
    let plan = Plan {
        terminal: false,
        build: BUILD_ID.to_owned(),
        shell: shell.into(),
        command: if tier == Tier::Landlock {
            VIOLATE.into()
        } else {
            VIOLATE_INSIDE.into()
        },
        env: Vec::new(),
        workdir: folder.0.clone().into(),
        umask: 0o077,
        confinement: Some(confinement),
        private_tmp: None,
        kill_grace_ms: 0,
        drain_grace_ms: 0,
        setup_deadline_ms: DEADLINE_MS,
        max_denials: 100,
        lifetime: Lifetime::Foreground,
    };
    let (ours, mut theirs) = UnixStream::pair().map_err(io)?;
    let mut channel = Channel::on(ours.as_fd());
    let report = crate::carry_out(&mut channel, &plan, null_streams()?, &Prebuilt::new(tier), None)?;
    drop(ours);
    let mut bytes = Vec::new();
    theirs.read_to_end(&mut bytes).map_err(io)?;
    let tried = started(&bytes).ok_or_else(|| failure(Step::Exec, 0, "the probe did not start"))?;
    judge(&report, attempts(tier == Tier::Landlock), tried.unobserved.is_none())?;
    Ok(tried)
}

fn null_streams() -> Result<[OwnedFd; 3], Failure> {
    // Above 2, as descriptors from the daemon are: fd 0 to 2 are open in every helper.
    let open = || {
        rustix::fs::openat(CWD, "/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| failure(Step::ReceivePlan, errno.raw_os_error(), "/dev/null"))
    };
    Ok([open()?, open()?, open()?])
}

/// The news of the start among the messages.
fn started(bytes: &[u8]) -> Option<Tried> {
    let mut decoder = Decoder::new(FRAME_LIMIT);
    decoder.push(bytes);
    while let Ok(Some(payload)) = decoder.next_payload() {
        if let Ok(FromHelper::Started {
            unenforced, unobserved, ..
        }) = codec::from_binary(&payload)
        {
            return Some(Tried {
                unenforced,
                unobserved,
                ..Tried::default()
            });
        }
    }
    None
}

fn judge(report: &Report, attempts: &[Attempt], observed: bool) -> Result<(), Failure> {
    match report.status {
        ExitStatus::Code(0) if !observed => Ok(()),
        ExitStatus::Code(0) if report.denials.len() == attempts.len() => Ok(()),
        ExitStatus::Code(0) => Err(failure(
            Step::SelfCheck,
            0,
            format!("{} of {} refusals were reported", report.denials.len(), attempts.len()),
        )),
        ExitStatus::Code(code) if code >= NOT_REFUSED => {
            let index = usize::try_from(code - NOT_REFUSED).unwrap_or(usize::MAX);
            let name = attempts.get(index).map_or("something", |attempt| attempt.0);
            Err(failure(Step::SelfCheck, 0, format!("{name} was not refused")))
        }
        status => Err(failure(
            Step::SelfCheck,
            0,
            format!("the throw-away child ended with {status:?}"),
        )),
    }
}

/// An attempt at what must be refused: its name, what it tries, the error it must get.
type Attempt = (&'static str, fn() -> Result<(), Errno>, Errno);

/// How many of [`ATTEMPTS`], from the end, are about what a command with namespaces of its own does not share with the host.
const SHARED_ONLY: usize = 2;

/// What must be refused to a command that shares the host's processes and System V objects, or has its own.
fn attempts(shared: bool) -> &'static [Attempt] {
    let left_out = if shared { 0 } else { SHARED_ONLY };
    &ATTEMPTS[..ATTEMPTS.len() - left_out]
}

const ATTEMPTS: &[Attempt] = &[
    ("writing a file", || open(FORBIDDEN, OFlags::WRONLY), Errno::ACCESS),
    (
        "creating a file",
        || open("new", OFlags::WRONLY | OFlags::CREATE),
        Errno::ACCESS,
    ),
    (
        "truncating a file",
        || open(FORBIDDEN, OFlags::RDONLY | OFlags::TRUNC),
        Errno::ACCESS,
    ),
    (
        "making a folder",
        || rustix::fs::mkdirat(CWD, "folder", Mode::RWXU),
        Errno::ACCESS,
    ),
    (
        "removing a file",
        || rustix::fs::unlinkat(CWD, FORBIDDEN, rustix::fs::AtFlags::empty()),
        Errno::ACCESS,
    ),
    (
        "renaming a file",
        || rustix::fs::renameat(CWD, FORBIDDEN, CWD, "other"),
        Errno::ACCESS,
    ),
    (
        "changing a mode",
        || rustix::fs::chmod(FORBIDDEN, Mode::RWXU),
        Errno::PERM,
    ),
    (
        "changing a time",
        || rustix::fs::utimensat(CWD, FORBIDDEN, &NOW, rustix::fs::AtFlags::empty()),
        Errno::PERM,
    ),
    (
        "an Internet socket",
        || call(libc::SYS_socket, [2, 1, 0]),
        Errno::ACCESS,
    ),
    (
        "a user namespace",
        || call(libc::SYS_unshare, [0x1000_0000, 0, 0]),
        Errno::PERM,
    ),
    ("io_uring", || call(libc::SYS_io_uring_setup, [1, 0, 0]), Errno::NOSYS),
    (
        "System V memory",
        || call(libc::SYS_shmget, [0, 4096, 0o600]),
        Errno::NOSYS,
    ),
    ("a signal to the supervisor", signal_parent, Errno::PERM),
];

const NOW: rustix::fs::Timestamps = {
    let now = rustix::fs::Timespec {
        tv_sec: 0,
        tv_nsec: rustix::fs::UTIME_NOW as _,
    };
    rustix::fs::Timestamps {
        last_access: now,
        last_modification: now,
    }
};

fn open(path: &str, flags: OFlags) -> Result<(), Errno> {
    rustix::fs::openat(CWD, path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR).map(drop)
}

fn call(number: libc::c_long, arguments: [libc::c_long; 3]) -> Result<(), Errno> {
    sys::attempt(number, arguments).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

fn signal_parent() -> Result<(), Errno> {
    let parent = rustix::process::getppid().ok_or(Errno::SRCH)?;
    // SIGCONT does nothing to a process that runs.
    call(
        libc::SYS_kill,
        [parent.as_raw_nonzero().get().into(), libc::SIGCONT.into(), 0],
    )
}

/// The throw-away child: tries everything and says what was not refused as it must be.
pub(crate) fn violate(which: &[u8]) -> ExitCode {
    let attempts = match which {
        VIOLATE => attempts(true),
        VIOLATE_INSIDE => attempts(false),
        _ => return crate::refuse_to_start(),
    };
    if rustix::fs::access(FORBIDDEN, Access::READ_OK).is_err() {
        return ExitCode::from(1); // Reading is not restricted: something else is wrong.
    }
    let failed = attempts
        .iter()
        .position(|(_, attempt, expected)| attempt() != Err(*expected));
    let code = failed.map_or(0, |index| NOT_REFUSED + i32::try_from(index).unwrap_or(0));
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}

const TMP: &str = "/tmp";
const PREFIX: &str = "dsh-probe-";

/// No probe takes so long; younger folders may be those of a process that only another pid namespace knows.
const ABANDONED_AFTER: std::time::Duration = std::time::Duration::from_secs(60);

/// Removes what probes of this user left that were killed half-way: their process is gone.
fn remove_abandoned() {
    use std::os::unix::fs::MetadataExt as _;
    let own = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(TMP).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok());
        let is_old = |found: &std::fs::Metadata| {
            let age = found.modified().ok().and_then(|modified| modified.elapsed().ok());
            age.is_some_and(|age| age > ABANDONED_AFTER)
        };
        let is_own = || {
            entry
                .metadata()
                .is_ok_and(|found| found.is_dir() && found.uid() == own && is_old(&found))
        };
        if pid.is_some_and(|pid| crate::tree::parent(pid).is_none()) && is_own() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// A folder of our own with one file in it, for as long as this lives.
struct Folder(PathBuf);

impl Folder {
    fn make() -> std::io::Result<Self> {
        let mut random = [0u8; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        remove_abandoned();
        let name = format!("{PREFIX}{}-{:016x}", std::process::id(), u64::from_ne_bytes(random));
        let path = Path::new(TMP).join(name);
        rustix::fs::mkdirat(CWD, &path, Mode::RWXU)?;
        let folder = Self(path);
        std::fs::write(folder.0.join(FORBIDDEN), b"")?;
        Ok(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
