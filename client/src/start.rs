//! Reaching the daemon, and starting one when none answers.
//!
//! Several clients may start one at the same time: the daemons race for a lock, one wins, the others say `exists` and leave, and every client
//! connects to the winner.
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::address::{self, Endpoint};
use crate::blocking::Client;
use crate::error::ClientError;

/// How long a daemon may take to start, whoever starts it.
const START_DEADLINE: Duration = Duration::from_secs(5);
/// Between two attempts to connect to a daemon that another client is starting.
const RETRY: Duration = Duration::from_millis(2);
/// The log is read from its end, this much.
const LOG_TAIL: u64 = 4096;

/// Connects as `endpoint` says.
///
/// # Errors
/// [`ClientError::Unreachable`] says what was tried and where the daemon's log is.
pub fn connect(endpoint: &Endpoint) -> Result<Client, ClientError> {
    let autostart = match endpoint {
        Endpoint::Socket(socket) => return Client::connect(socket),
        Endpoint::Default { autostart } => *autostart,
    };
    let socket = address::default_socket();
    address::check_folder(&address::runtime_folder())?;
    match UnixStream::connect(&socket) {
        Ok(stream) => Client::greet(stream),
        Err(error) if autostart && nobody_listens(&error) => start_and_connect(&socket),
        Err(error) => {
            let hint = if autostart {
                ""
            } else {
                "; start one with `dsh-execd`, or leave --no-autostart away"
            };
            Err(ClientError::Unreachable(format!(
                "no daemon answers on {}: {error}{hint}",
                socket.display()
            )))
        }
    }
}

fn nobody_listens(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn start_and_connect(socket: &Path) -> Result<Client, ClientError> {
    let deadline = Instant::now() + START_DEADLINE;
    // A daemon that was leaving just now makes one more attempt necessary.
    while Instant::now() < deadline {
        start_daemon(deadline)?;
        if let Some(stream) = wait_for_socket(socket, deadline) {
            match Client::greet(stream) {
                Err(ClientError::Lost) => {}
                outcome => return outcome,
            }
        }
    }
    Err(ClientError::Unreachable(format!(
        "the daemon does not listen on {} in time; {}",
        socket.display(),
        last_words(&log_file())
    )))
}

/// Connects as soon as somebody listens; none when the other client's daemon has not come up soon.
fn wait_for_socket(socket: &Path, deadline: Instant) -> Option<UnixStream> {
    let soon = deadline.min(Instant::now() + Duration::from_secs(1));
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Some(stream),
            Err(error) if !nobody_listens(&error) => return None,
            Err(_) if Instant::now() >= soon => return None,
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// Starts a daemon and waits until it says that it, or another one, serves.
fn start_daemon(deadline: Instant) -> Result<(), ClientError> {
    let program = find_daemon()?;
    let log_path = log_file();
    let log = open_log(&log_path)?;
    let failed = |what: &str, error: &dyn std::fmt::Display| {
        ClientError::Unreachable(format!(
            "cannot {what} {}: {error}; {}",
            program.display(),
            last_words(&log_path)
        ))
    };
    let mut child = launcher(&program)
        .args(["--on-demand", "--ready-stdout"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(|error| failed("start", &error))?;
    let mut said = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        let left = deadline.saturating_duration_since(Instant::now());
        let wait = Timespec {
            tv_sec: left.as_secs().cast_signed(),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(&stdout, PollFlags::IN)], Some(&wait)) {
            Ok(0) => return Err(failed("get ready", &"it did not say so within five seconds")),
            _ => {
                let mut line = [0; 16];
                let count = stdout.read(&mut line).unwrap_or(0);
                said = String::from_utf8_lossy(&line[..count]).trim().to_owned();
            }
        }
    }
    match said.as_str() {
        "ready" | "exists" => Ok(()),
        _ => {
            let status = child.wait().map_err(|error| failed("wait for", &error))?;
            Err(failed("start", &format!("it left with {status}")))
        }
    }
}

/// The daemon by way of the helper, which starts it in a session of its own and with no descriptor of ours but the three standard ones: a pipe of the
/// caller that lived on in the daemon would keep the caller's reader waiting for ever.
fn launcher(program: &Path) -> Command {
    let helper = program.with_file_name("dsh-exec-helper");
    if helper.exists() {
        let mut command = Command::new(helper);
        command.arg("--detach").arg(program);
        command
    } else {
        Command::new(program)
    }
}

/// Beside this program, else on `PATH`.
fn find_daemon() -> Result<PathBuf, ClientError> {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name("dsh-execd"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let candidates = beside
        .into_iter()
        .chain(std::env::split_paths(&path).map(|folder| folder.join("dsh-execd")));
    candidates
        .into_iter()
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| {
            ClientError::Unreachable(
                "dsh-execd is neither beside dsh-exec nor on PATH; install it, or name a running daemon with --socket"
                    .into(),
            )
        })
}

fn log_file() -> PathBuf {
    address::state_folder().join("daemon.log")
}

fn open_log(path: &Path) -> Result<File, ClientError> {
    let failed = |error: io::Error| {
        ClientError::Unreachable(format!("cannot write the daemon's log {}: {error}", path.display()))
    };
    if let Some(folder) = path.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(failed)?;
    }
    let nofollow = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(nofollow)
        .open(path)
        .map_err(failed)
}

/// Where the log is, and its last line.
fn last_words(path: &Path) -> String {
    let tail = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let start = file.metadata()?.len().saturating_sub(LOG_TAIL);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(LOG_TAIL).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes)
            .lines()
            .rfind(|line| !line.trim().is_empty())
            .unwrap_or_default()
            .trim()
            .to_owned())
    };
    match tail() {
        Ok(line) if !line.is_empty() => format!("its log {} ends with: {line}", path.display()),
        _ => format!("its log is {}", path.display()),
    }
}
