//! The story of one command: request -> spec -> environment -> plan -> helper -> facts -> result.
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dsh_policy::environment::{self, ChildEnvironment};
use dsh_policy::explain::{self, PathAnswer};
use dsh_policy::mode::{Lifetime, Tier};
use dsh_policy::plan::Plan;
use dsh_policy::request::{BashExecSpec, EnvMap};
use dsh_policy::resolve::{self, PlanInputs};
use dsh_policy::result::{EnvironmentReport, StreamResult};
use dsh_policy::wire::StreamName;
use dsh_policy::{BashExecRequest, BashRunResult, ByteString, ErrorCode, ExecError, SandboxMode};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::net::unix::pipe::Receiver;
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use crate::control::{Control, Stop};
use crate::helper::Helper;
use crate::outcome::{self, Ended};
use crate::output::{Collector, Events, Limits, Source};
use crate::probe::{self, runner_failure};
use crate::state::{Settings, State, shutting_down};
use crate::stdin::{self, Feeder};
use crate::supervise::{self, Watch};
use crate::terminal::Terminal;

/// A file system that does not answer holds up its own request only, and not for longer than this.
const RESOLVE_DEADLINE: Duration = Duration::from_secs(10);
/// Everything is dead when the last of the output is read, so its end is near; more than this is not waited for.
const DRAIN_DEADLINE: Duration = Duration::from_secs(3);

/// Runs one command from the request to the result. Whoever drops this has dropped the command: the helper sees its socket close.
pub(crate) async fn run(
    state: &Arc<State>,
    mut request: BashExecRequest,
    events: Events,
    mut control: Control,
) -> Result<BashRunResult, ExecError> {
    let settings = state.settings();

    // 1. Until the plan is handed over nothing has run, and a reason to stop means that nothing will.
    let prepared = tokio::select! {
        biased;
        why = control.stopped() => return Err(not_started(why)),
        prepared = prepare(state, &settings, &mut request) => prepared?,
    };
    let Prepared {
        spec,
        mut plan,
        tier,
        removed,
        helper,
        slot,
        private_tmp,
    } = prepared;

    // 2. The command's three streams, and whoever is at their other ends.
    let kept = [spec.stdout_max_bytes, settings.deployment.kept_bytes];
    let streams = open_streams(state, &settings, &mut request, &mut control, kept, &events).map_err(|error| {
        ExecError::new(
            ErrorCode::Internal,
            format!("the command's streams could not be made: {error}"),
        )
    })?;
    drop(request);
    // The command may open its own terminal by name too, as any other device of its mode.
    if let (Some(name), Some(confinement)) = (&streams.terminal, &mut plan.confinement) {
        confinement.devices.push(name.clone());
    }

    // 3. Hand over the plan and watch the helper until everything has ended.
    let watch = Watch::new(&spec, &plan, &settings, events, streams.gate);
    let ended = supervise::run(helper, plan, streams.theirs, watch, &mut control).await;
    if let Some(private_tmp) = private_tmp {
        release_tmp(private_tmp).await;
    }
    drop(streams.feeder);
    drop(streams.resizer);

    // 4. Everything is dead, so the rest of the output is there; then the result.
    let stdout = streams.stdout.end().await;
    let stderr = streams.stderr.end().await;
    drop(slot);
    refill(state, &settings);
    match ended {
        Ok(ended) => {
            let environment = EnvironmentReport { removed };
            let ended = Ended {
                report: ended.report,
                start: ended.start,
                cause: ended.cause,
                tier,
                environment,
                stdout,
                stderr,
            };
            Ok(outcome::result(&spec, ended))
        }
        Err(error) => {
            discard(&[stdout, stderr]).await;
            Err(error)
        }
    }
}

/// What a request becomes, without running it.
pub(crate) async fn resolve(state: &Arc<State>, request: &BashExecRequest) -> Result<BashExecSpec, ExecError> {
    spec_of(state, &state.settings(), request).await
}

/// A command that a client waits for.
pub(crate) fn check_foreground(request: &BashExecRequest) -> Result<(), ExecError> {
    if !request.background && request.lifetime.unwrap_or_default() == Lifetime::Foreground {
        return Ok(());
    }
    Err(ExecError::new(
        ErrorCode::InvalidRequest,
        "a background command is started with the message `start`, not `run`",
    ))
}

