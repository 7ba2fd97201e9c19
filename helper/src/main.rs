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
mod layout;
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
mod world;

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use dsh_policy::mode::Tier;
use dsh_policy::plan::{BUILD_ID, Confinement, Failure, FromHelper, Plan, Report, Step, ToHelper};
use dsh_policy::result::Unenforced;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use channel::{Channel, ChannelError};
use launch::{Image, Walls, failure};
use mediate::Mediator;
use seccomp::Prebuilt;
use supervise::{Graces, Supervisor};
use sys::{Apart, Preparation, PreparedChild};
use world::World;

/// Exit code of a helper that could not do its work; the daemon knows why from the channel.
const FAILED: u8 = 125;
/// The argument by which the daemon says that commands will have namespaces of their own, so that they are made while the helper waits.
const NAMESPACES: &[u8] = b"--namespaces";
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
        None => serve(Tier::Landlock),
        Some(NAMESPACES) => serve(Tier::Namespace),
        Some(b"--probe") => probe::print(),
        Some(probe::TRY_TIER) => probe::try_tier(arguments.get(1).map_or(&[], Vec::as_slice)),
        Some(b"-c") => probe::violate(arguments.get(1).map_or(&[], Vec::as_slice)),
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

/// `tier` is what the next command will most likely be confined by.
fn serve(tier: Tier) -> ExitCode {
    let Some(mut channel) = Channel::open() else {
        return refuse_to_start();
    };
    let prebuilt = Prebuilt::new(tier);
    let mut prepared = None;
    let preparation = Preparation {
        filter: prebuilt.program(),
        listen: true,
        apart: (tier != Tier::Landlock).then_some(Apart { network: false }),
        room: sys::ROOM,
    };
    let outcome = match receive_plan(&mut channel, || prepared = PreparedChild::fork(preparation).ok()) {
        Ok((plan, stdio)) => carry_out(&mut channel, &plan, stdio, &prebuilt, prepared),
        Err(None) => {
            // A waiting helper that is not needed any more.
            prepared.into_iter().for_each(PreparedChild::discard);
            return ExitCode::SUCCESS;
        }
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
    image: Image,
}

fn carry_out(
    channel: &mut Channel<'_>,
    plan: &Plan,
    stdio: [OwnedFd; 3],
    prebuilt: &Prebuilt,
    prepared: Option<PreparedChild>,
) -> Result<Report, Failure> {
    let image = Image::prepare(plan, stdio)?;
    // 3. namespaces, if the tier has them: first, because mapping the ids of a privileged user needs their powers.
    let prepared = suitable_child(plan.confinement.as_ref(), &image, prebuilt, prepared)?;
    // 4. drop-capabilities: here rather than in the child, so that supervisor and command have the same rights to files and the supervisor's
    //    answer to "would that have failed anyway?" is the command's.
    let privileged = plan.confinement.is_some() && drop_capabilities()?;
    // 5. supervisor: orphans come to us; signals arrive as messages.
    let signals = become_supervisor()?;
    // 6. private-tmp.
    let private_tmp = PrivateTmp::make(plan)?;
    let outcome = Job {
        channel,
        plan,
        signals,
        prebuilt,
        image,
    }
    .run(prepared, privileged);
    drop(private_tmp);
    outcome
}

/// The prepared child, if it is what this command needs; otherwise, for a command with namespaces of its own, a new one. A command without is forked later.
fn suitable_child(
    confinement: Option<&Confinement>,
    image: &Image,
    prebuilt: &Prebuilt,
    prepared: Option<PreparedChild>,
) -> Result<Option<PreparedChild>, Failure> {
    let apart = confinement.and_then(layout::apart);
    let room = image.room();
    if let Some(child) = prepared {
        let fits = confinement.is_some_and(|confinement| prebuilt.fits(confinement));
        if fits && child.apart() == apart && room == sys::ROOM {
            return Ok(Some(child));
        }
        child.discard();
    }
    match (confinement, apart) {
        (Some(confinement), Some(apart)) => {
            let child = fork_apart(confinement, apart, room, true, prebuilt)?;
            Ok(Some(child))
        }
        _ => Ok(None),
    }
}

fn fork_apart(
    confinement: &Confinement,
    apart: Apart,
    room: usize,
    listen: bool,
    prebuilt: &Prebuilt,
) -> Result<PreparedChild, Failure> {
    let filter = launch::filter(confinement, listen, prebuilt)?;
    PreparedChild::fork(Preparation {
        filter: &filter,
        listen,
        apart: Some(apart),
        room,
    })
    .map_err(|error| launch::unprepared(&error))
}

/// How one attempt at a command is confined.
struct Confined<'a> {
    confinement: &'a Confinement,
    listen: bool,
    privileged: bool,
}

