//! From the command line to a listening daemon: folders, lock, socket, configuration.
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, flock};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::cli::Arguments;
use crate::config::{Config, ConfigError};
use crate::detached;
use crate::helper::{self, Helpers};
use crate::logging;
use crate::paths::{PathError, Surroundings, private_folder};
use crate::server::{self, Address};
use crate::state::{Parts, State};
use crate::tmpdir::Record;

/// Open files that the daemon wants for itself: five per running command, one per client.
const OPEN_FILES: u64 = 8_192;

/// Why the daemon does not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// A folder is unusable.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The socket's path has no folder or is too long.
    #[error("cannot listen on {path}: {reason}", path = path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// Something else of the operating system.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

pub(crate) fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::Io { what, source }
}

/// How a start ended well.
pub(crate) enum Started {
    /// The daemon has served and left.
    Served,
    /// Another daemon serves this socket.
    Exists,
}

/// Starts, serves and leaves.
///
/// # Errors
/// [`StartError`] when it cannot serve at all.
pub(crate) fn daemon(arguments: &Arguments) -> Result<Started, StartError> {
    rustix::process::umask(Mode::from_raw_mode(0o077));
    let surroundings = Surroundings::from_lookup(|name| std::env::var_os(name));
    let given = arguments.config.as_ref().map(std::path::absolute).transpose();
    let config_file = given
        .map_err(io_error("cannot use the configuration's path"))?
        .or_else(|| surroundings.config.clone());
    let config = config_file
        .as_deref()
        .map_or_else(|| Ok(Config::default()), Config::load)?;
    logging::start(config.log_level.into());

    let Some((listener, mut bound)) = listen(arguments, &surroundings)? else {
        return Ok(Started::Exists);
    };
    private_folder(&surroundings.state)?;
    let spill_folder = surroundings.state.join("spill");
    private_folder(&spill_folder)?;
    let tmpdirs = Record::begin(&surroundings.state).map_err(io_error("cannot keep records in the state folder"))?;
    // Orphans of a helper that dies must come to the daemon, which ends them.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|error| io_error("cannot become a subreaper")(error.into()))?;

    let configured = arguments.on_demand.then_some(config.idle_exit_ms);
    let idle_exit_ms = arguments.idle_exit_ms.or(configured).unwrap_or(0);
    let idle_exit = (idle_exit_ms > 0).then(|| Duration::from_millis(idle_exit_ms));
    let helper = config.helper.clone().unwrap_or_else(helper::beside_daemon);
    let helpers = Helpers::new(helper, raise_open_files());
    helpers.expect(config.tiers.first().copied());
    // Helpers inherit the place, and no file system must stay busy because of a daemon.
    let workdir = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
    std::env::set_current_dir("/").map_err(io_error("cannot enter /"))?;
    let socket = bound.socket.clone();
    let parts = Parts {
        config,
        config_file,
        surroundings,
        workdir,
        spill_folder,
        socket,
        helpers,
        tmpdirs,
        keeping: None,
    };
    serve(listener, parts, idle_exit, &mut bound, arguments.ready_stdout)?;
    Ok(Started::Served)
}

fn serve(
    listener: UnixListener,
    parts: Parts,
    idle_exit: Option<Duration>,
    bound: &mut Bound,
    ready_stdout: bool,
) -> Result<(), StartError> {
    let runtime = runtime()?;
    runtime.block_on(async {
        listener
            .set_nonblocking(true)
            .map_err(io_error("cannot use the socket"))?;
        let listener = tokio::net::UnixListener::from_std(listener).map_err(io_error("cannot use the socket"))?;
        let state = Arc::new(State::new(parts));
        detached::find(&state);
        tracing::info!(socket = %state.socket.display(), pid = std::process::id(), "serving");
        if ready_stdout {
            say("ready\n")?;
        }
        server::run(listener, state, idle_exit, bound)
            .await
            .map_err(io_error("cannot wait for signals"))
    })?;
    // A blocking thread that hangs on a dead file system must not keep the daemon.
    runtime.shutdown_timeout(Duration::from_millis(100));
    Ok(())
}

/// One thread for everybody, as daemons and keepers have it.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, StartError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Blocking threads resolve paths and write spill files; small stacks, and not kept for long.
        .max_blocking_threads(32)
        .thread_stack_size(256 * 1024)
        .thread_keep_alive(Duration::from_secs(5))
        .build()
        .map_err(io_error("cannot start the runtime"))
}

