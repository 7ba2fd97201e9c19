//! A client for tokio: many requests at once on one connection, events as they happen, a cancel at any time.
//!
//! ```no_run
//! use dsh_client::address::Endpoint;
//! use dsh_client::connection::{Connection, Event};
//! use dsh_policy::BashExecRequest;
//!
//! # async fn example() -> Result<(), dsh_client::ClientError> {
//! let connection = Connection::open(Endpoint::Default { autostart: true }).await?;
//! let request = |command: &str| BashExecRequest { command: command.into(), ..Default::default() };
//!
//! // Two at once; each result when it is there.
//! let (one, two) = tokio::join!(connection.run(request("echo one")), connection.run(request("echo two")));
//! assert_eq!((one?.stdout.text.as_str(), two?.stdout.text.as_str()), ("one\n", "two\n"));
//!
//! // Events while it runs, and an end before its time.
//! let mut running = connection.start(request("echo ready; sleep 100")).await?;
//! while let Some(event) = running.next_event().await {
//!     if let Event::Output { .. } = event {
//!         running.cancel();
//!     }
//! }
//! assert!(running.result().await?.aborted);
//! # Ok(())
//! # }
//! ```
mod driver;
mod tasks;

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use dsh_policy::bytes::ByteString;
use dsh_policy::probe::ProbeReport;
use dsh_policy::wire::{ClientMessage, DaemonStatus, Encoding, HelloReply, ServerMessage, StreamName};
use dsh_policy::{BashExecRequest, BashExecSpec, BashRunResult, DenialFact};
use futures_core::Stream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::address::Endpoint;
use crate::blocking::Client;
use crate::error::ClientError;
use crate::start;
use driver::{Inbox, Queued, Requests};

/// Bytes that may wait to be sent before a sender has to.
const QUEUE_ROOM: u32 = 4 * 1024 * 1024;
/// Bytes of standard input in one message.
const INPUT_CHUNK: usize = 64 * 1024;

/// A connection to a daemon. Clones share it; it is closed when the last clone and the last running request are gone.
#[derive(Clone, Debug)]
pub struct Connection {
    greeting: Arc<HelloReply>,
    requests: Arc<Requests>,
    outgoing: Outgoing,
}

/// The way to the socket.
#[derive(Clone, Debug)]
struct Outgoing {
    encoding: Encoding,
    queue: mpsc::UnboundedSender<Queued>,
    room: Arc<Semaphore>,
}

impl Outgoing {
    fn encode(&self, message: &ClientMessage) -> Result<Vec<u8>, ClientError> {
        self.encoding
            .frame(message)
            .map_err(|error| ClientError::Local(error.to_string()))
    }

    /// Waits until there is room for `frame`.
    async fn room_for(&self, frame: &[u8]) -> Option<OwnedSemaphorePermit> {
        let wanted = u32::try_from(frame.len()).unwrap_or(QUEUE_ROOM).min(QUEUE_ROOM);
        Arc::clone(&self.room).acquire_many_owned(wanted).await.ok()
    }

    /// Queues a frame; false when the connection has ended.
    fn push(&self, frame: Vec<u8>, room: Option<OwnedSemaphorePermit>) -> bool {
        self.queue.send(Queued { frame, _room: room }).is_ok()
    }
}

impl Connection {
    /// Connects as `endpoint` says, and starts a daemon if it says so.
    ///
    /// # Errors
    /// As for [`start::connect`].
    pub async fn open(endpoint: Endpoint) -> Result<Self, ClientError> {
        Self::greeted(move || start::connect(&endpoint)).await
    }

    /// Connects to the daemon that listens on `socket`.
    ///
    /// # Errors
    /// As for [`Client::connect`].
    pub async fn connect(socket: &Path) -> Result<Self, ClientError> {
        let socket = socket.to_owned();
        Self::greeted(move || Client::connect(&socket)).await
    }

