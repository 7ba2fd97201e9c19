//! Tasks that outlive the daemon, as the daemon sees them: each has a keeper process and a folder. The daemon starts keepers, follows them as a
//! client of their sockets, and finds them again when it starts. What it did not hear over the socket it takes from the folder.
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use dsh_policy::codec::{self, CodecError};
use dsh_policy::frame::{self, Decoder, FRAME_LIMIT};
use dsh_policy::result::StreamResult;
use dsh_policy::task::{TaskOutput, WaitFor};
use dsh_policy::wire::{ClientMessage, Encoding, Hello, HelloReply, PROTOCOL, ServerMessage, StreamName};
use dsh_policy::{BashExecRequest, ErrorCode, ExecError};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::control::{Control, Stop};
use crate::feed::{Feed, KEPT};
use crate::helper::Registered;
use crate::keeper::Order;
use crate::reap;
use crate::state::{SERVER, State};
use crate::task::{Ended, Task};
use crate::task_folder::{About, Keeper, ReaderFile, TaskFolder};
use crate::tmpdir;

/// A keeper that has not begun by then is given up.
const START_DEADLINE: Duration = Duration::from_secs(10);
/// A keeper that does not greet by then is asked again.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// Between two attempts to reach a keeper that lives.
const RETRY: Duration = Duration::from_millis(20);
/// What a keeper may take beyond the deadlines of its command once that is to end.
const END_SLACK: Duration = Duration::from_secs(5);
/// A question to a keeper waits so long for an answer; then it is asked again.
const WAIT_MS: u64 = 600_000;

/// A detached task that this daemon has for itself.
pub(crate) struct Found {
    pub(crate) folder: TaskFolder,
    pub(crate) reader: ReaderFile,
    pub(crate) keeper: KeeperProcess,
}

/// A keeper as a process. While it is known here, no command below it may speak to the daemon, and nobody takes it for an orphan.
pub(crate) struct KeeperProcess {
    /// When this daemon has started it.
    child: Option<Child>,
    _registered: Option<Registered>,
}

fn failed(what: &str, error: &dyn std::fmt::Display) -> ExecError {
    let text = format!("a detached task could not be started: {what}: {error}");
    ExecError::new(ErrorCode::Internal, text)
}

/// Where all detached tasks are.
pub(crate) fn all(state: &Path) -> PathBuf {
    state.join("detached")
}

/// Starts a keeper with a command. An error has left nothing behind.
pub(crate) async fn start(state: &Arc<State>, about: &mut About, request: BashExecRequest) -> Result<Found, ExecError> {
    let begun = {
        let (all, about) = (all(&state.surroundings.state), about.clone());
        spawn_blocking(move || -> io::Result<_> {
            let (folder, number) = TaskFolder::create(&all, about.number)?;
            let prepared = prepare(&folder, About { number, ..about });
            if prepared.is_err() {
                folder.remove();
            }
            prepared.map(|(reader, log)| (folder, number, reader, log))
        })
        .await
    };
    let (folder, number, reader, log) = begun
        .map_err(|error| failed("its folder", &error))?
        .map_err(|error| failed("its folder", &error))?;
    about.number = number;
    let order = Order::new(state, number, request);
    match launch(state, &folder, &order, log).await {
        Ok(keeper) => Ok(Found { folder, reader, keeper }),
        Err(error) => {
            let _ = spawn_blocking(move || folder.remove()).await;
            Err(error)
        }
    }
}

fn prepare(folder: &TaskFolder, about: About) -> io::Result<(ReaderFile, File)> {
    let reader = folder.take_reader()?.ok_or(io::ErrorKind::WouldBlock)?;
    folder.write_about(&about)?;
    Ok((reader, folder.log()?))
}