/// Whether a command could be started now: its folder can be used, and what confines it is there.
pub(crate) async fn check_startable(state: &Arc<State>, request: &BashExecRequest) -> Result<(), ExecError> {
    let settings = state.settings();
    let spec = spec_of(state, &settings, request).await?;
    tier_of(state, &settings, &spec).await.map(drop)
}

/// Which operations on `paths` a request would be allowed.
pub(crate) async fn explain(
    state: &Arc<State>,
    request: &BashExecRequest,
    paths: Vec<ByteString>,
) -> Result<Vec<PathAnswer>, ExecError> {
    let settings = state.settings();
    let spec = spec_of(state, &settings, request).await?;
    let tier = tier_of(state, &settings, &spec).await?;
    let state = Arc::clone(state);
    let explained = spawn_blocking(move || {
        let inputs = PlanInputs {
            shell: settings.shell.as_deref().unwrap_or(Path::new("/bin/bash")),
            tier: tier.unwrap_or(Tier::Landlock),
            private_tmp: None,
            daemon_folders: &state.own_folders,
            deployment: &settings.deployment,
        };
        let confinement = resolve::confinement(&spec.sandbox_policy, &inputs);
        let (workdir, home) = (spec.workdir.to_path_buf(), state.surroundings.home.as_deref());
        let answer = |path| explain::explain(confinement.as_ref(), path, &workdir, home);
        paths.iter().map(answer).collect()
    });
    match timeout(RESOLVE_DEADLINE, explained).await {
        Ok(Ok(answers)) => Ok(answers),
        _ => Err(ExecError::new(
            ErrorCode::Internal,
            "the file system of a path has not answered in time",
        )),
    }
}

fn not_started(why: Stop) -> ExecError {
    match why {
        Stop::ShuttingDown => shutting_down(),
        Stop::Cancelled | Stop::Disconnected => ExecError::new(
            ErrorCode::Cancelled,
            "the command was cancelled before it started; nothing ran",
        ),
    }
}

/// Everything that is needed to run, and nothing has run yet.
struct Prepared<'a> {
    spec: BashExecSpec,
    plan: Plan,
    tier: Option<Tier>,
    removed: Vec<ByteString>,
    helper: Helper,
    slot: Running<'a>,
    private_tmp: Option<PrivateTmp>,
}

async fn prepare<'a>(
    state: &'a Arc<State>,
    settings: &Settings,
    request: &mut BashExecRequest,
) -> Result<Prepared<'a>, ExecError> {
    let spec = spec_of(state, settings, request).await?;
    let slot = Running::new(state, state.slot().await?);
    let mode = spec.sandbox_policy.mode;
    let tier = tier_of(state, settings, &spec).await?;
    let shell = settings.shell.as_deref().ok_or_else(|| {
        ExecError::new(
            ErrorCode::ShellMissing,
            "there is no bash on this host; install it, or set `shell` in the configuration",
        )
    })?;
    let private_tmp = match mode {
        SandboxMode::WorkspaceWrite => Some(PrivateTmp::choose(state)?),
        SandboxMode::ReadOnly | SandboxMode::DangerFullAccess => None,
    };
    let mut environment = environment_of(state, settings, request, private_tmp.as_ref())?;
    let removed = std::mem::take(&mut environment.removed);
    let inputs = PlanInputs {
        shell,
        tier: tier.unwrap_or(Tier::Landlock),
        private_tmp: private_tmp.as_ref().map(|tmp| tmp.path.as_path().into()),
        daemon_folders: &state.own_folders,
        deployment: &settings.deployment,
    };
    let mut plan = resolve::compile(&spec, environment, &inputs);
    plan.setup_deadline_ms = settings.config.setup_deadline_ms;
    let helper = state
        .helpers
        .acquire()
        .await
        .map_err(|error| runner_failure(mode, &error.to_string()))?;
    Ok(Prepared {
        spec,
        plan,
        tier,
        removed,
        helper,
        slot,
        private_tmp,
    })
}

/// What confines a command; none when nothing has to.
async fn tier_of(state: &State, settings: &Settings, spec: &BashExecSpec) -> Result<Option<Tier>, ExecError> {
    let policy = &spec.sandbox_policy;
    if !policy.mode.confines() {
        return Ok(None);
    }
    let found = state.probe.current(&state.helpers).await;
    let tier = probe::choose(&found, &settings.config.tiers, &policy.require, policy.mode)?;
    state.helpers.expect(Some(tier));
    Ok(Some(tier))
}

