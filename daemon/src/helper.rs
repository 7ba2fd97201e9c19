//! The helpers: finding the executable, starting it, keeping a few ready ones, and ending one for good.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dsh_policy::mode::Tier;
use dsh_policy::plan::{BUILD_ID, FromHelper, Plan, ToHelper};
use rustix::process::{Pid, Resource, Rlimit};
use tokio::process::{Child, Command};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::channel::{Channel, ChannelError};
use crate::reap;

/// How long a helper may take from its start to its first message.
const READY_DEADLINE: Duration = Duration::from_secs(2);
/// How long a helper may take to leave after its last message.
const EXIT_DEADLINE: Duration = Duration::from_secs(2);

/// Why there is no helper.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HelperError {
    /// It cannot be executed.
    #[error("cannot start the helper {path}: {source}; it belongs beside dsh-execd, or set `helper` in the configuration", path = path.display())]
    Spawn {
        /// What was to be executed.
        path: PathBuf,
        /// Why it was not.
        source: io::Error,
    },
    /// It belongs to another build: its private messages would be misunderstood.
    #[error("the helper {path} is of build {theirs} but this daemon is of build {BUILD_ID}; install both from one build", path = path.display())]
    OtherBuild {
        /// Which executable.
        path: PathBuf,
        /// What it said.
        theirs: String,
    },
    /// It did not say that it is ready.
    #[error("the helper was not ready within {} ms", READY_DEADLINE.as_millis())]
    NotReady,
    /// It ended, or spoke out of turn, before it was ready.
    #[error("the helper ended before it was ready")]
    Gone,
    /// Its channel failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
}

/// What all helpers share: the executable, which pids are helpers (everything else that becomes our child is an orphan), and the ready ones.
#[derive(Debug)]
pub(crate) struct Helpers {
    executable: PathBuf,
    /// The limit on open files that the daemon was started with; its own is raised, a command's must not be.
    open_files: Rlimit,
    /// Each helper's process id, and whether it runs a confined command.
    pids: Mutex<BTreeMap<i32, bool>>,
    ready: Mutex<VecDeque<Helper>>,
    /// Helpers that exist already but are not in `pids` yet.
    starting: AtomicUsize,
    /// Somebody is filling up: many requests that end at once must not each start helpers.
    refilling: AtomicBool,
    /// Helpers that start now make namespaces while they wait.
    namespaces: AtomicBool,
}

/// One helper process that has not run its command yet, or is running it.
#[derive(Debug)]
pub(crate) struct Helper {
    child: Child,
    channel: Channel,
    registered: Registered,
}

/// Keeps a pid in the set of helpers.
#[derive(Debug)]
pub(crate) struct Registered {
    helpers: Arc<Helpers>,
    pid: i32,
}

impl Drop for Registered {
    fn drop(&mut self) {
        lock(&self.helpers.pids).remove(&self.pid);
    }
}

/// The executable beside the daemon's own; `PATH` is never searched, a command could have written there.
pub(crate) fn beside_daemon() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    own.parent().unwrap_or(Path::new("/")).join("dsh-exec-helper")
}

impl Helpers {
    pub(crate) fn new(executable: PathBuf, open_files: Rlimit) -> Arc<Self> {
        Arc::new(Self {
            executable,
            open_files,
            pids: Mutex::default(),
            ready: Mutex::default(),
            starting: AtomicUsize::new(0),
            refilling: AtomicBool::new(false),
            namespaces: AtomicBool::new(false),
        })
    }

    /// Helpers that start from now on get ready for commands of this tier. Any of them can still run any command.
    pub(crate) fn expect(&self, tier: Option<Tier>) {
        let apart = matches!(tier, Some(Tier::Namespace | Tier::Mount));
        self.namespaces.store(apart, Ordering::Relaxed);
    }