async fn launch(state: &Arc<State>, folder: &TaskFolder, order: &Order, log: File) -> Result<KeeperProcess, ExecError> {
    // An executable that was replaced meanwhile is still this process's own.
    let own = std::env::current_exe().ok().filter(|path| path.exists());
    let mut command = Command::new(own.unwrap_or_else(|| "/proc/self/exe".into()));
    command
        .arg("--keep")
        .arg(folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log);
    let helpers = Arc::clone(&state.helpers);
    let spawned = spawn_blocking(move || helpers.begin_keeper(command)).await;
    let (mut child, registered) = spawned
        .map_err(|error| failed("its keeper", &error))?
        .map_err(|error| failed("its keeper", &error))?;
    let order = serde_json::to_vec(order).map_err(|error| failed("its order", &error))?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let begun = timeout(START_DEADLINE, async {
        if let Some(mut stdin) = stdin {
            // A keeper that does not read its order says why, or nothing.
            let _ = stdin.write_all(&order).await;
        }
        let mut said = String::new();
        if let Some(mut stdout) = stdout {
            let _ = stdout.read_to_string(&mut said).await;
        }
        said
    });
    let said = begun.await.unwrap_or_default();
    if said.trim_end() == "ready" {
        return Ok(KeeperProcess {
            child: Some(child),
            _registered: Some(registered),
        });
    }
    let _ = child.start_kill();
    let _ = child.wait().await;
    drop(registered);
    reap::orphans(&state.helpers).await;
    // What the keeper says is an error of the command's start, as a daemon would say it.
    Err(serde_json::from_str(&said).unwrap_or_else(|_| failed("its keeper", &"it did not begin")))
}

/// Every detached task that this daemon can have. Nothing is served before this is done: a keeper that is not known could be anybody.
pub(crate) fn find(state: &Arc<State>) {
    let folders = match TaskFolder::all(&all(&state.surroundings.state)) {
        Ok(folders) => folders,
        Err(error) => return tracing::error!(%error, "detached tasks cannot be looked for"),
    };
    for (number, folder) in folders {
        match find_one(state, &folder) {
            Ok(Some((about, found))) if about.number == number => {
                tracing::info!(number, "a detached task was found");
                state.tasks.take_in(state, about, found);
            }
            Ok(_) => {}
            Err(error) => tracing::error!(%error, folder = %folder.path().display(), "a detached task cannot be used"),
        }
    }
}

fn find_one(state: &Arc<State>, folder: &TaskFolder) -> io::Result<Option<(About, Found)>> {
    let Some(reader) = folder.take_reader()? else {
        return Ok(None);
    };
    let pid = match folder.keeper()? {
        // A daemon was killed before it had started anything.
        Keeper::Never => {
            folder.remove();
            return Ok(None);
        }
        Keeper::Gone(_) => None,
        Keeper::Alive { pid } => pid,
    };
    let about = folder.about()?;
    let keeper = KeeperProcess {
        child: None,
        _registered: pid.map(|pid| state.helpers.register_keeper(pid)),
    };
    let folder = folder.clone();
    Ok(Some((about, Found { folder, reader, keeper })))
}

/// Stays with a task until it has ended; none when this daemon leaves before that.
pub(crate) async fn follow(
    state: &Arc<State>,
    task: &Task,
    mut keeper: KeeperProcess,
    mut control: Control,
) -> Option<Ended> {
    let folder = task.folder.as_ref()?;
    let patience = end_deadline(state);
    let mut killing = None;
    let ended = loop {
        match talk(task, folder, &mut control, &mut killing, patience).await {
            Ok(Talk::Leave) => return None,
            Ok(Talk::Ended) => {}
            Err(error) => tracing::debug!(%error, task = task.id(), "a keeper's socket"),
        }
        match settled(folder.clone()).await {
            Ok(Some(ended)) => break ended,
            Ok(None) => {}
            Err(error) => {
                tracing::error!(%error, task = task.id(), "what became of a task cannot be read");
                break lost(format!(
                    "the fate of the command is unknown: its record cannot be read ({error})"
                ));
            }
        }
        if killing.is_some_and(|until| until <= Instant::now()) {
            end_keeper(folder);
        }
        tokio::select! {
            () = sleep(RETRY) => {}
            why = control.stopped(), if killing.is_none() => {
                if why != Stop::Cancelled {
                    return None;
                }
                killing = Some(Instant::now() + patience);
            }
        }
    };
    if let Some(mut child) = keeper.child.take() {
        // Nothing of it is wanted any more.
        tokio::spawn(async move {
            if timeout(START_DEADLINE, child.wait()).await.is_err() {
                let _ = child.kill().await;
            }
            drop(keeper);
        });
    }
    restore(task, folder, &ended).await;
    if matches!(&ended.outcome, Err(error) if error.code == ErrorCode::Unknown) {
        // A keeper that was killed has left its helper to this daemon, and perhaps a temporary folder.
        let path = state.surroundings.state.clone();
        reap::orphans(&state.helpers).await;
        let _ = spawn_blocking(move || tmpdir::remove_stale(&path)).await;
    }
    Some(ended)
}