/// Whoever started the daemon waits for this line, and for the end of the stream.
pub(crate) fn say(words: &str) -> Result<(), StartError> {
    let what = "cannot say that the daemon is ready";
    let mut stdout = io::stdout();
    stdout
        .write_all(words.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(io_error(what))?;
    let null = OpenOptions::new()
        .write(true)
        .open("/dev/null")
        .map_err(io_error(what))?;
    rustix::stdio::dup2_stdout(&null).map_err(|error| io_error(what)(error.into()))
}

/// The socket's name and the lock that says whose it is.
pub(crate) struct Bound {
    socket: PathBuf,
    /// None when systemd made the socket: then its name is not ours to remove.
    lock: Option<File>,
}

impl Address for Bound {
    fn give_up(&mut self) {
        if let Some(lock) = self.lock.take() {
            if let Err(error) = fs::remove_file(&self.socket) {
                tracing::warn!(%error, "the socket could not be removed");
            }
            drop(lock);
        }
    }
}

/// The listening socket; none when another daemon has it.
fn listen(arguments: &Arguments, surroundings: &Surroundings) -> Result<Option<(UnixListener, Bound)>, StartError> {
    let handed = listenfd::ListenFd::from_env()
        .take_unix_listener(0)
        .map_err(io_error("the socket from systemd is unusable"))?;
    if let Some(listener) = handed {
        let named = listener
            .local_addr()
            .ok()
            .and_then(|address| address.as_pathname().map(Path::to_owned));
        let socket = named.unwrap_or_else(|| surroundings.runtime.join("socket"));
        return Ok(Some((listener, Bound { socket, lock: None })));
    }
    let socket = match &arguments.socket {
        Some(socket) => std::path::absolute(socket).map_err(io_error("cannot use the socket's path"))?,
        None => surroundings.runtime.join("socket"),
    };
    let unusable = |reason: &str| StartError::Socket {
        path: socket.clone(),
        reason: reason.into(),
    };
    let folder = socket.parent().ok_or_else(|| unusable("it has no folder"))?;
    private_folder(folder)?;
    let Some(lock) = take_lock(&lock_path(&socket))? else {
        return Ok(None);
    };
    // The lock is ours, so whoever made the socket that is there is gone.
    match fs::remove_file(&socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(unusable(&error.to_string())),
        _ => {}
    }
    let listener = UnixListener::bind(&socket).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => unusable("the path is longer than the 107 bytes that a socket can have"),
        _ => unusable(&error.to_string()),
    })?;
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o600))
        .map_err(io_error("cannot close the socket to others"))?;
    Ok(Some((
        listener,
        Bound {
            socket,
            lock: Some(lock),
        },
    )))
}

/// `lock` beside the usual socket, `<name>.lock` beside any other.
fn lock_path(socket: &Path) -> PathBuf {
    match socket.file_name() {
        Some(name) if name != "socket" => {
            let mut name = name.to_owned();
            name.push(".lock");
            socket.with_file_name(name)
        }
        _ => socket.with_file_name("lock"),
    }
}

fn take_lock(path: &Path) -> Result<Option<File>, StartError> {
    let nofollow = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(nofollow)
        .open(path)
        .map_err(io_error("cannot open the lock"))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(io_error("cannot take the lock")(error.into())),
    }
}

/// Raises the daemon's own limit on open files and gives the one it was started with, which is what commands get.
fn raise_open_files() -> Rlimit {
    let inherited = getrlimit(Resource::Nofile);
    let wanted = inherited.maximum.map_or(OPEN_FILES, |maximum| maximum.min(OPEN_FILES));
    if inherited.current.is_some_and(|current| current < wanted) {
        let raised = Rlimit {
            current: Some(wanted),
            maximum: inherited.maximum,
        };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "the limit on open files stays as it is");
        }
    }
    inherited
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_socket_has_a_lock_of_its_own() {
        assert_eq!(lock_path(Path::new("/r/socket")), Path::new("/r/lock"));
        assert_eq!(lock_path(Path::new("/r/other")), Path::new("/r/other.lock"));
    }

    #[test]
    fn a_lock_is_held_by_one_and_free_again_when_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = take_lock(&path).unwrap().unwrap();
        assert!(take_lock(&path).unwrap().is_none());
        drop(first);
        assert!(take_lock(&path).unwrap().is_some());
    }
}
