//! What all connections share.
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use dsh_policy::environment::EnvironmentRules;
use dsh_policy::policy::Deployment;
use dsh_policy::request::EnvMap;
use dsh_policy::wire::DaemonStatus;
use dsh_policy::{ByteString, ErrorCode, ExecError};
use tokio::sync::{Semaphore, SemaphorePermit, watch};

use crate::config::{Config, ConfigError};
use crate::helper::{Helpers, lock};
use crate::paths::Surroundings;
use crate::probe::Probe;
use crate::spill::{self, Retention};
use crate::task_folder::TaskFolder;
use crate::tasks::Tasks;
use crate::tmpdir::Record;

/// Name and version, for hellos and status.
pub(crate) const SERVER: &str = concat!("dsh-execd ", env!("CARGO_PKG_VERSION"));
/// Requests that may wait for their turn.
const MAX_WAITING: usize = 4_096;
/// Variables by which systemd speaks to the daemon itself: no command inherits them.
const OWN_VARIABLES: &[&str] = &[
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "JOURNAL_STREAM",
];

/// The configuration in force and what follows from it.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) config: Config,
    pub(crate) deployment: Deployment,
    pub(crate) environment: EnvironmentRules,
    /// `bash`, absolute; none when this host has none.
    pub(crate) shell: Option<PathBuf>,
}

/// One daemon.
#[derive(Debug)]
pub(crate) struct State {
    settings: Mutex<Arc<Settings>>,
    config_file: Option<PathBuf>,
    pub(crate) surroundings: Surroundings,
    /// Where the daemon was started.
    pub(crate) workdir: PathBuf,
    /// Folders that no command may change, canonical.
    pub(crate) own_folders: Vec<ByteString>,
    pub(crate) spill_folder: Arc<Path>,
    pub(crate) socket: PathBuf,
    /// The daemon's own environment, for requests without one.
    pub(crate) ambient: EnvMap,
    pub(crate) helpers: Arc<Helpers>,
    pub(crate) probe: Probe,
    pub(crate) tmpdirs: Record,
    pub(crate) tasks: Tasks,
    /// The one task that this process keeps, when it is a keeper and no daemon.
    pub(crate) keeping: Option<TaskFolder>,
    slots: Semaphore,
    waiting: AtomicUsize,
    /// True from the moment the daemon begins to leave.
    pub(crate) draining: watch::Sender<bool>,
    pub(crate) connections: AtomicU32,
    pub(crate) running: AtomicU32,
    pub(crate) finished: AtomicU64,
    pub(crate) failed: AtomicU64,
    started: Instant,
}

/// What start-up has found out and made.
pub(crate) struct Parts {
    pub(crate) config: Config,
    pub(crate) config_file: Option<PathBuf>,
    pub(crate) surroundings: Surroundings,
    pub(crate) workdir: PathBuf,
    pub(crate) spill_folder: PathBuf,
    pub(crate) socket: PathBuf,
    pub(crate) helpers: Arc<Helpers>,
    pub(crate) tmpdirs: Record,
    pub(crate) keeping: Option<TaskFolder>,
}

impl State {
    pub(crate) fn new(parts: Parts) -> Self {
        let own = [parts.surroundings.state.as_path()]
            .into_iter()
            .chain(parts.socket.parent())
            .chain(parts.config_file.as_deref().and_then(Path::parent));
        let own_folders = own
            .map(|path| path.canonicalize().unwrap_or_else(|_| path.to_owned()).into())
            .collect();
        let ambient = std::env::vars_os()
            .filter(|(name, _)| !OWN_VARIABLES.iter().any(|own| name == own))
            .map(|(name, value)| (name.into(), value.into()))
            .collect();
        Self {
            slots: Semaphore::new(parts.config.max_concurrent.min(Semaphore::MAX_PERMITS)),
            settings: Mutex::new(Arc::new(Settings::new(
                parts.config,
                parts.surroundings.home.as_deref(),
            ))),
            config_file: parts.config_file,
            surroundings: parts.surroundings,
            workdir: parts.workdir,
            own_folders,
            spill_folder: parts.spill_folder.into(),
            socket: parts.socket,
            ambient,
            helpers: parts.helpers,
            probe: Probe::new(),
            tmpdirs: parts.tmpdirs,
            tasks: Tasks::default(),
            keeping: parts.keeping,
            waiting: AtomicUsize::new(0),
            draining: watch::Sender::new(false),
            connections: AtomicU32::new(0),
            running: AtomicU32::new(0),
            finished: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            started: Instant::now(),
        }
    }

