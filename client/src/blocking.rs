//! A client without a runtime: one connection, one request at a time, and a loop that can wait for other descriptors too.
//!
//! ```no_run
//! use dsh_client::address::Endpoint;
//! use dsh_policy::BashExecRequest;
//!
//! let mut client = dsh_client::start::connect(&Endpoint::Default { autostart: true })?;
//! let result = client.run(BashExecRequest { command: "echo hello".into(), ..Default::default() })?;
//! assert_eq!(result.stdout.text, "hello\n");
//! # Ok::<(), dsh_client::ClientError>(())
//! ```
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use dsh_policy::bytes::ByteString;
use dsh_policy::error::{ErrorCode, ExecError};
use dsh_policy::explain::PathAnswer;
use dsh_policy::frame::{self, Decoder, FRAME_LIMIT, HELLO_LIMIT};
use dsh_policy::plan::BUILD_ID;
use dsh_policy::probe::ProbeReport;
use dsh_policy::task::{Cursor, TaskInfo, TaskOutput, WaitFor};
use dsh_policy::wire::{ClientMessage, DaemonStatus, Encoding, Hello, HelloReply, PROTOCOL, ServerMessage};
use dsh_policy::{BashExecRequest, BashExecSpec, BashRunResult, codec};

use crate::error::ClientError;

/// How long a daemon may take to greet.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// Read at once.
const CHUNK: usize = 64 * 1024;

/// A connection to a daemon.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    decoder: Decoder,
    outgoing: Vec<u8>,
    greeting: HelloReply,
    next_id: u64,
}

fn lost(error: &io::Error) -> ClientError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            ClientError::Unreachable("the daemon does not answer".into())
        }
        _ => ClientError::Lost,
    }
}

impl Client {
    /// Connects to the daemon that listens on `socket`.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] when nobody listens, [`ClientError::Exec`] when the daemon refuses this client.
    pub fn connect(socket: &Path) -> Result<Self, ClientError> {
        let stream = UnixStream::connect(socket)
            .map_err(|error| ClientError::Unreachable(format!("no daemon answers on {}: {error}", socket.display())))?;
        Self::greet(stream)
    }

    /// Says hello on a connected socket.
    pub(crate) fn greet(mut stream: UnixStream) -> Result<Self, ClientError> {
        let hello = Hello {
            protocol: PROTOCOL,
            encoding: Encoding::Bincode,
            client: concat!("dsh-exec ", env!("CARGO_PKG_VERSION")).to_owned(),
            build: BUILD_ID.to_owned(),
        };
        let payload = codec::to_json(&hello).map_err(|error| ClientError::Protocol(error.to_string()))?;
        let hello = frame::encode(&payload).map_err(|error| ClientError::Protocol(error.to_string()))?;
        stream
            .set_read_timeout(Some(HELLO_DEADLINE))
            .map_err(|error| lost(&error))?;
        // A daemon that refuses this peer closes at once, so a failed write still has an answer to read.
        let _ = stream.write_all(&hello);
        let mut decoder = Decoder::new(HELLO_LIMIT);
        let greeting = loop {
            if let Some(payload) = decoder
                .next_payload()
                .map_err(|error| ClientError::Protocol(error.to_string()))?
            {
                break codec::from_json::<HelloReply>(&payload)
                    .map_err(|error| ClientError::Protocol(error.to_string()))?;
            }
            fill(&mut stream, &mut decoder)?;
        };
        if let Some(error) = greeting.error {
            return Err(ClientError::Exec(error));
        }
        if greeting.protocol.major != PROTOCOL.major {
            let text = format!(
                "the daemon speaks protocol {}, this client {PROTOCOL}; install both from one release",
                greeting.protocol
            );
            return Err(ClientError::Exec(ExecError::new(ErrorCode::ProtocolMismatch, text)));
        }
        decoder.set_limit(FRAME_LIMIT);
        stream.set_read_timeout(None).map_err(|error| lost(&error))?;
        stream.set_nonblocking(true).map_err(|error| lost(&error))?;
        Ok(Self {
            stream,
            decoder,
            outgoing: Vec::new(),
            greeting,
            next_id: 1,
        })
    }

    /// The greeted socket, for [`crate::connection`]: the decoder may hold bytes that have come already.
    pub(crate) fn into_parts(self) -> (UnixStream, Decoder, HelloReply) {
        (self.stream, self.decoder, self.greeting)
    }

    /// What the daemon said of itself.
    #[must_use]
    pub fn greeting(&self) -> &HelloReply {
        &self.greeting
    }

