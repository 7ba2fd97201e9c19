//! One process per command: the numbered steps from a sanitized start to the final report. `README.md` ("How it works") has the same steps.
//!
//! Started by the daemon with a socket at fd 0 and nothing else; reads no configuration and no environment. The order is the safety argument: whatever
//! is inherited goes first, privileges before the fork, confinement before the shell; see `sys/child.rs` for what happens between fork and exec.
mod address;
mod bpf;
mod calls;
mod channel;
mod emulate;
mod facts;
mod files;
mod landlock;
mod launch;
mod mediate;
mod message;
mod natural;
mod object;
mod private_tmp;
mod probe;
mod process;
mod reach;
mod repositories;
mod seccomp;
mod supervise;
mod sys;
mod terminals;
mod tree;
mod unix_names;

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;
use std::time::Duration;

use dsh_policy::plan::{BUILD_ID, Confinement, Failure, FromHelper, Plan, Report, Step, ToHelper};
use dsh_policy::result::Unenforced;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use channel::{Channel, ChannelError};
use launch::{Image, Walls, failure};
use mediate::Mediator;
use seccomp::Prebuilt;
use supervise::{Graces, Supervisor};
use sys::PreparedChild;

/// Exit code of a helper that could not do its work; the daemon knows why from the channel.
const FAILED: u8 = 125;
/// How long a daemon that does not read is waited for at the end.
const LAST_WORDS: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    // 1. sanitize: nothing inherited is left but the control socket.
    if sys::close_inherited_fds().is_err() {
        return ExitCode::from(FAILED);
    }
    let arguments: Vec<Vec<u8>> = std::env::args_os().skip(1).map(OsStringExt::into_vec).collect();
    if arguments.first().is_some_and(|first| first == b"--detach") {
        return detach();
    }
    sys::clear_environment();
    sys::default_signals();
    match arguments.first().map(Vec::as_slice) {
        None => serve(),
        Some(b"--probe") => probe::print(),
        Some(b"-c") if arguments.get(1).is_some_and(|command| command == probe::VIOLATE) => probe::violate(),
        Some(b"--version") => {
            println!("dsh-exec-helper {} ({BUILD_ID})", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        Some(_) => refuse_to_start(),
    }
}

/// Becomes another program of this user (the daemon, started by a client) in a session of its own and without the caller's descriptors, which nobody
/// but this crate may close. The environment stays: the daemon is configured by it.
fn detach() -> ExitCode {
    use std::os::unix::process::CommandExt as _;
    // Fails only for the leader of a process group, which then has no terminal to lose either.
    let _ = rustix::process::setsid();
    let mut arguments = std::env::args_os().skip(2);
    let Some(program) = arguments.next() else {
        return refuse_to_start();
    };
    let error = std::process::Command::new(&program).args(arguments).exec();
    eprintln!("dsh-exec-helper: cannot start {}: {error}", program.display());
    ExitCode::from(FAILED)
}

fn refuse_to_start() -> ExitCode {
    eprintln!("dsh-exec-helper is started by dsh-execd; run dsh-exec instead");
    ExitCode::from(FAILED)
}

fn serve() -> ExitCode {
    let Some(mut channel) = Channel::open() else {
        return refuse_to_start();
    };
    let prebuilt = Prebuilt::new();
    let mut prepared = None;
    let outcome = match receive_plan(&mut channel, || prepared = PreparedChild::fork(prebuilt.program()).ok()) {
        Ok((plan, stdio)) => carry_out(&mut channel, &plan, stdio, &prebuilt, prepared),
        Err(None) => return ExitCode::SUCCESS, // A waiting helper that is not needed any more.
        Err(Some(failure)) => Err(failure),
    };
    let code = if outcome.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(FAILED)
    };
    let last = match outcome {
        Ok(report) => FromHelper::Finished(Box::new(report)),
        Err(failure) => FromHelper::Failed(failure),
    };
    if channel.send(&last).is_ok() {
        channel.finish(LAST_WORDS);
    }
    code
}

