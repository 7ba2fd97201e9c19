//! Turns a plan into the prepared values that the forked child uses, so that nothing is allocated after the fork, and forks.
use std::ffi::{CString, c_char};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use dsh_policy::bytes::ByteString;
use dsh_policy::decide::is_within;
use dsh_policy::plan::{Confinement, Failure, Plan, Step};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::landlock;
use crate::seccomp::{self, Observation, Prebuilt};
use crate::sys::{self, Confine, Launch, Orders, PrepareError, PreparedChild, ROOM, Refused};
use crate::world::World;

/// The Landlock ABI from which abstract sockets of processes outside cannot be reached.
const ABSTRACT_SOCKETS_SCOPED: u32 = 6;
/// The Landlock ABI from which signals to processes outside are refused.
const SIGNALS_SCOPED: u32 = 6;

/// What the child becomes, in the kernel's form.
pub(crate) struct Image {
    shell: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
    workdir: CString,
    umask: u32,
    terminal: bool,
    stdio: [OwnedFd; 3],
}

/// How the child is confined, in the kernel's form.
pub(crate) struct Walls {
    prepared: landlock::Prepared,
    filter: Vec<libc::sock_filter>,
    listen: bool,
    expect_refusal: bool,
}

/// A failure without a kernel error.
pub(crate) fn failure(step: Step, errno: i32, detail: impl Into<String>) -> Failure {
    Failure {
        step,
        errno,
        detail: detail.into(),
    }
}

impl Image {
    /// Takes what a plan says about the command.
    pub(crate) fn prepare(plan: &Plan, stdio: [OwnedFd; 3]) -> Result<Self, Failure> {
        let text = |bytes: &ByteString, step: Step, what: &str| {
            CString::new(bytes.as_bytes())
                .map_err(|_| failure(step, libc::EINVAL, format!("the {what} contains a NUL byte")))
        };
        let mut arguments = vec![c"bash".to_owned(), c"-c".to_owned()];
        if matches!(plan.command.as_bytes(), [b'-' | b'+', ..]) {
            arguments.push(c"--".to_owned()); // Or bash would take the command for options.
        }
        arguments.push(text(&plan.command, Step::Exec, "command")?);
        let environment = plan
            .env
            .iter()
            .map(|(name, value)| {
                let mut pair = name.0.clone();
                pair.push(b'=');
                pair.extend_from_slice(&value.0);
                text(&ByteString(pair), Step::Exec, "environment")
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            shell: text(&plan.shell, Step::Exec, "shell's path")?,
            arguments,
            environment,
            workdir: text(&plan.workdir, Step::Workdir, "working directory")?,
            umask: plan.umask,
            terminal: plan.terminal,
            stdio,
        })
    }