    /// Connecting and greeting may take as long as a daemon takes to start, so another thread waits for it.
    async fn greeted(
        connect: impl FnOnce() -> Result<Client, ClientError> + Send + 'static,
    ) -> Result<Self, ClientError> {
        let failed = |error: &dyn std::fmt::Display| ClientError::Local(format!("cannot connect: {error}"));
        let client = tokio::task::spawn_blocking(connect)
            .await
            .map_err(|error| failed(&error))??;
        let (stream, decoder, greeting) = client.into_parts();
        let stream = tokio::net::UnixStream::from_std(stream).map_err(|error| failed(&error))?;
        let (queue, queued) = mpsc::unbounded_channel();
        let requests = Arc::new(Requests::default());
        tokio::spawn(driver::drive(
            stream,
            decoder,
            greeting.encoding,
            queued,
            Arc::clone(&requests),
        ));
        let outgoing = Outgoing {
            encoding: greeting.encoding,
            queue,
            room: Arc::new(Semaphore::new(QUEUE_ROOM as usize)),
        };
        Ok(Self {
            greeting: Arc::new(greeting),
            requests,
            outgoing,
        })
    }

    /// What the daemon said of itself.
    #[must_use]
    pub fn greeting(&self) -> &HelloReply {
        &self.greeting
    }

    /// Runs a command to its end. Dropping the future before that cancels the command.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when nothing ran or its fate is unknown, [`ClientError::Lost`] when the daemon is gone.
    pub async fn run(&self, request: BashExecRequest) -> Result<BashRunResult, ClientError> {
        self.launch(request, false).await?.result().await
    }

    /// Runs a command whose events are wanted. Dropping what this gives before the command's end cancels it.
    ///
    /// # Errors
    /// [`ClientError::Lost`] when the daemon is gone, [`ClientError::Local`] when the request is larger than a message. What the daemon has
    /// against the request is told by [`Running::result`].
    pub async fn start(&self, request: BashExecRequest) -> Result<Running, ClientError> {
        self.launch(request, true).await
    }

    async fn launch(&self, mut request: BashExecRequest, stream: bool) -> Result<Running, ClientError> {
        crate::ambient::attach(&mut request, &self.greeting.environment);
        let request = Box::new(request);
        let inbox = self.send(|id| ClientMessage::Run { id, request, stream }).await?;
        Ok(Running {
            inbox,
            outgoing: self.outgoing.clone(),
            outcome: None,
            ended: false,
        })
    }

    /// Sends a message that opens a request. Once it is queued this has returned, so that a caller who gives up either has a handle or has sent nothing.
    async fn send(&self, message: impl FnOnce(u64) -> ClientMessage) -> Result<Inbox, ClientError> {
        let inbox = self.requests.open()?;
        let frame = self.outgoing.encode(&message(inbox.id))?;
        let room = self.outgoing.room_for(&frame).await;
        if self.outgoing.push(frame, room) {
            Ok(inbox)
        } else {
            Err(self.requests.end_error())
        }
    }

    /// Asks something that has one answer.
    async fn ask<T>(
        &self,
        message: impl FnOnce(u64) -> ClientMessage,
        pick: impl FnOnce(ServerMessage) -> Option<T>,
    ) -> Result<T, ClientError> {
        let mut inbox = self.send(message).await?;
        match std::future::poll_fn(|context| inbox.poll(context)).await? {
            ServerMessage::Error { error, .. } => Err(ClientError::Exec(error)),
            answer => pick(answer).ok_or_else(|| ClientError::Protocol("its answer is to another question".into())),
        }
    }

    /// What the daemon would make of a request, without running it.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when the request cannot be run.
    pub async fn resolve(&self, request: BashExecRequest) -> Result<BashExecSpec, ClientError> {
        let request = Box::new(request);
        let pick = |answer| match answer {
            ServerMessage::Resolved { spec, .. } => Some(*spec),
            _ => None,
        };
        self.ask(|id| ClientMessage::Resolve { id, request }, pick).await
    }

    /// How the daemon is.
    ///
    /// # Errors
    /// When the daemon is lost.
    pub async fn status(&self) -> Result<DaemonStatus, ClientError> {
        let pick = |answer| match answer {
            ServerMessage::Status { status, .. } => Some(*status),
            _ => None,
        };
        self.ask(|id| ClientMessage::Status { id }, pick).await
    }

    /// What this host can enforce, found out afresh.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when the helper cannot be run.
    pub async fn probe(&self) -> Result<ProbeReport, ClientError> {
        let pick = |answer| match answer {
            ServerMessage::Probe { report, .. } => Some(*report),
            _ => None,
        };
        self.ask(|id| ClientMessage::Probe { id }, pick).await
    }

