//! The keeper of one detached task: the daemon's own executable in a process and session of its own, which runs the command as a daemon would and
//! lives on when the daemon does not. Whatever it says over its socket, it has written the outcome to the task's folder before.
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use dsh_policy::{BashExecRequest, ByteString, ErrorCode, ExecError};
use rustix::process::{Resource, geteuid, getrlimit};
use serde::{Deserialize, Serialize};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::spawn_blocking;

use crate::cli::complain;
use crate::config::Config;
use crate::control::Stop;
use crate::helper::{self, Helpers};
use crate::paths::Surroundings;
use crate::start::{self, StartError, io_error};
use crate::state::{Parts, State};
use crate::task::Outcome;
use crate::task_folder::TaskFolder;
use crate::tmpdir::Record;
use crate::{connection, logging, reap, server};

/// What a keeper is told on its standard input. It holds the request, whose values are on no disk.
#[derive(Serialize, Deserialize)]
pub(crate) struct Order {
    number: u64,
    request: BashExecRequest,
    /// The daemon's configuration in force, as a file has it.
    config: String,
    config_file: Option<ByteString>,
    workdir: ByteString,
    /// The daemon's socket, whose folder no command may change.
    socket: ByteString,
}

impl Order {
    pub(crate) fn new(state: &State, number: u64, request: BashExecRequest) -> Self {
        let file = state.config_file();
        Self {
            number,
            request,
            config: state.settings().config.to_toml(),
            config_file: (!file.0.is_empty()).then_some(file),
            workdir: state.workdir.as_path().into(),
            socket: state.socket.as_path().into(),
        }
    }
}

/// Keeps the task in `folder` until it has ended.
pub(crate) fn main(folder: PathBuf) -> ExitCode {
    match keep_task(TaskFolder::at(folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&error.to_string()),
    }
}

fn keep_task(folder: TaskFolder) -> Result<(), StartError> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    // Away from the daemon's terminal and its signals. It fails only for a leader, who has that already.
    let _ = rustix::process::setsid();
    let mut order = Vec::new();
    io::stdin()
        .read_to_end(&mut order)
        .map_err(io_error("cannot read the order"))?;
    let order: Order = serde_json::from_slice(&order).map_err(|error| io_error("no order")(error.into()))?;
    let mut config = Config::parse(&order.config, Path::new("(the daemon's configuration)"))?;
    // One task, one helper.
    (config.max_tasks, config.helpers) = (1, 0);
    logging::start(config.log_level.into());
    let _keeper = folder.become_keeper().map_err(io_error("cannot keep the task"))?;
    let listener = folder
        .with_socket(|path| {
            let listener = std::os::unix::net::UnixListener::bind(path)?;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        })
        .map_err(io_error("cannot listen"))?;
    let surroundings = Surroundings::from_lookup(|name| std::env::var_os(name));
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|error| io_error("cannot become a subreaper")(error.into()))?;
    let tmpdirs = Record::begin(&surroundings.state).map_err(io_error("cannot keep records in the state folder"))?;
    let helper = config.helper.clone().unwrap_or_else(helper::beside_daemon);
    let parts = Parts {
        config,
        config_file: order.config_file.map(|file| file.to_path_buf()),
        surroundings,
        workdir: order.workdir.to_path_buf(),
        spill_folder: folder.path().to_owned(),
        socket: order.socket.to_path_buf(),
        helpers: Helpers::new(helper, getrlimit(Resource::Nofile)),
        tmpdirs,
        keeping: Some(folder),
    };
    let runtime = start::runtime()?;
    runtime.block_on(serve(listener, parts, order.number, order.request))?;
    runtime.shutdown_timeout(std::time::Duration::from_millis(100));
    Ok(())
}

async fn serve(
    listener: std::os::unix::net::UnixListener,
    parts: Parts,
    number: u64,
    request: BashExecRequest,
) -> Result<(), StartError> {
    let listener = UnixListener::from_std(listener).map_err(io_error("cannot use the socket"))?;
    let mut terminate = signal(SignalKind::terminate()).map_err(io_error("cannot wait for signals"))?;
    let state = Arc::new(State::new(parts));
    // The daemon may have asked long ago; what this host can enforce is found out for this command.
    let _ = state.probe.refresh(&state.helpers).await;
    state.tasks.begin_at(number);
    if let Err(error) = state.tasks.start(&state, request).await {
        state.tmpdirs.end();
        let words = serde_json::to_string(&error).unwrap_or_default();
        return start::say(&words);
    }
    // A daemon that has gone meanwhile finds the task when it comes again.
    let _ = start::say("ready\n");
    let ended = state.tasks.all_ended();
    tokio::pin!(ended);
    loop {
        tokio::select! {
            () = &mut ended => break,
            _ = terminate.recv() => state.tasks.stop_all(Stop::ShuttingDown),
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => admit(&state, stream),
                Err(error) => server::pause_after(&error).await,
            },
        }
    }
    state.helpers.drain().await;
    state.tmpdirs.end();
    Ok(())
}

/// Keeps the outcome where every later daemon finds it.
pub(crate) async fn keep(folder: TaskFolder, outcome: &Outcome) {
    let outcome = outcome.clone();
    let kept = spawn_blocking(move || {
        folder.write_outcome(&outcome)?;
        if outcome.is_ok() {
            folder.remove_parts();
        }
        // Who comes now finds the outcome instead.
        folder.with_socket(|path| std::fs::remove_file(path))
    });
    match kept.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::error!(%error, "the outcome of the task could not be kept"),
        Err(error) => tracing::error!(%error, "the outcome of the task could not be kept"),
    }
}

fn admit(state: &Arc<State>, stream: UnixStream) {
    let peer = stream.peer_cred().ok().filter(|peer| peer.uid() == geteuid().as_raw());
    let Some(pid) = peer.and_then(|peer| peer.pid()) else {
        return tracing::warn!("a connection of another user is refused");
    };
    let refusal = is_command(state, pid).then(|| {
        let text = "a command cannot ask the keeper of a task: it could leave its own confinement";
        ExecError::new(ErrorCode::InvalidRequest, text)
    });
    tokio::spawn(connection::serve(Arc::clone(state), stream, refusal));
}

/// Whether a process is below any helper, of this keeper or of anybody else: a command cannot change the name of what is above it.
fn is_command(state: &State, mut pid: i32) -> bool {
    let name = state.helpers.executable().file_name().unwrap_or_default();
    let name = name.as_encoded_bytes();
    // The kernel keeps fifteen bytes.
    let name = &name[..name.len().min(15)];
    while pid > 1 {
        let Ok(comm) = std::fs::read(format!("/proc/{pid}/comm")) else {
            return true;
        };
        if comm.strip_suffix(b"\n").unwrap_or(&comm) == name {
            return true;
        }
        match reap::parent_of(pid) {
            Some(parent) => pid = parent,
            None => return true,
        }
    }
    false
}