/// Resolution reads the file system, which may hang: never on the thread that serves everybody.
async fn spec_of(
    state: &Arc<State>,
    settings: &Settings,
    request: &BashExecRequest,
) -> Result<BashExecSpec, ExecError> {
    let (state, deployment, request) = (Arc::clone(state), settings.deployment.clone(), request.clone());
    let resolved = spawn_blocking(move || {
        let surroundings = resolve::Surroundings {
            home: state.surroundings.home.as_deref(),
            daemon_workdir: &state.workdir,
        };
        resolve::resolve(&request, &deployment, surroundings)
    });
    match timeout(RESOLVE_DEADLINE, resolved).await {
        Ok(Ok(resolved)) => resolved,
        Ok(Err(_)) => Err(ExecError::new(
            ErrorCode::Internal,
            "the request could not be resolved; the daemon's log has the reason",
        )),
        Err(_) => Err(ExecError::new(
            ErrorCode::WorkdirUnusable,
            format!(
                "the file system of the working directory has not answered for {} s",
                RESOLVE_DEADLINE.as_secs()
            ),
        )),
    }
}

fn environment_of(
    state: &State,
    settings: &Settings,
    request: &BashExecRequest,
    private_tmp: Option<&PrivateTmp>,
) -> Result<ChildEnvironment, ExecError> {
    let ambient = request.ambient_env.as_ref().unwrap_or(&state.ambient);
    let mut defaults: EnvMap = private_tmp
        .map(|tmp| ("TMPDIR".into(), ByteString::from(tmp.path.as_path())))
        .into_iter()
        .collect();
    if request.tty.is_some() {
        let term = ambient.get(&"TERM".into()).filter(|term| !term.0.is_empty());
        defaults.insert("TERM".into(), term.cloned().unwrap_or_else(|| "xterm-256color".into()));
    }
    let mut environment = environment::build(
        ambient,
        &defaults,
        request.env.as_ref(),
        request.dsh_env.as_ref(),
        &settings.environment,
    )?;
    // What the client took out before it sent the rest. A name that was set on purpose is there after all.
    let taken = request
        .ambient_removed
        .iter()
        .filter(|name| !environment.variables.contains_key(*name));
    environment.removed.extend(taken.cloned());
    environment.removed.sort();
    environment.removed.dedup();
    Ok(environment)
}

/// A request that has its turn; counted while it has.
struct Running<'a> {
    state: &'a State,
    _permit: tokio::sync::SemaphorePermit<'a>,
}

impl<'a> Running<'a> {
    fn new(state: &'a State, permit: tokio::sync::SemaphorePermit<'a>) -> Self {
        state.running.fetch_add(1, Ordering::Relaxed);
        Self { state, _permit: permit }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.state.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The name of a private temporary folder. Dropped on any way out, it takes the folder with it.
struct PrivateTmp {
    state: Arc<State>,
    path: PathBuf,
}

impl PrivateTmp {
    fn choose(state: &Arc<State>) -> Result<Self, ExecError> {
        let path = state.tmpdirs.choose().map_err(|error| {
            ExecError::new(
                ErrorCode::Internal,
                format!("the temporary folder could not be recorded: {error}"),
            )
        })?;
        Ok(Self {
            state: Arc::clone(state),
            path,
        })
    }
}

impl Drop for PrivateTmp {
    fn drop(&mut self) {
        self.state.tmpdirs.release(&self.path);
    }
}

/// Usually the helper has removed it and there is nothing to do; what a dead helper left may be large.
async fn release_tmp(private_tmp: PrivateTmp) {
    if private_tmp.path.symlink_metadata().is_ok() {
        // Only a panic inside could fail, and the drop has run by then.
        let _ = spawn_blocking(move || drop(private_tmp)).await;
    }
}

/// The command's ends of its streams, and who is at the others.
struct Streams {
    theirs: [OwnedFd; 3],
    /// Collection begins when this says so (or is dropped): `started` is the first answer of a request.
    gate: watch::Sender<bool>,
    feeder: Feeder,
    resizer: Option<AbortOnDropHandle<()>>,
    /// The name of the terminal that all three are.
    terminal: Option<ByteString>,
    stdout: Collecting,
    stderr: Collecting,
}

struct Collecting {
    task: JoinHandle<StreamResult>,
    stop: oneshot::Sender<()>,
}

impl Collecting {
    fn start(source: Source, collector: Collector, mut gate: watch::Receiver<bool>) -> Self {
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            // An error means that the gate is gone, which opens it too.
            let _ = gate.wait_for(|open| *open).await;
            drop(gate);
            collector.collect(source, stopped).await
        });
        Self { task, stop }
    }