/// 2. receive-plan: say that we are up, wait (for hours, perhaps, in the daemon's pool), check that both come from one build.
///
/// `prepare` is what can be done meanwhile.
fn receive_plan(channel: &mut Channel<'_>, prepare: impl FnOnce()) -> Result<(Plan, [OwnedFd; 3]), Option<Failure>> {
    // The plan holds the command's environment, which may have credentials: no core dump, no inspection by other processes of the user. The
    // command itself becomes inspectable again when it executes the shell.
    let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
    let broken = |error: ChannelError| match error {
        ChannelError::Closed => None,
        error => Some(failure(Step::ReceivePlan, 0, error.to_string())),
    };
    channel
        .send(&FromHelper::Ready {
            build: BUILD_ID.to_owned(),
        })
        .map_err(broken)?;
    if !channel.is_readable() {
        prepare();
    }
    match channel.receive_plan().map_err(broken)? {
        (ToHelper::Run(plan), stdio) if plan.build == BUILD_ID => Ok((*plan, stdio)),
        (ToHelper::Run(plan), _) => Err(Some(failure(
            Step::ReceivePlan,
            0,
            format!(
                "the daemon is of build {}, this helper of build {BUILD_ID}: install both from one build",
                plan.build
            ),
        ))),
        _ => Err(Some(failure(Step::ReceivePlan, 0, ChannelError::NoPlan.to_string()))),
    }
}

/// Everything that the steps after the plan's arrival share.
struct Job<'a, 'c> {
    channel: &'a mut Channel<'c>,
    plan: &'a Plan,
    signals: SignalFd,
    prebuilt: &'a Prebuilt,
    prepared: Option<PreparedChild>,
}

fn carry_out(
    channel: &mut Channel<'_>,
    plan: &Plan,
    stdio: [OwnedFd; 3],
    prebuilt: &Prebuilt,
    prepared: Option<PreparedChild>,
) -> Result<Report, Failure> {
    // 3. drop-capabilities: here rather than in the child, so that supervisor and command have the same rights to files and the supervisor's
    //    answer to "would that have failed anyway?" is the command's.
    let confinement = plan.confinement.as_ref();
    let fits = confinement.is_some_and(|confinement| prebuilt.fits(confinement));
    let prepared = match prepared {
        Some(child) if !fits => {
            child.discard();
            None
        }
        prepared => prepared,
    };
    let privileged = confinement.is_some() && drop_capabilities()?;
    // 4. supervisor: orphans come to us; signals arrive as messages.
    let signals = become_supervisor()?;
    // 5. private-tmp.
    let private_tmp = PrivateTmp::make(plan)?;
    let outcome = Job {
        channel,
        plan,
        signals,
        prebuilt,
        prepared,
    }
    .run(stdio, privileged);
    drop(private_tmp);
    outcome
}

impl Job<'_, '_> {
    /// 6.-17. build-ruleset, fork, the child's steps, and supervision. Done a second time without a listener when none can be had: the kernel
    /// permits one per process, so there is none inside another sandbox that has one.
    fn run(&mut self, stdio: [OwnedFd; 3], privileged: bool) -> Result<Report, Failure> {
        let image = Image::prepare(self.plan, stdio)?;
        let Some(confinement) = &self.plan.confinement else {
            return self.supervise(&image, None, None);
        };
        let mediator = Mediator::new(confinement.clone(), self.plan.max_denials, privileged);
        match self.attempt(&image, confinement, Some(mediator)) {
            Err(failure) if failure.step == Step::Seccomp => self.attempt(&image, confinement, None),
            outcome => outcome,
        }
    }

    fn attempt(
        &mut self,
        image: &Image,
        confinement: &Confinement,
        mediator: Option<Mediator>,
    ) -> Result<Report, Failure> {
        let walls = Walls::prepare(confinement, mediator.is_some(), self.prebuilt)?;
        self.supervise(image, Some((&walls, confinement)), mediator)
    }

    fn supervise(
        &mut self,
        image: &Image,
        walls: Option<(&Walls, &Confinement)>,
        mediator: Option<Mediator>,
    ) -> Result<Report, Failure> {
        let graces = Graces {
            kill: Duration::from_millis(self.plan.kill_grace_ms),
            drain: Duration::from_millis(self.plan.drain_grace_ms),
            setup: Duration::from_millis(self.plan.setup_deadline_ms),
        };
        let listen = mediator.is_some();
        let (unenforced, unobserved) = walls
            .map(|(walls, confinement)| limits(walls, confinement, listen))
            .unwrap_or_default();
        check_required(&unenforced, walls.map(|(_, confinement)| confinement))?;
        let walls = walls.map(|(walls, _)| walls);
        let handed_over = self
            .prepared
            .take()
            .zip(walls)
            .and_then(|(child, walls)| image.hand_over(child, walls));
        let child = match handed_over {
            Some(child) => child,
            None => image.spawn(walls)?,
        };
        let mut supervisor = Supervisor::new(self.channel, &self.signals, child, mediator, graces);
        supervisor.set_up().map_err(|mut failure| {
            if failure.detail.is_empty() {
                failure.detail = image.subject(failure.step);
            }
            failure
        })?;
        supervisor.announce(unenforced, unobserved);
        Ok(supervisor.run())
    }
}