    /// Those of the daemon's `children` that are no helpers; none while it is not known yet which are.
    pub(crate) fn strangers(&self, children: BTreeSet<i32>) -> Option<Vec<i32>> {
        // Asked after the children were listed: a helper among them is in `pids` by now, or still counted here.
        if self.starting.load(Ordering::SeqCst) > 0 {
            return None;
        }
        let pids = lock(&self.pids);
        Some(children.into_iter().filter(|pid| !pids.contains_key(pid)).collect())
    }

    /// The executable of helpers.
    pub(crate) fn executable(&self) -> &Path {
        &self.executable
    }

    /// Whether any confined command runs now.
    pub(crate) fn confine_any(&self) -> bool {
        lock(&self.pids).values().any(|confined| *confined)
    }

    /// Whether a process is a helper whose command is confined.
    pub(crate) fn confines(&self, pid: i32) -> bool {
        lock(&self.pids).get(&pid).is_some_and(|confined| *confined)
    }

    /// A ready helper: a waiting one when there is one, else a fresh one.
    pub(crate) async fn acquire(self: &Arc<Self>) -> Result<Helper, HelperError> {
        loop {
            let waiting = lock(&self.ready).pop_front();
            let Some(mut helper) = waiting else { break };
            // Somebody may have ended it while it waited.
            if matches!(helper.child.try_wait(), Ok(None)) {
                return Ok(helper);
            }
        }
        self.start().await
    }

    /// Starts helpers until `target` are waiting.
    pub(crate) async fn refill(self: &Arc<Self>, target: usize) {
        if self.refilling.swap(true, Ordering::Relaxed) {
            return;
        }
        while lock(&self.ready).len() < target {
            match self.start().await {
                Ok(helper) => lock(&self.ready).push_back(helper),
                Err(error) => {
                    tracing::warn!(%error, "no helper could be made ready");
                    break;
                }
            }
        }
        self.refilling.store(false, Ordering::Relaxed);
    }

    /// Ends the waiting helpers: they leave when their socket closes.
    pub(crate) async fn drain(&self) {
        let waiting: Vec<Helper> = lock(&self.ready).drain(..).collect();
        for helper in waiting {
            helper.retire().await;
        }
    }

    async fn start(self: &Arc<Self>) -> Result<Helper, HelperError> {
        let helpers = Arc::clone(self);
        // Starting a process holds up its thread until the new program is in place: not the one that serves everybody.
        let spawned = spawn_blocking(move || helpers.spawn());
        let mut helper = spawned.await.map_err(|_| HelperError::Gone)??;
        match timeout(READY_DEADLINE, helper.channel.receive()).await {
            Err(_) => Err(HelperError::NotReady),
            Ok(Ok(Some(FromHelper::Ready { build }))) if build == BUILD_ID => Ok(helper),
            Ok(Ok(Some(FromHelper::Ready { build }))) => Err(HelperError::OtherBuild {
                path: self.executable.clone(),
                theirs: build,
            }),
            Ok(Ok(_)) => Err(HelperError::Gone),
            Ok(Err(error)) => Err(error.into()),
        }
    }

    fn spawn(self: &Arc<Self>) -> Result<Helper, HelperError> {
        let failed = |source| HelperError::Spawn {
            path: self.executable.clone(),
            source,
        };
        let (channel, theirs) = Channel::pair().map_err(failed)?;
        let mut command = self.command(Stdio::from(theirs), Stdio::null());
        if self.namespaces.load(Ordering::Relaxed) {
            command.arg("--namespaces");
        }
        let (child, registered) = self.begin(command).map_err(failed)?;
        Ok(Helper {
            child,
            channel,
            registered,
        })
    }

    /// Runs the helper's own probe of this host; gives what it printed.
    pub(crate) async fn probe(self: &Arc<Self>, deadline: Duration) -> Result<Vec<u8>, HelperError> {
        let failed = |source| HelperError::Spawn {
            path: self.executable.clone(),
            source,
        };
        let mut command = self.command(Stdio::null(), Stdio::piped());
        command.arg("--probe");
        let (child, _registered) = self.begin(command).map_err(failed)?;
        let output = timeout(deadline, child.wait_with_output())
            .await
            .map_err(|_| HelperError::NotReady)?;
        Ok(output.map_err(failed)?.stdout)
    }