    /// A stream that a command with a terminal does not have.
    fn nothing() -> Self {
        Self {
            task: tokio::spawn(std::future::ready(StreamResult::default())),
            stop: oneshot::channel().0,
        }
    }

    /// What was collected, at the end of the stream or when it has been waited for long enough.
    async fn end(mut self) -> StreamResult {
        if let Ok(done) = timeout(DRAIN_DEADLINE, &mut self.task).await {
            return done.unwrap_or_default();
        }
        tracing::warn!("an output stream has not ended although every process has");
        drop(self.stop);
        self.task.await.unwrap_or_default()
    }
}

fn open_streams(
    state: &State,
    settings: &Settings,
    request: &mut BashExecRequest,
    control: &mut Control,
    kept: [u64; 2],
    events: &Events,
) -> std::io::Result<Streams> {
    let (gate, gated) = watch::channel(false);
    let collect = |name, kept, source| {
        let limits = Limits {
            kept,
            spill: settings.deployment.spill_bytes,
            folder: Arc::clone(&state.spill_folder),
            eager: state.keeping.is_some(),
        };
        Collecting::start(source, Collector::new(name, limits, events.clone()), gated.clone())
    };
    if let Some(size) = request.tty {
        let (terminal, command_end) = Terminal::open(size)?;
        let terminal = Arc::new(terminal);
        let fd = command_end.fd;
        return Ok(Streams {
            theirs: [fd.try_clone()?, fd.try_clone()?, fd],
            gate,
            feeder: stdin::type_into(Arc::clone(&terminal), control.take_input(), events),
            resizer: Some(follow_size(Arc::clone(&terminal), control)),
            terminal: Some(command_end.name),
            stdout: collect(StreamName::Stdout, kept[0], Source::Terminal(terminal)),
            stderr: Collecting::nothing(),
        });
    }
    let (stdin, feeder) = stdin::open(request, control.take_input(), events)?;
    let pipe = || -> std::io::Result<(OwnedFd, Source)> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        Ok((writer, Source::Pipe(Receiver::from_owned_fd(reader)?)))
    };
    let ((stdout, from_stdout), (stderr, from_stderr)) = (pipe()?, pipe()?);
    Ok(Streams {
        theirs: [stdin, stdout, stderr],
        gate,
        feeder,
        resizer: None,
        terminal: None,
        stdout: collect(StreamName::Stdout, kept[0], from_stdout),
        stderr: collect(StreamName::Stderr, kept[1], from_stderr),
    })
}

/// Gives the terminal each size that the client names, until the command has ended.
fn follow_size(terminal: Arc<Terminal>, control: &Control) -> AbortOnDropHandle<()> {
    let mut sizes = control.sizes();
    AbortOnDropHandle::new(tokio::spawn(async move {
        while let Ok(Some(size)) = sizes.wait_for(Option::is_some).await.map(|size| *size) {
            if let Err(error) = terminal.resize(size) {
                tracing::warn!(%error, "a terminal could not be resized");
            }
            if sizes.changed().await.is_err() {
                return;
            }
        }
    }))
}

/// Another helper starts when the client has its result: the start would be in the way of it.
const REFILL_DELAY: Duration = Duration::from_millis(1);

fn refill(state: &Arc<State>, settings: &Settings) {
    let (state, target) = (Arc::clone(state), settings.config.helpers);
    tokio::spawn(async move {
        sleep(REFILL_DELAY).await;
        if !state.is_draining() {
            state.helpers.refill(target).await;
        }
    });
}

/// Removes the spill files of a result that nobody gets.
pub(crate) async fn discard(streams: &[StreamResult]) {
    let paths: Vec<PathBuf> = streams
        .iter()
        .filter_map(|stream| Some(stream.spill_path.as_ref()?.to_path_buf()))
        .collect();
    if !paths.is_empty() {
        let _ = spawn_blocking(move || paths.iter().for_each(|path| crate::spill::remove(path))).await;
    }
}
