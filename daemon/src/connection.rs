//! One client: the hello, then its messages, each answered by its own task through one writer.
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dsh_policy::codec::{self, CodecError};
use dsh_policy::environment::EnvironmentRules;
use dsh_policy::frame::{self, Decoder, FRAME_LIMIT, HELLO_LIMIT};
use dsh_policy::wire::{ClientMessage, Encoding, Hello, HelloReply, PROTOCOL, ServerMessage};
use dsh_policy::{BashExecRequest, BashRunResult, ByteString, ErrorCode, ExecError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::control::{self, Handle, Stop};
use crate::helper::lock;
use crate::outbox::{self, Outbox};
use crate::output::{Events, Sink};
use crate::run;
use crate::scratch;
use crate::state::{SERVER, State, shutting_down};

/// A client that has not introduced itself by then is sent away.
const HELLO_DEADLINE: Duration = Duration::from_secs(2);
/// Requests of one connection that may be under way.
const MAX_IN_FLIGHT: usize = 1_024;
/// How often a connection whose input waits for room is looked at for having gone.
const GONE_CHECK: Duration = Duration::from_millis(200);
const CAPABILITIES: &[&str] = &[
    "run", "stdin", "cancel", "resolve", "status", "probe", "config", "tasks", "explain", "tty",
];

/// Serves a client until it leaves or breaks the protocol. `refusal` is why it is not served at all.
pub(crate) async fn serve(state: Arc<State>, mut stream: UnixStream, refusal: Option<ExecError>) {
    let mut decoder = Decoder::new(HELLO_LIMIT);
    let hello = match timeout(HELLO_DEADLINE, greet(&mut stream, &mut decoder)).await {
        Ok(Ok(hello)) => hello,
        Ok(Err(error)) => return refuse(&mut stream, error).await,
        Err(_) => {
            let error = "no hello came within 2 s; the first frame of a client is its hello, in JSON";
            return refuse(&mut stream, ExecError::new(ErrorCode::ProtocolMismatch, error)).await;
        }
    };
    let refused = refusal.is_some();
    let encoding = hello.common_encoding();
    let rules = state.settings().environment.clone();
    say_hello(&mut stream, encoding, rules, refusal).await;
    if refused {
        return;
    }
    tracing::debug!(client = hello.client, "connected");
    decoder.set_limit(FRAME_LIMIT);
    let (reader, half) = stream.into_split();
    let (outbox, writer) = outbox::channel(encoding);
    let writer = tokio::spawn(writer.run(half));
    let mut session = Session {
        state,
        outbox,
        encoding,
        requests: Arc::default(),
        tasks: JoinSet::new(),
        waits: JoinSet::new(),
    };
    session.read(reader, decoder).await;
    session.end().await;
    // The last answers are on their way; a client that does not read them is not waited for.
    let _ = timeout(HELLO_DEADLINE, writer).await;
}

async fn greet(stream: &mut UnixStream, decoder: &mut Decoder) -> Result<Hello, ExecError> {
    let mismatch = |what: String| ExecError::new(ErrorCode::ProtocolMismatch, what);
    let mut buffer = [0; 4096];
    let payload = loop {
        match decoder.next_payload() {
            Ok(Some(payload)) => break payload,
            Ok(None) => {}
            Err(error) => return Err(mismatch(format!("no hello: {error}"))),
        }
        match stream.read(&mut buffer).await {
            Ok(count) if count > 0 => decoder.push(&buffer[..count]),
            _ => return Err(mismatch("the connection ended before the hello".into())),
        }
    };
    let hello: Hello = codec::from_json(&payload).map_err(|error| mismatch(format!("no hello: {error}")))?;
    if hello.protocol.major != PROTOCOL.major {
        return Err(mismatch(format!(
            "the client speaks protocol {} and this daemon {PROTOCOL}; install both from one version",
            hello.protocol
        )));
    }
    Ok(hello)
}

/// For a peer that did not introduce itself.
async fn refuse(stream: &mut UnixStream, error: ExecError) {
    say_hello(stream, Encoding::Json, EnvironmentRules::default(), Some(error)).await;
}

/// The daemon's hello. A client that is gone need not hear it.
async fn say_hello(
    stream: &mut UnixStream,
    encoding: Encoding,
    environment: EnvironmentRules,
    error: Option<ExecError>,
) {
    let reply = HelloReply {
        protocol: PROTOCOL,
        server: SERVER.into(),
        pid: std::process::id(),
        encoding,
        environment,
        capabilities: CAPABILITIES.iter().map(ToString::to_string).collect(),
        error,
    };
    if let Ok(frame) = codec::to_json(&reply).and_then(|json| frame::encode(&json)) {
        let _ = timeout(HELLO_DEADLINE, stream.write_all(&frame)).await;
    }
}

type Requests = Arc<Mutex<HashMap<u64, Handle>>>;

/// One client after its hello.
struct Session {
    state: Arc<State>,
    outbox: Outbox,
    encoding: Encoding,
    requests: Requests,
    tasks: JoinSet<()>,
    /// Answers that are only worth waiting for while the client is there.
    waits: JoinSet<()>,
}

impl Session {
    /// Reads messages until the client leaves, breaks the protocol, or the daemon has nothing left to do for it.
    async fn read(&mut self, reader: OwnedReadHalf, mut decoder: Decoder) {
        let mut draining = self.state.draining.subscribe();
        loop {
            match self.take_all(&mut decoder, &reader).await {
                Ok(()) => {}
                Err(error) => {
                    let error = ExecError::new(ErrorCode::InvalidRequest, format!("{error}; the connection is closed"));
                    let _ = self.outbox.send(&ServerMessage::Error { id: None, error }).await;
                    return;
                }
            }
            while self.tasks.try_join_next().is_some() {}
            while self.waits.try_join_next().is_some() {}
            let is_draining = *draining.borrow_and_update();
            if is_draining {
                self.stop_all(Stop::ShuttingDown);
            }
            tokio::select! {
                ready = reader.readable() => match ready.and_then(|()| scratch::read(|buffer| reader.try_read(buffer))) {
                    Ok(bytes) if bytes.is_empty() => return,
                    Ok(bytes) => decoder.push(&bytes),
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    Err(_) => return,
                },
                changed = draining.changed(), if !is_draining => if changed.is_err() { return },
                _ = self.tasks.join_next(), if is_draining && !self.tasks.is_empty() => {}
                () = tokio::time::sleep(GONE_CHECK), if is_draining && self.tasks.is_empty() => return,
            }
        }
    }

    async fn take_all(&mut self, decoder: &mut Decoder, reader: &OwnedReadHalf) -> Result<(), CodecError> {
        while let Some(payload) = decoder.next_payload()? {
            match self.encoding.client_message(&payload) {
                Ok(message) => self.take(message, reader).await,
                Err(error) => match id_of(self.encoding, &payload) {
                    // The frame is whole and says which request it is: only that one is refused.
                    Some(id) => {
                        self.answer(id, Err(ExecError::new(ErrorCode::InvalidRequest, error.to_string())))
                            .await
                    }
                    None => return Err(error),
                },
            }
        }
        Ok(())
    }

    async fn take(&mut self, message: ClientMessage, reader: &OwnedReadHalf) {
        match message {
            ClientMessage::Run { id, request, stream } => self.start(id, *request, stream).await,
            ClientMessage::Stdin { id, data, eof } => self.feed(id, data, eof, reader).await,
            ClientMessage::Resize { id, size } => match size.check("resize") {
                Ok(()) => {
                    if let Some(handle) = lock(&self.requests).get(&id) {
                        handle.resize(size);
                    }
                }
                // No answer of the request: that one is under way and will have its own.
                Err(error) => {
                    let _ = self.outbox.send(&ServerMessage::Error { id: None, error }).await;
                }
            },
            ClientMessage::Cancel { id } => {
                if let Some(handle) = lock(&self.requests).get(&id) {
                    handle.stop(Stop::Cancelled);
                }
            }
            ClientMessage::Resolve { id, request } => {
                let state = Arc::clone(&self.state);
                self.reply(id, async move {
                    let spec = Box::new(run::resolve(&state, &request).await?);
                    Ok(ServerMessage::Resolved { id, spec })
                });
            }
            ClientMessage::Explain { id, request, paths } => {
                let state = Arc::clone(&self.state);
                self.reply(id, async move {
                    let paths = run::explain(&state, &request, paths).await?;
                    Ok(ServerMessage::Explained { id, paths })
                });
            }
            ClientMessage::Probe { id } => {
                let state = Arc::clone(&self.state);
                self.reply(id, async move {
                    let outcome = state.probe.refresh(&state.helpers).await;
                    let report = outcome.map_err(|error| ExecError::new(ErrorCode::Internal, error))?;
                    Ok(ServerMessage::Probe {
                        id,
                        report: Box::new(report.as_ref().clone()),
                    })
                });
            }
            ClientMessage::Status { id } => {
                let status = Box::new(self.state.status());
                self.answer(id, Ok(ServerMessage::Status { id, status })).await;
            }
            ClientMessage::Config { id } => {
                let toml = self.state.settings().config.to_toml();
                let path = self.state.config_file();
                self.answer(id, Ok(ServerMessage::Config { id, toml, path })).await;
            }
            ClientMessage::Start { id, request } => {
                let state = Arc::clone(&self.state);
                self.reply(id, async move {
                    let task = state.tasks.start(&state, *request).await?;
                    Ok(ServerMessage::TaskStarted { id, task })
                });
            }
            message => self.take_about_tasks(message).await,
        }
    }

    /// Messages about tasks that are there already.
    async fn take_about_tasks(&mut self, message: ClientMessage) {
        let state = Arc::clone(&self.state);
        match message {
            ClientMessage::TaskRead {
                id,
                session,
                task,
                cursor,
                wait,
                timeout_ms,
            } => {
                self.reply_while_here(id, async move {
                    let read = state.tasks.read(session.as_deref(), &task, cursor, wait, timeout_ms);
                    let output = Box::new(read.await?);
                    Ok(ServerMessage::TaskOutput { id, output })
                })
                .await
            }
            ClientMessage::TaskList { id, session } => {
                let tasks = state.tasks.list(session.as_deref());
                self.answer(id, Ok(ServerMessage::Tasks { id, tasks })).await;
            }
            ClientMessage::TaskKill {
                id,
                session,
                task,
                reason,
            } => {
                let killed = state.tasks.kill(session.as_deref(), &task, reason.as_deref());
                self.answer(id, killed.map(|task| ServerMessage::TaskKilled { id, task }))
                    .await;
            }
            ClientMessage::SessionEnd { id, session } => self.reply(id, async move {
                let tasks = state.tasks.end_session(&session).await;
                Ok(ServerMessage::SessionEnded { id, tasks })
            }),
            ClientMessage::Notices { id, session } => {
                if let Err(error) = state.tasks.subscribe(self.outbox.clone(), id, session).await {
                    self.answer(id, Err(error)).await;
                }
            }
            _ => tracing::debug!("a message of a kind that this version does not know"),
        }
    }

    /// Answers later, while other messages are read.
    fn reply(&mut self, id: u64, answer: impl Future<Output = Result<ServerMessage, ExecError>> + Send + 'static) {
        self.tasks.spawn(answered(self.outbox.clone(), id, answer));
    }

    /// The same for an answer that may take as long as a command; given up when the client leaves.
    async fn reply_while_here(
        &mut self,
        id: u64,
        answer: impl Future<Output = Result<ServerMessage, ExecError>> + Send + 'static,
    ) {
        if self.waits.len() >= MAX_IN_FLIGHT {
            let text = format!(
                "{MAX_IN_FLIGHT} questions of this connection wait for an answer; wait for some, or connect again"
            );
            return self
                .answer(id, Err(ExecError::new(ErrorCode::LimitExceeded, text)))
                .await;
        }
        self.waits.spawn(answered(self.outbox.clone(), id, answer));
    }

    async fn answer(&self, id: u64, answer: Result<ServerMessage, ExecError>) {
        let message = answer.unwrap_or_else(|error| ServerMessage::Error { id: Some(id), error });
        let _ = self.outbox.send(&message).await;
    }

    async fn start(&mut self, id: u64, request: BashExecRequest, stream: bool) {
        let count = {
            let requests = lock(&self.requests);
            if requests.contains_key(&id) {
                None
            } else {
                Some(requests.len())
            }
        };
        let refusal = match count {
            // Not an answer of request `id`: that one is under way and will have its own.
            None => {
                let text = format!("request id {id} is in use on this connection; the second request is ignored");
                let error = ExecError::new(ErrorCode::InvalidRequest, text);
                let _ = self.outbox.send(&ServerMessage::Error { id: None, error }).await;
                return;
            }
            Some(count) if count >= MAX_IN_FLIGHT => Some(ExecError::new(
                ErrorCode::LimitExceeded,
                format!("{MAX_IN_FLIGHT} requests of this connection are under way; wait for some, or connect again"),
            )),
            Some(_) if self.state.is_draining() => Some(shutting_down()),
            Some(_) => None,
        };
        if let Some(error) = refusal {
            return self.answer(id, Err(error)).await;
        }
        let (handle, control) = control::pair(request.stdin_open);
        lock(&self.requests).insert(id, handle);
        let outbox = self.outbox.clone();
        let events = Events {
            sink: Sink::Client(outbox.clone()),
            id,
            stream,
        };
        let (state, requests) = (Arc::clone(&self.state), Arc::clone(&self.requests));
        self.tasks.spawn(async move {
            let session = request.session.clone();
            let begun = Instant::now();
            let outcome = match run::check_foreground(&request) {
                Ok(()) => run::run(&state, request, events, control).await,
                Err(error) => Err(error),
            };
            log(&state, id, session.as_deref(), begun, &outcome);
            lock(&requests).remove(&id);
            deliver(&outbox, id, outcome).await;
        });
    }

    /// Hands input to its request. Reading pauses only for a client that sends more than its window; that it leaves is still seen.
    async fn feed(&mut self, id: u64, data: ByteString, eof: bool, reader: &OwnedReadHalf) {
        let Some(mut input) = lock(&self.requests).get_mut(&id).and_then(Handle::take_input) else {
            return;
        };
        self.queue(&mut input, data, reader).await;
        if !eof && let Some(handle) = lock(&self.requests).get_mut(&id) {
            handle.keep_input(input);
        }
    }

    async fn queue(&self, input: &mut DuplexStream, data: ByteString, reader: &OwnedReadHalf) {
        let mut draining = self.state.draining.subscribe();
        // An error means that the command does not read any more, which is its right.
        let sent = input.write_all(data.as_bytes());
        tokio::pin!(sent);
        loop {
            tokio::select! {
                biased;
                _ = &mut sent => return,
                () = tokio::time::sleep(GONE_CHECK) => if has_left(reader) {
                    self.stop_all(Stop::Disconnected);
                },
                // The borrow that it gives must not be held over the next await.
                () = async { drop(draining.wait_for(|draining| *draining).await) } => {
                    self.stop_all(Stop::ShuttingDown);
                    let _ = sent.await;
                    return;
                }
            }
        }
    }

    fn stop_all(&self, why: Stop) {
        lock(&self.requests).values().for_each(|handle| handle.stop(why));
    }

    /// The client has left: what it asked for ends, and nobody leaves before that has.
    async fn end(mut self) {
        self.stop_all(Stop::Disconnected);
        self.waits.abort_all();
        while self.tasks.join_next().await.is_some() {}
    }
}

async fn answered(outbox: Outbox, id: u64, answer: impl Future<Output = Result<ServerMessage, ExecError>>) {
    let message = answer
        .await
        .unwrap_or_else(|error| ServerMessage::Error { id: Some(id), error });
    let _ = outbox.send(&message).await;
}

/// Sends the last answer of a run. Output that nobody will fetch is removed.
async fn deliver(outbox: &Outbox, id: u64, outcome: Result<BashRunResult, ExecError>) {
    match outcome {
        Err(error) => {
            let _ = outbox.send(&ServerMessage::Error { id: Some(id), error }).await;
        }
        Ok(result) => {
            let streams = [result.stdout.clone(), result.stderr.clone()];
            if outbox
                .send(&ServerMessage::Finished {
                    id,
                    result: Box::new(result),
                })
                .await
                .is_err()
            {
                run::discard(&streams).await;
            }
        }
    }
}

/// One line per request: what happened, never what was run.
fn log(state: &State, id: u64, session: Option<&str>, begun: Instant, outcome: &Result<BashRunResult, ExecError>) {
    let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    match outcome {
        Ok(result) => {
            state.finished.fetch_add(1, Ordering::Relaxed);
            let confined = result.sandbox.confined.as_ref();
            tracing::info!(
                id,
                session,
                mode = result.sandbox.mode.as_str(),
                tier = confined.map(|confined| confined.tier.as_str()),
                exit = result.exit_code,
                signal = result.signal,
                timed_out = result.timed_out,
                aborted = result.aborted,
                facts = confined.map_or(0, |confined| confined.denials.len()),
                survivors = result.survivors,
                ms,
                "finished"
            );
        }
        Err(error) => {
            state.failed.fetch_add(1, Ordering::Relaxed);
            tracing::info!(id, session, code = error.code.as_str(), ms, "not finished");
        }
    }
}

/// The `id` of a message that is not understood otherwise. Only JSON says which field it is.
fn id_of(encoding: Encoding, payload: &[u8]) -> Option<u64> {
    match encoding {
        Encoding::Json => serde_json::from_slice::<serde_json::Value>(payload)
            .ok()?
            .get("id")?
            .as_u64(),
        Encoding::Bincode => None,
    }
}

/// Whether the peer has closed, asked of the socket without reading what still waits in it.
fn has_left(reader: &OwnedReadHalf) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let stream: &UnixStream = reader.as_ref();
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|count| count > 0)
}