/// The daemon has asked the probe before; here it is this very command's set-up that is looked at.
fn check_required(unenforced: &[Unenforced], confinement: Option<&Confinement>) -> Result<(), Failure> {
    let required = confinement.map_or(&[][..], |confinement| &confinement.require);
    match unenforced.iter().find(|missing| required.contains(&missing.guarantee)) {
        Some(missing) => Err(failure(
            Step::BuildRuleset,
            0,
            format!(
                "{} is required and cannot be kept: {}",
                missing.guarantee, missing.reason
            ),
        )),
        None => Ok(()),
    }
}

/// What is not enforced, and why refusals are not observed.
fn limits(walls: &Walls, confinement: &Confinement, listen: bool) -> (Vec<Unenforced>, Option<String>) {
    let mut unenforced = landlock::unenforced(walls.abi(), confinement);
    unenforced.extend(mediate::unenforced(confinement, listen));
    let unobserved = (!listen).then(|| {
        "the kernel permits one seccomp notification listener per process, and this one runs inside a sandbox that has it".to_owned()
    });
    (unenforced, unobserved)
}

/// Says whether there was anything to drop: without a sandbox the command would have had root's powers.
fn drop_capabilities() -> Result<bool, Failure> {
    let failed = |error: caps::errors::CapsError| failure(Step::DropCapabilities, 0, error.to_string());
    let privileged = caps::has_cap(None, caps::CapSet::Effective, caps::Capability::CAP_SYS_ADMIN).map_err(failed)?;
    // The bounding set needs the capability to change it; without that, `no_new_privs` keeps the rest from coming back.
    if caps::has_cap(None, caps::CapSet::Effective, caps::Capability::CAP_SETPCAP).map_err(failed)? {
        for capability in caps::all() {
            // One that this kernel does not know gives an error; one that it knows is gone whatever it was before.
            let _ = caps::drop(None, caps::CapSet::Bounding, capability);
        }
    }
    for set in [
        caps::CapSet::Ambient,
        caps::CapSet::Inheritable,
        caps::CapSet::Effective,
        caps::CapSet::Permitted,
    ] {
        caps::clear(None, set).map_err(failed)?;
    }
    Ok(privileged)
}

fn become_supervisor() -> Result<SignalFd, Failure> {
    let failed = |errno: i32| failure(Step::Supervisor, errno, "");
    // Any process id switches it on: the kernel takes the argument for a truth value.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|errno| failed(errno.raw_os_error()))?;
    let mut watched = SigSet::empty();
    for signal in [
        Signal::SIGCHLD,
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        watched.add(signal);
    }
    let mut blocked = watched;
    blocked.add(Signal::SIGPIPE);
    blocked.thread_block().map_err(|errno| failed(errno as i32))?;
    SignalFd::with_flags(&watched, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC).map_err(|errno| failed(errno as i32))
}

/// The private temporary folder, for as long as this lives.
struct PrivateTmp(Option<CString>);

impl PrivateTmp {
    fn make(plan: &Plan) -> Result<Self, Failure> {
        let Some(path) = &plan.private_tmp else {
            return Ok(Self(None));
        };
        let failed = |errno: i32| failure(Step::PrivateTmp, errno, path.display());
        let name = CString::new(path.as_bytes()).map_err(|_| failed(libc::EINVAL))?;
        private_tmp::make(&name).map_err(|errno| failed(errno.raw_os_error()))?;
        Ok(Self(Some(name)))
    }
}

impl Drop for PrivateTmp {
    fn drop(&mut self) {
        if let Some(name) = &self.0 {
            // What cannot be removed (another user's file, put there by a survivor) is the daemon's to find and report.
            let _ = private_tmp::remove(name);
        }
    }
}