    /// Forks. Returns the process id and the socket on which the child reports.
    pub(crate) fn spawn(&self, walls: Option<&Walls>) -> Result<(i32, OwnedFd), Failure> {
        let fork = |error: std::io::Error| failure(Step::Fork, error.raw_os_error().unwrap_or(0), "");
        let (report, child_end) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|errno| fork(errno.into()))?;
        let pointers = |strings: &[CString]| -> Vec<*const c_char> {
            strings
                .iter()
                .map(|string| string.as_ptr())
                .chain([ptr::null()])
                .collect()
        };
        let (argv, envp) = (pointers(&self.arguments), pointers(&self.environment));
        let number = |fd: BorrowedFd<'_>| fd.as_raw_fd();
        let pid = sys::spawn(&Launch {
            shell: &self.shell,
            argv: &argv,
            envp: &envp,
            workdir: &self.workdir,
            umask: self.umask,
            terminal: self.terminal,
            stdio: self.stdio.each_ref().map(|fd| number(fd.as_fd())),
            report: number(child_end.as_fd()),
            parent: rustix::process::getpid().as_raw_nonzero().get(),
            confine: walls.map(|walls| Confine {
                ruleset: number(walls.prepared.ruleset.as_fd()),
                restrict_flags: walls.prepared.restrict_flags,
                expect_refusal: walls.expect_refusal,
                filter: &walls.filter,
                listen: walls.listen,
            }),
        })
        .map_err(fork)?;
        Ok((pid, report))
    }

    /// Bytes that a prepared child needs for being told of this.
    pub(crate) fn room(&self) -> usize {
        /// For the layout, and for what rounding up takes.
        const SLACK: usize = 256 * 1024;
        let strings = self.arguments.iter().chain(&self.environment);
        let told: usize = strings
            .map(|string| string.as_bytes_with_nul().len() + size_of::<*const c_char>())
            .sum();
        (told + SLACK).max(ROOM)
    }

    /// Lets a child that was prepared beforehand become the command, as [`Image::spawn`] does with a new one.
    pub(crate) fn hand_over(&self, child: PreparedChild, walls: &Walls) -> std::io::Result<(i32, OwnedFd)> {
        let orders = Orders {
            shell: &self.shell,
            arguments: &self.arguments,
            environment: &self.environment,
            workdir: &self.workdir,
            umask: self.umask,
            terminal: self.terminal,
            restrict_flags: walls.prepared.restrict_flags,
            prove: walls.prepared.abi >= ABSTRACT_SOCKETS_SCOPED,
        };
        let stdio = self.stdio.each_ref().map(AsFd::as_fd);
        child.start(&orders, stdio, walls.prepared.ruleset.as_fd())
    }

    /// What a failed step was about, for people.
    pub(crate) fn subject(&self, step: Step) -> String {
        match step {
            Step::Exec => self.shell.to_string_lossy().into_owned(),
            Step::Workdir => self.workdir.to_string_lossy().into_owned(),
            _ => String::new(),
        }
    }
}

/// The seccomp program of a confinement. `listen` asks for a notification listener.
pub(crate) fn filter(
    confinement: &Confinement,
    listen: bool,
    prebuilt: &Prebuilt,
) -> Result<Vec<libc::sock_filter>, Failure> {
    let observation = if listen {
        Observation::Listener
    } else {
        Observation::Blind {
            signals_scoped: sys::landlock_abi() >= SIGNALS_SCOPED,
        }
    };
    match prebuilt.for_plan(confinement, observation) {
        Some(filter) => Ok(filter),
        None => {
            seccomp::build(confinement, observation).map_err(|error| failure(Step::BuildRuleset, 0, error.to_string()))
        }
    }
}

/// What the host refused of the namespaces, as the failed step.
pub(crate) fn refused(Refused { part, error }: &Refused) -> Failure {
    let step = if part.is_mount() {
        Step::Mounts
    } else {
        Step::Namespaces
    };
    failure(step, error.raw_os_error().unwrap_or(0), part.name())
}

/// Why no child could be prepared, as the failed step.
pub(crate) fn unprepared(error: &PrepareError) -> Failure {
    match error {
        PrepareError::Fork(error) => failure(Step::Fork, error.raw_os_error().unwrap_or(0), ""),
        PrepareError::Namespaces(error) => refused(error),
    }
}

impl Walls {
    /// Builds the ruleset for where the command runs. `listen` says that the filter has a notification listener.
    pub(crate) fn prepare(
        confinement: &Confinement,
        world: &World,
        filter: Vec<libc::sock_filter>,
        listen: bool,
    ) -> Result<Self, Failure> {
        let prepared = landlock::prepare(confinement, world)
            .map_err(|error| failure(Step::BuildRuleset, error.errno(), error.to_string()))?;
        let expect_refusal = !confinement
            .writable
            .iter()
            .any(|root| is_within(root.as_bytes(), b"/proc/self"));
        Ok(Self {
            prepared,
            filter,
            listen,
            expect_refusal,
        })
    }

    /// Landlock ABI of this kernel.
    pub(crate) fn abi(&self) -> u32 {
        self.prepared.abi
    }
}