    pub(crate) fn settings(&self) -> Arc<Settings> {
        Arc::clone(&lock(&self.settings))
    }

    /// Reads the configuration again; a bad one changes nothing.
    pub(crate) fn reload(&self) -> Result<(), ConfigError> {
        let Some(file) = &self.config_file else { return Ok(()) };
        let fresh = Settings::new(Config::load(file)?, self.surroundings.home.as_deref());
        *lock(&self.settings) = Arc::new(fresh);
        Ok(())
    }

    /// The file the configuration is read from, whether or not it exists.
    pub(crate) fn config_file(&self) -> ByteString {
        self.config_file.as_deref().map(ByteString::from).unwrap_or_default()
    }

    pub(crate) fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Waits for the turn of a request, first come first served.
    pub(crate) async fn slot(&self) -> Result<SemaphorePermit<'_>, ExecError> {
        if let Ok(permit) = self.slots.try_acquire() {
            return Ok(permit);
        }
        let _waiting = Counted::up_to(&self.waiting, MAX_WAITING).ok_or_else(|| {
            ExecError::new(
                ErrorCode::LimitExceeded,
                format!("{MAX_WAITING} requests wait already; try again later, or raise `maxConcurrent` in the configuration"),
            )
        })?;
        self.slots.acquire().await.map_err(|_| shutting_down())
    }

    pub(crate) fn status(&self) -> DaemonStatus {
        DaemonStatus {
            server: SERVER.into(),
            pid: std::process::id(),
            uptime_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            running: self.running.load(Ordering::Relaxed),
            tasks: u32::try_from(self.tasks.count()).unwrap_or(u32::MAX),
            connections: self.connections.load(Ordering::Relaxed),
            finished: self.finished.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            socket: self.socket.as_path().into(),
            tier: self.probe.tier(&self.settings().config.tiers),
            draining: self.is_draining(),
        }
    }

    /// Removes spill files that are abandoned, too old or too much. Blocks.
    pub(crate) fn clean_spill(&self) {
        let settings = self.settings();
        let retention = Retention {
            max_age: Duration::from_secs(settings.config.spill_max_age_hours.saturating_mul(3_600)),
            max_total: settings.config.spill_max_total_bytes,
        };
        if let Err(error) = spill::clean(&self.spill_folder, retention, SystemTime::now()) {
            tracing::warn!(%error, "the spill folder could not be cleaned");
        }
    }
}

impl Settings {
    fn new(config: Config, home: Option<&Path>) -> Self {
        let environment = EnvironmentRules {
            keep: config.environment_keep.clone(),
            remove: config.environment_remove.clone(),
        };
        let shell = config.shell.clone().or_else(find_bash);
        Self {
            deployment: config.deployment(home),
            environment,
            shell,
            config,
        }
    }
}

fn find_bash() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let searched = std::env::split_paths(&path)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join("bash"));
    [PathBuf::from("/bin/bash"), PathBuf::from("/usr/bin/bash")]
        .into_iter()
        .chain(searched)
        .find(|bash| bash.is_file())
}

/// The answer to a request that comes while the daemon leaves.
pub(crate) fn shutting_down() -> ExecError {
    ExecError::new(
        ErrorCode::ShuttingDown,
        "the daemon is shutting down; nothing ran, ask again",
    )
}

/// Counts itself while it lives.
#[derive(Debug)]
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn up_to(counter: &'a AtomicUsize, limit: usize) -> Option<Self> {
        let counted = |count: usize| (count < limit).then_some(count + 1);
        counter
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, counted)
            .ok()
            .map(|_| Self(counter))
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