impl Job<'_, '_> {
    /// 7.-17. mounts, build-ruleset, fork, the child's steps, and supervision. Done a second time without a listener when none can be had: the kernel
    /// permits one per process, so there is none inside another sandbox that has one.
    fn run(&mut self, prepared: Option<PreparedChild>, privileged: bool) -> Result<Report, Failure> {
        let Some(confinement) = &self.plan.confinement else {
            let child = self.image.spawn(None)?;
            return self.supervise(child, None, Rc::new(World::HOST), (Vec::new(), None));
        };
        let confined = |listen| Confined {
            confinement,
            listen,
            privileged,
        };
        match self.attempt(&confined(true), prepared) {
            Err(failure) if failure.step == Step::Seccomp => {
                let prepared = match layout::apart(confinement) {
                    Some(apart) => Some(fork_apart(confinement, apart, self.image.room(), false, self.prebuilt)?),
                    None => None,
                };
                self.attempt(&confined(false), prepared)
            }
            outcome => outcome,
        }
    }

    fn attempt(&mut self, confined: &Confined<'_>, mut prepared: Option<PreparedChild>) -> Result<Report, Failure> {
        let Confined {
            confinement, listen, ..
        } = *confined;
        let inside = match &mut prepared {
            Some(child) => child
                .furnish(&layout::of(confinement)?)
                .map_err(|error| launch::refused(&error))?,
            None => None,
        };
        let world = Rc::new(World::new(inside));
        let filter = match prepared {
            Some(_) => Vec::new(), // It has its filter.
            None => launch::filter(confinement, listen, self.prebuilt)?,
        };
        let walls = Walls::prepare(confinement, &world, filter, listen)?;
        let limits = limits(&walls, confinement, &world, listen);
        check_required(&limits.0, confinement)?;
        // Before the command starts: whatever it makes must be younger.
        let mediator = listen.then(|| {
            let world = Rc::clone(&world);
            Mediator::new(confinement.clone(), world, self.plan.max_denials, confined.privileged)
        });
        let child = match prepared.map(|child| self.image.hand_over(child, &walls)) {
            Some(Ok(child)) => child,
            Some(Err(error)) if world.is_apart() => {
                return Err(failure(Step::Fork, error.raw_os_error().unwrap_or(0), ""));
            }
            Some(Err(_)) => {
                let filter = launch::filter(confinement, listen, self.prebuilt)?;
                self.image
                    .spawn(Some(&Walls::prepare(confinement, &world, filter, listen)?))?
            }
            None => self.image.spawn(Some(&walls))?,
        };
        self.supervise(child, mediator, world, limits)
    }

    fn supervise(
        &mut self,
        child: (i32, OwnedFd),
        mediator: Option<Mediator>,
        world: Rc<World>,
        (unenforced, unobserved): Limits,
    ) -> Result<Report, Failure> {
        let graces = Graces {
            kill: Duration::from_millis(self.plan.kill_grace_ms),
            drain: Duration::from_millis(self.plan.drain_grace_ms),
            setup: Duration::from_millis(self.plan.setup_deadline_ms),
            hang_up: self.plan.terminal,
        };
        let mut supervisor = Supervisor::new(self.channel, &self.signals, child, mediator, world, graces);
        supervisor.set_up().map_err(|mut failure| {
            if failure.detail.is_empty() {
                failure.detail = self.image.subject(failure.step);
            }
            failure
        })?;
        supervisor.announce(unenforced, unobserved);
        Ok(supervisor.run())
    }
}

/// The daemon has asked the probe before; here it is this very command's set-up that is looked at.
fn check_required(unenforced: &[Unenforced], confinement: &Confinement) -> Result<(), Failure> {
    let required = &confinement.require;
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
type Limits = (Vec<Unenforced>, Option<String>);

fn limits(walls: &Walls, confinement: &Confinement, world: &World, listen: bool) -> Limits {
    let mut unenforced = landlock::unenforced(walls.abi(), confinement);
    unenforced.extend(mediate::unenforced(confinement, listen, world.is_apart()));
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