    /// No working directory is set here: the standard library would then copy the whole daemon (fork) instead of borrowing it (vfork).
    /// The daemon itself stands in `/`.
    fn command(&self, stdin: Stdio, stdout: Stdio) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .env_clear()
            .stdin(stdin)
            .stdout(stdout)
            .stderr(Stdio::null())
            .kill_on_drop(true);
        command
    }

    fn begin(self: &Arc<Self>, mut command: Command) -> io::Result<(Child, Registered)> {
        self.starting.fetch_add(1, Ordering::SeqCst);
        let begun = command.spawn().map(|child| {
            let registered = self.register(&child);
            (child, registered)
        });
        self.starting.fetch_sub(1, Ordering::SeqCst);
        begun
    }

    /// Starts the keeper of a detached task. What runs below it counts as confined, like below a helper.
    pub(crate) fn begin_keeper(self: &Arc<Self>, command: Command) -> io::Result<(Child, Registered)> {
        let (child, registered) = self.begin(command)?;
        lock(&self.pids).insert(registered.pid, true);
        Ok((child, registered))
    }

    /// The same for a keeper that lives already.
    pub(crate) fn register_keeper(self: &Arc<Self>, pid: i32) -> Registered {
        lock(&self.pids).insert(pid, true);
        Registered {
            helpers: Arc::clone(self),
            pid,
        }
    }

    fn register(self: &Arc<Self>, child: &Child) -> Registered {
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).unwrap_or_default();
        lock(&self.pids).insert(pid, false);
        if let Some(pid) = Pid::from_raw(pid)
            && let Err(error) = rustix::process::prlimit(Some(pid), Resource::Nofile, self.open_files)
        {
            tracing::debug!(%error, "the command keeps the daemon's limit on open files");
        }
        Registered {
            helpers: Arc::clone(self),
            pid,
        }
    }
}

impl Helper {
    /// The helper's process id.
    pub(crate) fn pid(&self) -> i32 {
        self.registered.pid
    }

    /// Hands over what to run. An error means that the helper has not got all of it and that nothing ran.
    pub(crate) async fn run(&self, plan: Plan, streams: [BorrowedFd<'_>; 3]) -> Result<(), ChannelError> {
        lock(&self.registered.helpers.pids).insert(self.pid(), plan.confinement.is_some());
        self.channel.send_plan(plan, streams).await
    }

    /// Asks for the end of the command. A failure shows itself as the end of the channel.
    pub(crate) fn tell(&self, message: &ToHelper) {
        if let Err(error) = self.channel.send_now(message) {
            tracing::debug!(%error, "the helper could not be told");
        }
    }

    /// The next message; none when the helper is gone.
    pub(crate) async fn receive(&mut self) -> Result<Option<FromHelper>, ChannelError> {
        self.channel.receive().await
    }

    /// After the last message: lets the helper leave, and makes it leave when it does not.
    pub(crate) async fn retire(self) {
        let Self {
            mut child,
            channel,
            registered,
        } = self;
        drop(channel);
        if timeout(EXIT_DEADLINE, child.wait()).await.is_err() {
            tracing::warn!(pid = registered.pid, "a helper did not leave after its last message");
            kill(&mut child).await;
        }
    }

    /// When its command's fate is lost: kills the helper and everything that it leaves behind. Gives how the helper ended.
    pub(crate) async fn destroy(mut self) -> Option<ExitStatus> {
        let status = kill(&mut self.child).await;
        let helpers = Arc::clone(&self.registered.helpers);
        drop(self);
        reap::orphans(&helpers).await;
        status
    }
}

async fn kill(child: &mut Child) -> Option<ExitStatus> {
    if let Err(error) = child.start_kill() {
        tracing::debug!(%error, "the helper was gone already");
    }
    timeout(EXIT_DEADLINE, child.wait()).await.ok().and_then(Result::ok)
}

/// A panic elsewhere cannot leave these collections half-changed, so a poisoned lock is still good.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