    /// A name for the next request.
    pub fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Queues a message and sends as much as the socket takes; [`Client::progress`] sends the rest.
    ///
    /// # Errors
    /// [`ClientError::Lost`] when the daemon is gone, [`ClientError::Local`] when the message is larger than a frame.
    pub fn send(&mut self, message: &ClientMessage) -> Result<(), ClientError> {
        let frame = self
            .greeting
            .encoding
            .frame(message)
            .map_err(|error| ClientError::Local(error.to_string()))?;
        self.outgoing.extend_from_slice(&frame);
        self.flush()
    }

    /// Bytes that are queued and not sent yet.
    #[must_use]
    pub fn backlog(&self) -> usize {
        self.outgoing.len()
    }

    /// Sends what is queued and reads what has come, as far as neither blocks. Call it when [`AsFd::as_fd`] polls ready.
    ///
    /// # Errors
    /// [`ClientError::Lost`] when the daemon is gone.
    pub fn progress(&mut self) -> Result<(), ClientError> {
        self.flush()?;
        match fill(&mut self.stream, &mut self.decoder) {
            Err(ClientError::Unreachable(_)) => Ok(()),
            other => other,
        }
    }

    fn flush(&mut self) -> Result<(), ClientError> {
        let mut sent = 0;
        while sent < self.outgoing.len() {
            match self.stream.write(&self.outgoing[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The daemon's last words may still be readable.
                Err(_) => sent = self.outgoing.len(),
            }
        }
        self.outgoing.drain(..sent);
        Ok(())
    }

    /// The next message that has arrived whole, without waiting.
    ///
    /// # Errors
    /// [`ClientError::Protocol`] when it is none.
    pub fn next_arrived(&mut self) -> Result<Option<ServerMessage>, ClientError> {
        let broken = |error: codec::CodecError| ClientError::Protocol(error.to_string());
        match self.decoder.next_payload().map_err(broken)? {
            Some(payload) => self
                .greeting
                .encoding
                .server_message(&payload)
                .map(Some)
                .map_err(broken),
            None => Ok(None),
        }
    }

    /// Waits for the next message.
    ///
    /// # Errors
    /// [`ClientError::Lost`] or [`ClientError::Protocol`].
    pub fn next_message(&mut self) -> Result<ServerMessage, ClientError> {
        use rustix::event::{PollFd, PollFlags, poll};
        loop {
            if let Some(message) = self.next_arrived()? {
                return Ok(message);
            }
            let mut interest = PollFlags::IN;
            if self.backlog() > 0 {
                interest |= PollFlags::OUT;
            }
            match poll(&mut [PollFd::new(&self.stream, interest)], None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(ClientError::Local(format!("cannot wait for the daemon: {error}"))),
            }
            self.progress()?;
        }
    }

    /// Runs one command to its end, with this process's scrubbed environment and umask unless the request has its own.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when nothing ran or the command's fate is unknown; a command that failed is a result.
    pub fn run(&mut self, request: BashExecRequest) -> Result<BashRunResult, ClientError> {
        self.run_with(request, |_| {})
    }

    /// Like [`Client::run`], and hands every event (`started`, `output`, `denial`) to `on_event` as it arrives.
    ///
    /// # Errors
    /// As for [`Client::run`].
    pub fn run_with(
        &mut self,
        mut request: BashExecRequest,
        mut on_event: impl FnMut(&ServerMessage),
    ) -> Result<BashRunResult, ClientError> {
        crate::ambient::attach(&mut request, &self.greeting.environment);
        let id = self.new_id();
        self.send(&ClientMessage::Run {
            id,
            request: Box::new(request),
            stream: true,
        })?;
        self.answer(id, |message| match message {
            ServerMessage::Finished { result, .. } => Some(*result),
            other => {
                on_event(&other);
                None
            }
        })
    }

    /// What the daemon would make of a request, without running it.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when the request cannot be run.
    pub fn resolve(&mut self, request: BashExecRequest) -> Result<BashExecSpec, ClientError> {
        let id = self.new_id();
        self.send(&ClientMessage::Resolve {
            id,
            request: Box::new(request),
        })?;
        self.answer(id, |message| match message {
            ServerMessage::Resolved { spec, .. } => Some(*spec),
            _ => None,
        })
    }

    /// Which operations on `paths` a request would be allowed, without running it.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when the request cannot be run.
    pub fn explain(
        &mut self,
        request: BashExecRequest,
        paths: Vec<ByteString>,
    ) -> Result<Vec<PathAnswer>, ClientError> {
        let id = self.new_id();
        self.send(&ClientMessage::Explain {
            id,
            request: Box::new(request),
            paths,
        })?;
        self.answer(id, |message| match message {
            ServerMessage::Explained { paths, .. } => Some(paths),
            _ => None,
        })
    }

    /// How the daemon is.
    ///
    /// # Errors
    /// When the daemon is lost.
    pub fn status(&mut self) -> Result<DaemonStatus, ClientError> {
        let id = self.new_id();
        self.send(&ClientMessage::Status { id })?;
        self.answer(id, |message| match message {
            ServerMessage::Status { status, .. } => Some(*status),
            _ => None,
        })
    }

    /// What this host can enforce, found out afresh.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when the helper cannot be run.
    pub fn probe(&mut self) -> Result<ProbeReport, ClientError> {
        let id = self.new_id();
        self.send(&ClientMessage::Probe { id })?;
        self.answer(id, |message| match message {
            ServerMessage::Probe { report, .. } => Some(*report),
            _ => None,
        })
    }

    /// The configuration in force, as TOML, and the file it comes from.
    ///
    /// # Errors
    /// When the daemon is lost.
    pub fn config(&mut self) -> Result<(String, ByteString), ClientError> {
        let id = self.new_id();
        self.send(&ClientMessage::Config { id })?;
        self.answer(id, |message| match message {
            ServerMessage::Config { toml, path, .. } => Some((toml, path)),
            _ => None,
        })
    }

    /// Starts a command in the background; its `session` owns it.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when it is not started; then nothing is left of it.
    pub fn start(&mut self, mut request: BashExecRequest) -> Result<TaskInfo, ClientError> {
        crate::ambient::attach(&mut request, &self.greeting.environment);
        request.background = true;
        let id = self.new_id();
        self.send(&ClientMessage::Start {
            id,
            request: Box::new(request),
        })?;
        self.answer(id, |message| match message {
            ServerMessage::TaskStarted { task, .. } => Some(task),
            _ => None,
        })
    }

    /// What a task has written since `cursor` (without one: since the last such read), after waiting for what `wait` says.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when `session` has no such task.
    pub fn task_output(
        &mut self,
        session: Option<&str>,
        task: &str,
        cursor: Option<Cursor>,
        wait: WaitFor,
        timeout_ms: Option<u64>,
    ) -> Result<TaskOutput, ClientError> {
        let id = self.new_id();
        self.send(&ClientMessage::TaskRead {
            id,
            session: session.map(str::to_owned),
            task: task.to_owned(),
            cursor,
            wait,
            timeout_ms,
        })?;
        self.answer(id, |message| match message {
            ServerMessage::TaskOutput { output, .. } => Some(*output),
            _ => None,
        })
    }

    /// The tasks of a session and those without one, oldest first.
    ///
    /// # Errors
    /// When the daemon is lost.
    pub fn tasks(&mut self, session: Option<&str>) -> Result<Vec<TaskInfo>, ClientError> {
        let id = self.new_id();
        let session = session.map(str::to_owned);
        self.send(&ClientMessage::TaskList { id, session })?;
        self.answer(id, |message| match message {
            ServerMessage::Tasks { tasks, .. } => Some(tasks),
            _ => None,
        })
    }

    /// Asks for the end of a task. Gives the task as it was: terminal when it had ended already.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when `session` has no such task.
    pub fn kill_task(
        &mut self,
        session: Option<&str>,
        task: &str,
        reason: Option<&str>,
    ) -> Result<TaskInfo, ClientError> {
        let id = self.new_id();
        self.send(&ClientMessage::TaskKill {
            id,
            session: session.map(str::to_owned),
            task: task.to_owned(),
            reason: reason.map(str::to_owned),
        })?;
        self.answer(id, |message| match message {
            ServerMessage::TaskKilled { task, .. } => Some(task),
            _ => None,
        })
    }

    /// Ends a session: all its tasks, and waits until nothing of them is left. Gives how many there were.
    ///
    /// # Errors
    /// When the daemon is lost.
    pub fn end_session(&mut self, session: &str) -> Result<u32, ClientError> {
        let id = self.new_id();
        let session = session.to_owned();
        self.send(&ClientMessage::SessionEnd { id, session })?;
        self.answer(id, |message| match message {
            ServerMessage::SessionEnded { tasks, .. } => Some(tasks),
            _ => None,
        })
    }

    /// Waits until `pick` takes a message as the answer to request `id`.
    fn answer<T>(&mut self, id: u64, mut pick: impl FnMut(ServerMessage) -> Option<T>) -> Result<T, ClientError> {
        loop {
            match self.next_message()? {
                ServerMessage::Error { id: about, error } if about.is_none_or(|about| about == id) => {
                    return Err(ClientError::Exec(error));
                }
                message => {
                    if let Some(answer) = pick(message) {
                        return Ok(answer);
                    }
                }
            }
        }
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Reads once.
fn fill(stream: &mut UnixStream, decoder: &mut Decoder) -> Result<(), ClientError> {
    let mut chunk = [0; CHUNK];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => return Err(ClientError::Lost),
            Ok(count) => {
                decoder.push(&chunk[..count]);
                return Ok(());
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(lost(&error)),
        }
    }
}
