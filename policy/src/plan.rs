//! What the daemon tells its helper to do, and what the helper tells back. Private to one build of both: see [`BUILD_ID`].
//!
//! The channel is a connected `SOCK_STREAM` Unix socket, the helper's fd 0, with the frames of [`crate::frame`] in the binary encoding. With the
//! first message ([`ToHelper::Run`]) travel exactly three descriptors: the command's stdin, stdout and stderr.
use crate::bytes::ByteString;
use crate::codec::{Decode, Encode};
use crate::denial::DenialFact;
use crate::mode::{Guarantee, Lifetime, Network, SandboxMode, Tier};
use crate::probe::ProbeReport;
use crate::result::{Unenforced, Usage};

/// Identity of this build's private types: a hash of the crate's sources.
pub const BUILD_ID: &str = env!("DSH_BUILD_ID");

/// Daemon to helper.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum ToHelper {
    /// Run this; three descriptors travel with it.
    Run(Box<Plan>),
    /// End the command: SIGTERM to the whole tree, SIGKILL after the plan's grace. Later ones change nothing.
    Terminate,
    /// End the command at once.
    Kill,
}

/// Helper to daemon.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum FromHelper {
    /// First message: the helper is up and of this build.
    Ready {
        /// [`BUILD_ID`] of the helper.
        build: String,
    },
    /// Set-up is complete and the shell is running.
    Started {
        /// Process id of the shell, as the daemon sees it.
        pid: u32,
        /// What this kernel cannot enforce of the plan.
        unenforced: Vec<Unenforced>,
        /// Why refusals are not observed; none when they are.
        unobserved: Option<String>,
    },
    /// A refusal seen for the first time (its count grows silently; the final list has the total).
    Denial(Box<DenialFact>),
    /// The shell has ended; descendants may still be draining.
    ShellExited(ExitStatus),
    /// Everything has ended. Last message.
    Finished(Box<Report>),
    /// Set-up failed, nothing ran. Last message.
    Failed(Failure),
    /// Answer of `--probe`.
    Probed(Box<ProbeReport>),
}

/// How the shell ended, as `waitpid` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum ExitStatus {
    /// By itself.
    Code(i32),
    /// By this signal number.
    Signal(i32),
}

/// The final account of one command.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Report {
    /// How the shell ended.
    pub status: ExitStatus,
    /// A `Terminate` or `Kill` reached the shell while it was still running.
    pub terminated: bool,
    /// Every refusal, in order of first occurrence.
    pub denials: Vec<DenialFact>,
    /// Refusals beyond the kept number.
    pub denials_dropped: u64,
    /// Descendants that could not be ended; 0 is proved by `wait` saying that there is no child left.
    pub survivors: u32,
    /// What was used.
    pub usage: Usage,
}

/// Which step of the set-up failed. The order here is the order of `helper/src/main.rs` and of README's "How it works".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Step {
    /// Close every inherited descriptor but the control socket, clear the environment.
    Sanitize,
    /// Receive and check the plan.
    ReceivePlan,
    /// Make the namespaces.
    Namespaces,
    /// Drop every capability set.
    DropCapabilities,
    /// Become subreaper and prepare signals.
    Supervisor,
    /// Make the private temporary folder.
    PrivateTmp,
    /// Build the file-system view.
    Mounts,
    /// Build the Landlock ruleset.
    BuildRuleset,
    /// Fork the process that becomes the shell.
    Fork,
    /// New session, standard streams.
    Session,
    /// Resource limits.
    Limits,
    /// Enter the working directory.
    Workdir,
    /// Set `no_new_privs`.
    NoNewPrivs,
    /// Enforce the Landlock ruleset.
    Landlock,
    /// Install the seccomp filters and hand over the listener.
    Seccomp,
    /// Try what must be refused.
    SelfCheck,
    /// Execute the shell.
    Exec,
}

impl Step {
    /// The name used in messages and in README.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sanitize => "sanitize",
            Self::ReceivePlan => "receive-plan",
            Self::Namespaces => "namespaces",
            Self::DropCapabilities => "drop-capabilities",
            Self::Supervisor => "supervisor",
            Self::PrivateTmp => "private-tmp",
            Self::Mounts => "mounts",
            Self::BuildRuleset => "build-ruleset",
            Self::Fork => "fork",
            Self::Session => "session",
            Self::Limits => "limits",
            Self::Workdir => "workdir",
            Self::NoNewPrivs => "no-new-privs",
            Self::Landlock => "landlock",
            Self::Seccomp => "seccomp",
            Self::SelfCheck => "self-check",
            Self::Exec => "exec",
        }
    }
}

/// A set-up that failed.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Failure {
    /// Where.
    pub step: Step,
    /// The kernel's error, 0 when there is none.
    pub errno: i32,
    /// What it was about, for people (a path, what was missing).
    pub detail: String,
}

/// One command, fully decided: absolute, resolved, ordered. The helper adds no policy of its own.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
pub struct Plan {
    /// Must equal the helper's own [`BUILD_ID`].
    pub build: String,
    /// The shell, absolute.
    pub shell: ByteString,
    /// What `-c` gets.
    pub command: ByteString,
    /// The whole environment, ready.
    pub env: Vec<(ByteString, ByteString)>,
    /// Absolute and canonical.
    pub workdir: ByteString,
    /// File mode creation mask.
    pub umask: u32,
    /// How to confine; none for `danger-full-access`.
    pub confinement: Option<Confinement>,
    /// A folder to make with mode 0700 before and to remove with all its contents after; the command's `TMPDIR`.
    pub private_tmp: Option<ByteString>,
    /// Between SIGTERM and SIGKILL, milliseconds.
    pub kill_grace_ms: u64,
    /// How long descendants may outlive the shell before they are killed, milliseconds.
    pub drain_grace_ms: u64,
    /// Set-up fails when it takes longer, milliseconds.
    pub setup_deadline_ms: u64,
    /// Most distinct facts kept.
    pub max_denials: u32,
    /// What may outlive the shell.
    pub lifetime: Lifetime,
    /// The three streams are one terminal, which becomes the controlling one of the command's session.
    pub terminal: bool,
}

/// Values of the environment and the command may hold secrets: neither is shown.
impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan")
            .field("workdir", &self.workdir)
            .field("confinement", &self.confinement)
            .field("private_tmp", &self.private_tmp)
            .field("lifetime", &self.lifetime)
            .finish_non_exhaustive()
    }
}

/// The rules of one confined command. `decide.rs` judges by exactly this, and the kernel layers are built from exactly this.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Confinement {
    /// The mode: never `danger-full-access`.
    pub mode: SandboxMode,
    /// Which mechanism.
    pub tier: Tier,
    /// Canonical folders (or files) below which everything may be written. Empty in `read-only`.
    pub writable: Vec<ByteString>,
    /// Canonical device files that may be opened for writing in this mode.
    pub devices: Vec<ByteString>,
    /// Absolute paths inside writable roots that stay as they are (they need not exist).
    pub protect: Vec<ByteString>,
    /// Git metadata inside writable roots stays as it is.
    pub protect_git: bool,
    /// Absolute paths that cannot be read.
    pub deny_read: Vec<ByteString>,
    /// Unix sockets of the host that may be reached by path.
    pub allow_unix_socket: Vec<ByteString>,
    /// What the network may reach.
    pub network: Network,
    /// Guarantees without which the command must not run.
    pub require: Vec<Guarantee>,
    /// `/tmp` of the namespace tier is this folder instead of the host's.
    pub private_tmp_root: Option<ByteString>,
}