fn end_deadline(state: &State) -> Duration {
    let settings = state.settings();
    let deployment = &settings.deployment;
    let own = deployment.kill_grace_ms + deployment.drain_grace_ms + settings.config.setup_deadline_ms;
    Duration::from_millis(own) + END_SLACK
}

/// A keeper that does not end its command is killed; its helper then kills the command.
fn end_keeper(folder: &TaskFolder) {
    if let Ok(Keeper::Alive { pid: Some(pid) }) = folder.keeper()
        && let Some(pid) = Pid::from_raw(pid)
    {
        tracing::error!(
            pid = pid.as_raw_nonzero().get(),
            "a keeper does not answer and is killed"
        );
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// How a conversation with a keeper ended well.
enum Talk {
    /// Its task has ended.
    Ended,
    /// This daemon leaves.
    Leave,
}

/// Takes what the keeper has of its task until there is no more.
async fn talk(
    task: &Task,
    folder: &TaskFolder,
    control: &mut Control,
    killing: &mut Option<Instant>,
    patience: Duration,
) -> io::Result<Talk> {
    let mut client = timeout(CONNECT_DEADLINE, Client::connect(folder)).await??;
    let (session, name) = (task.session.clone(), task.id());
    let read = |cursor| ClientMessage::TaskRead {
        id: 1,
        session: session.clone(),
        task: name.clone(),
        cursor: Some(cursor),
        wait: WaitFor::Output,
        timeout_ms: Some(WAIT_MS),
    };
    let kill = ClientMessage::TaskKill {
        id: 2,
        session: session.clone(),
        task: name.clone(),
        reason: Some("asked of the daemon".into()),
    };
    if killing.is_some() {
        client.send(&kill).await?;
    }
    client.send(&read(task.feed.end())).await?;
    loop {
        let until = *killing;
        tokio::select! {
            biased;
            message = client.receive() => match message? {
                ServerMessage::TaskOutput { output, .. } => {
                    take(&task.feed, &output);
                    // A task that has ended writes nothing more, so this was all.
                    if output.info.status.is_terminal() {
                        return Ok(Talk::Ended);
                    }
                    client.send(&read(task.feed.end())).await?;
                }
                ServerMessage::Error { error, .. } => return Err(io::Error::other(error)),
                _ => {}
            },
            why = control.stopped(), if until.is_none() => {
                if why != Stop::Cancelled {
                    return Ok(Talk::Leave);
                }
                *killing = Some(Instant::now() + patience);
                client.send(&kill).await?;
            }
            () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

fn take(feed: &Feed, output: &TaskOutput) {
    let start = |end: u64, data: &[u8]| end.saturating_sub(data.len() as u64);
    let (out, err) = (output.stdout.as_bytes(), output.stderr.as_bytes());
    feed.fill(StreamName::Stdout, start(output.next.stdout, out), out);
    feed.fill(StreamName::Stderr, start(output.next.stderr, err), err);
}

fn lost(text: String) -> Ended {
    Ended {
        outcome: Err(ExecError::new(ErrorCode::Unknown, text)),
        at: SystemTime::now(),
        salvaged: Vec::new(),
    }
}

/// What became of a task; none while its keeper lives. A keeper that died without a word gets a record that says so.
async fn settled(folder: TaskFolder) -> io::Result<Option<Ended>> {
    let look = move || -> io::Result<Option<Ended>> {
        // Held to the end, so that nobody begins to keep what is buried here.
        let keeper = folder.keeper()?;
        if let Some((outcome, at)) = folder.outcome()? {
            let salvaged = match &outcome {
                Ok(_) => Vec::new(),
                Err(_) => folder.salvage()?.into_iter().map(|(_, path)| path).collect(),
            };
            return Ok(Some(Ended { outcome, at, salvaged }));
        }
        if matches!(keeper, Keeper::Alive { .. }) {
            return Ok(None);
        }
        let mut ended = lost(
            "the fate of the command is unknown: its keeper ended before it reported. It may have run in part; \
             everything that was left of it was killed. Do not take this as success"
                .into(),
        );
        ended.salvaged = folder.salvage()?.into_iter().map(|(_, path)| path).collect();
        folder.write_outcome(&ended.outcome)?;
        Ok(Some(ended))
    };
    spawn_blocking(look).await.map_err(io::Error::other)?
}

/// Fills the feed with what the folder has and the socket did not give.
async fn restore(task: &Task, folder: &TaskFolder, ended: &Ended) {
    let streams = match &ended.outcome {
        Ok(result) => vec![
            (StreamName::Stdout, Source::of(&result.stdout)),
            (StreamName::Stderr, Source::of(&result.stderr)),
        ],
        Err(_) => {
            let folder = folder.clone();
            let found = spawn_blocking(move || folder.salvage()).await;
            let found = found.ok().and_then(Result::ok).unwrap_or_default();
            found
                .into_iter()
                .map(|(name, path)| (name, Source::File(path)))
                .collect()
        }
    };
    for (name, source) in streams {
        let feed = Arc::clone(&task.feed);
        let filled = spawn_blocking(move || source.fill(&feed, name)).await;
        if let Ok(Err(error)) = filled {
            tracing::warn!(%error, task = task.id(), "output of a detached task cannot be read");
        }
    }
}

/// Where the end of a stream is.
enum Source {
    File(PathBuf),
    Tail { end: u64, bytes: Vec<u8> },
}

impl Source {
    fn of(stream: &StreamResult) -> Self {
        match &stream.spill_path {
            Some(path) => Self::File(path.to_path_buf()),
            None => Self::Tail {
                end: stream.bytes,
                bytes: stream
                    .raw
                    .as_ref()
                    .map_or_else(|| stream.text.clone().into_bytes(), |raw| raw.0.clone()),
            },
        }
    }

    fn fill(self, feed: &Feed, name: StreamName) -> io::Result<()> {
        let (start, bytes) = match self {
            Self::Tail { end, bytes } => (end.saturating_sub(bytes.len() as u64), bytes),
            Self::File(path) => {
                let file = File::open(path)?;
                let end = file.metadata()?.len();
                let start = end.saturating_sub(KEPT as u64);
                let mut bytes = vec![0; usize::try_from(end - start).unwrap_or(KEPT)];
                file.read_exact_at(&mut bytes, start)?;
                (start, bytes)
            }
        };
        feed.fill(name, start, &bytes);
        Ok(())
    }
}

/// A client of a keeper. It speaks JSON: the keeper may be of an older build than this daemon.
struct Client {
    stream: UnixStream,
    decoder: Decoder,
}

impl Client {
    async fn connect(folder: &TaskFolder) -> io::Result<Self> {
        let stream = folder.with_socket(|path| std::os::unix::net::UnixStream::connect(path))?;
        stream.set_nonblocking(true)?;
        let mut client = Self {
            stream: UnixStream::from_std(stream)?,
            decoder: Decoder::new(FRAME_LIMIT),
        };
        let hello = Hello {
            protocol: PROTOCOL,
            encoding: Encoding::Json,
            client: SERVER.into(),
            build: String::new(),
        };
        let hello = codec::to_json(&hello)
            .and_then(|json| frame::encode(&json))
            .map_err(io::Error::other)?;
        client.stream.write_all(&hello).await?;
        let reply: HelloReply = codec::from_json(&client.payload().await?).map_err(io::Error::other)?;
        match reply.error {
            Some(error) => Err(io::Error::other(error)),
            None => Ok(client),
        }
    }

    async fn send(&mut self, message: &ClientMessage) -> io::Result<()> {
        let frame = Encoding::Json.frame(message).map_err(io::Error::other)?;
        self.stream.write_all(&frame).await
    }

    /// Can be dropped at any await without losing bytes.
    async fn payload(&mut self) -> io::Result<Vec<u8>> {
        let unintelligible = |error: CodecError| io::Error::other(error);
        loop {
            if let Some(payload) = self.decoder.next_payload().map_err(unintelligible)? {
                return Ok(payload);
            }
            let mut buffer = [0; 16 * 1024];
            match self.stream.read(&mut buffer).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.decoder.push(&buffer[..count]),
            }
        }
    }

    async fn receive(&mut self) -> io::Result<ServerMessage> {
        let payload = self.payload().await?;
        Encoding::Json.server_message(&payload).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsh_policy::task::Cursor;

    #[test]
    fn what_the_socket_gave_and_what_the_folder_has_fit_together() {
        let feed = Feed::default();
        feed.fill(StreamName::Stdout, 0, b"abc");
        let source = Source::Tail {
            end: 6,
            bytes: b"bcdef".to_vec(),
        };
        assert!(source.fill(&feed, StreamName::Stdout).is_ok());
        let all = feed.since(Cursor::default());
        assert_eq!((all.stdout.0.as_slice(), all.lossy), (&b"abcdef"[..], false));
    }
}