    /// The configuration in force, as TOML, and the file it comes from.
    ///
    /// # Errors
    /// When the daemon is lost.
    pub async fn config(&self) -> Result<(String, ByteString), ClientError> {
        let pick = |answer| match answer {
            ServerMessage::Config { toml, path, .. } => Some((toml, path)),
            _ => None,
        };
        self.ask(|id| ClientMessage::Config { id }, pick).await
    }
}

/// What happens while a command runs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The shell is running.
    Started {
        /// Process id of the shell.
        pid: u32,
        /// What the request was resolved to.
        spec: Box<BashExecSpec>,
    },
    /// Bytes as they were written.
    Output {
        /// Which stream.
        stream: StreamName,
        /// Position of the first byte in its stream. A gap means that events were read too slowly; the result and its file are whole.
        offset: u64,
        /// The bytes.
        data: ByteString,
    },
    /// A refusal, when it is seen for the first time.
    Denial(Box<DenialFact>),
}

/// A command that is running: its events ([`Running::next_event`], or as a [`Stream`]), then its result. Dropped before its end, it is cancelled.
#[derive(Debug)]
#[must_use = "a command whose handle is dropped is cancelled"]
pub struct Running {
    inbox: Inbox,
    outgoing: Outgoing,
    outcome: Option<Result<BashRunResult, ClientError>>,
    ended: bool,
}

impl Running {
    /// The next event; none when the command has ended and [`Running::result`] has what became of it.
    pub async fn next_event(&mut self) -> Option<Event> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        while !self.ended {
            match ready!(self.inbox.poll(context)) {
                Ok(ServerMessage::Started { pid, spec, .. }) => return Poll::Ready(Some(Event::Started { pid, spec })),
                Ok(ServerMessage::Output {
                    stream, offset, data, ..
                }) => return Poll::Ready(Some(Event::Output { stream, offset, data })),
                Ok(ServerMessage::Denial { fact, .. }) => return Poll::Ready(Some(Event::Denial(fact))),
                Ok(ServerMessage::Finished { result, .. }) => self.end(Ok(*result)),
                Ok(ServerMessage::Error { error, .. }) => self.end(Err(ClientError::Exec(error))),
                Ok(_) => {}
                Err(error) => self.end(Err(error)),
            }
        }
        Poll::Ready(None)
    }

    fn end(&mut self, outcome: Result<BashRunResult, ClientError>) {
        self.outcome = Some(outcome);
        self.ended = true;
    }

    /// What became of the command; waits for its end and passes over events that nobody took.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when nothing ran or its fate is unknown, [`ClientError::Lost`] when the daemon is gone.
    pub async fn result(mut self) -> Result<BashRunResult, ClientError> {
        while self.next_event().await.is_some() {}
        self.outcome.take().unwrap_or(Err(ClientError::Lost))
    }

    /// Asks the daemon to end the command. Its result still comes, with `aborted` unless something else ended it first.
    pub fn cancel(&self) {
        if let Ok(frame) = self.outgoing.encode(&ClientMessage::Cancel { id: self.inbox.id }) {
            // On a connection that has ended there is nothing left to cancel.
            let _ = self.outgoing.push(frame, None);
        }
    }

    /// Writes to the command's standard input, when the request has `stdin_open`. Waits while much is on its way; what a command does not read is dropped.
    ///
    /// # Errors
    /// [`ClientError::Lost`] when the daemon is gone.
    pub async fn send_input(&self, data: &[u8]) -> Result<(), ClientError> {
        for piece in data.chunks(INPUT_CHUNK) {
            if !self.inbox.window_for(piece.len()).await {
                // The command has ended, or with it everything.
                let lost = self.outgoing.queue.is_closed();
                return if lost { Err(ClientError::Lost) } else { Ok(()) };
            }
            self.input(piece, false).await?;
        }
        Ok(())
    }

    /// Ends the command's standard input.
    ///
    /// # Errors
    /// [`ClientError::Lost`] when the daemon is gone.
    pub async fn close_input(&self) -> Result<(), ClientError> {
        self.input(&[], true).await
    }

    async fn input(&self, piece: &[u8], eof: bool) -> Result<(), ClientError> {
        let frame = self.outgoing.encode(&ClientMessage::Stdin {
            id: self.inbox.id,
            data: piece.into(),
            eof,
        })?;
        let room = self.outgoing.room_for(&frame).await;
        if self.outgoing.push(frame, room) {
            Ok(())
        } else {
            Err(ClientError::Lost)
        }
    }
}

impl Stream for Running {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.poll_event(context)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            self.cancel();
        }
    }
}
