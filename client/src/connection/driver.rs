//! The task behind a connection: writes what is queued, reads what comes, and hands each message to its request.
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dsh_policy::error::{ErrorCode, ExecError};
use dsh_policy::frame::Decoder;
use dsh_policy::wire::{Encoding, INPUT_WINDOW, ServerMessage};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::error::ClientError;

/// Read at once.
const CHUNK: usize = 64 * 1024;
/// Output of one request that may wait until somebody looks at it. More is left out, like the daemon does for a slow client: the offset tells, and the
/// result and its file are whole. So one request that nobody looks at neither stops the others nor fills the memory.
const UNREAD_OUTPUT: usize = 8 * 1024 * 1024;

/// A frame on its way, and its room in the queue. A cancel takes no room: it must never wait.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) frame: Vec<u8>,
    pub(super) _room: Option<OwnedSemaphorePermit>,
}

/// Who waits for which answers.
#[derive(Debug, Default)]
pub(super) struct Requests {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    open: HashMap<u64, Entry>,
    last_id: u64,
    ended: Option<Ended>,
}

#[derive(Debug)]
struct Entry {
    messages: mpsc::UnboundedSender<ServerMessage>,
    unread: Arc<AtomicUsize>,
    window: Arc<Semaphore>,
    taken: u64,
}

impl Entry {
    /// `taken` counts from the start. A daemon that says nonsense gives no more room than there ever was.
    fn give_back(&mut self, taken: u64) {
        let missing = (INPUT_WINDOW as usize).saturating_sub(self.window.available_permits());
        let more = usize::try_from(taken.saturating_sub(self.taken)).unwrap_or(missing);
        self.taken = self.taken.max(taken);
        self.window.add_permits(more.min(missing));
    }
}

impl Drop for Entry {
    /// Nobody takes input any more, so nobody waits for room either.
    fn drop(&mut self) {
        self.window.close();
    }
}

/// Why a connection ended.
#[derive(Clone, Debug)]
enum Ended {
    Closed,
    /// The daemon said why before it closed.
    WithLastWords(String),
    Broken(String),
}

impl Ended {
    fn error(&self) -> ClientError {
        match self {
            Self::Closed => ClientError::Lost,
            Self::WithLastWords(words) => {
                let text = format!("the daemon closed the connection: {words}; the fate of the command is unknown");
                ClientError::Exec(ExecError::new(ErrorCode::Unknown, text))
            }
            Self::Broken(what) => ClientError::Protocol(what.clone()),
        }
    }
}

/// The messages of one request.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) id: u64,
    messages: mpsc::UnboundedReceiver<ServerMessage>,
    unread: Arc<AtomicUsize>,
    window: Arc<Semaphore>,
    requests: Arc<Requests>,
}

impl Inbox {
    /// Waits until `bytes` more of standard input may be on their way; false when the request has ended.
    pub(super) async fn window_for(&self, bytes: usize) -> bool {
        let wanted = u32::try_from(bytes).unwrap_or(INPUT_WINDOW).min(INPUT_WINDOW);
        match self.window.acquire_many(wanted).await {
            Ok(permit) => {
                permit.forget(); // Comes back when the daemon says that it was taken.
                true
            }
            Err(_) => false,
        }
    }

    /// The next message; an error when the connection ended before it.
    pub(super) fn poll(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<ServerMessage, ClientError>> {
        self.messages.poll_recv(context).map(|message| {
            let message = message.ok_or_else(|| self.requests.end_error())?;
            self.unread.fetch_sub(output_len(&message), Ordering::Relaxed);
            Ok(message)
        })
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.requests.lock().open.remove(&self.id);
    }
}

impl Requests {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing in here is left half done by a panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new request; an error when the connection has ended.
    pub(super) fn open(self: &Arc<Self>) -> Result<Inbox, ClientError> {
        let (sender, messages) = mpsc::unbounded_channel();
        let unread = Arc::new(AtomicUsize::new(0));
        let window = Arc::new(Semaphore::new(INPUT_WINDOW as usize));
        let mut inner = self.lock();
        if let Some(ended) = &inner.ended {
            return Err(ended.error());
        }
        inner.last_id += 1;
        let id = inner.last_id;
        inner.open.insert(
            id,
            Entry {
                messages: sender,
                unread: Arc::clone(&unread),
                window: Arc::clone(&window),
                taken: 0,
            },
        );
        Ok(Inbox {
            id,
            messages,
            unread,
            window,
            requests: Arc::clone(self),
        })
    }

    /// Why nothing more comes.
    pub(super) fn end_error(&self) -> ClientError {
        self.lock().ended.as_ref().map_or(ClientError::Lost, Ended::error)
    }

    /// Hands a message to its request. One whose request is not waited for any more has no reader.
    fn deliver(&self, message: ServerMessage) {
        let Some((id, is_last)) = address(&message) else { return };
        let mut inner = self.lock();
        if let Some(entry) = inner.open.get_mut(&id) {
            if let ServerMessage::InputTaken { bytes, .. } = message {
                return entry.give_back(bytes);
            }
            let len = output_len(&message);
            if len > 0 && entry.unread.load(Ordering::Relaxed) + len > UNREAD_OUTPUT {
                return;
            }
            entry.unread.fetch_add(len, Ordering::Relaxed);
            // A closed inbox is about to leave the list by itself.
            let _ = entry.messages.send(message);
        }
        if is_last {
            inner.open.remove(&id);
        }
    }

    /// Everybody who still waits is told.
    fn end(&self, why: Ended) {
        let mut inner = self.lock();
        inner.ended.get_or_insert(why);
        inner.open.clear();
    }
}

/// Which request a message is about, and whether nothing follows it.
fn address(message: &ServerMessage) -> Option<(u64, bool)> {
    match message {
        ServerMessage::Started { id, .. }
        | ServerMessage::Output { id, .. }
        | ServerMessage::Denial { id, .. }
        | ServerMessage::InputTaken { id, .. }
        | ServerMessage::Notice { id, .. } => Some((*id, false)),
        ServerMessage::Finished { id, .. }
        | ServerMessage::Error { id: Some(id), .. }
        | ServerMessage::Resolved { id, .. }
        | ServerMessage::Status { id, .. }
        | ServerMessage::Probe { id, .. }
        | ServerMessage::Config { id, .. }
        | ServerMessage::Explained { id, .. }
        | ServerMessage::TaskStarted { id, .. }
        | ServerMessage::TaskOutput { id, .. }
        | ServerMessage::Tasks { id, .. }
        | ServerMessage::TaskKilled { id, .. }
        | ServerMessage::SessionEnded { id, .. } => Some((*id, true)),
        ServerMessage::Error { id: None, .. } | ServerMessage::Unknown => None,
    }
}

fn output_len(message: &ServerMessage) -> usize {
    match message {
        ServerMessage::Output { data, .. } => data.0.len(),
        _ => 0,
    }
}

/// Ends the list of requests however the task ends, also with its runtime.
struct EndGuard(Arc<Requests>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.end(Ended::Closed);
    }
}

/// Serves a connection until the daemon closes it or nobody is left who could ask for something; then the socket is closed.
pub(super) async fn drive(
    stream: UnixStream,
    decoder: Decoder,
    encoding: Encoding,
    queue: mpsc::UnboundedReceiver<Queued>,
    requests: Arc<Requests>,
) {
    let guard = EndGuard(Arc::clone(&requests));
    let (reader, writer) = stream.into_split();
    tokio::select! {
        why = read(reader, decoder, encoding, &requests) => requests.end(why),
        () = write(writer, queue) => {}
    }
    drop(guard);
}

async fn write(mut writer: OwnedWriteHalf, mut queue: mpsc::UnboundedReceiver<Queued>) {
    while let Some(queued) = queue.recv().await {
        if writer.write_all(&queued.frame).await.is_err() {
            // The daemon has closed; what it said last may still be to read.
            return std::future::pending().await;
        }
    }
}

async fn read(mut reader: OwnedReadHalf, mut decoder: Decoder, encoding: Encoding, requests: &Requests) -> Ended {
    let mut chunk = vec![0; CHUNK];
    let mut last_words = None;
    loop {
        match take_all(&mut decoder, encoding, requests) {
            Ok(words) => last_words = words.or(last_words),
            Err(what) => return Ended::Broken(what),
        }
        match reader.read(&mut chunk).await {
            Ok(0) => break,
            Ok(count) => decoder.push(&chunk[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    last_words.map_or(Ended::Closed, Ended::WithLastWords)
}

/// Delivers every message that is whole; gives what the daemon says about the connection itself.
fn take_all(decoder: &mut Decoder, encoding: Encoding, requests: &Requests) -> Result<Option<String>, String> {
    let mut last_words = None;
    while let Some(payload) = decoder.next_payload().map_err(|error| error.to_string())? {
        match encoding.server_message(&payload).map_err(|error| error.to_string())? {
            ServerMessage::Error { id: None, error } => last_words = Some(error.message),
            message => requests.deliver(message),
        }
    }
    Ok(last_words)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dsh_policy::frame::{self, FRAME_LIMIT};
    use dsh_policy::wire::StreamName;

    /// A served connection, the daemon's end of it, and the way to send.
    fn served() -> (Arc<Requests>, UnixStream, mpsc::UnboundedSender<Queued>) {
        let (ours, daemon) = UnixStream::pair().unwrap();
        let (queue, queued) = mpsc::unbounded_channel();
        let requests = Arc::new(Requests::default());
        tokio::spawn(drive(
            ours,
            Decoder::new(FRAME_LIMIT),
            Encoding::Bincode,
            queued,
            Arc::clone(&requests),
        ));
        (requests, daemon, queue)
    }

    async fn say(daemon: &mut UnixStream, message: &ServerMessage) {
        let frame = Encoding::Bincode.frame(message).unwrap();
        daemon.write_all(&frame).await.unwrap();
    }

    async fn next(inbox: &mut Inbox) -> Result<ServerMessage, ClientError> {
        std::future::poll_fn(|context| inbox.poll(context)).await
    }

    fn output(id: u64, offset: usize, len: usize) -> ServerMessage {
        let (stream, offset) = (StreamName::Stdout, offset as u64);
        ServerMessage::Output {
            id,
            stream,
            offset,
            data: vec![0; len].into(),
        }
    }

    fn refusal(id: Option<u64>) -> ServerMessage {
        ServerMessage::Error {
            id,
            error: ExecError::new(ErrorCode::LimitExceeded, "too much"),
        }
    }

    #[tokio::test]
    async fn each_request_gets_its_own_messages_and_strangers_none() {
        let (requests, mut daemon, _queue) = served();
        let (mut one, mut two) = (requests.open().unwrap(), requests.open().unwrap());
        assert_ne!(one.id, two.id);
        for message in [
            output(99, 0, 1),
            ServerMessage::Unknown,
            output(two.id, 0, 2),
            refusal(Some(one.id)),
            refusal(Some(one.id)),
        ] {
            say(&mut daemon, &message).await;
        }
        assert_eq!(next(&mut two).await.unwrap(), output(two.id, 0, 2));
        assert_eq!(next(&mut one).await.unwrap(), refusal(Some(one.id)));
        // The last answer was the last: what follows it has no reader.
        assert!(!requests.lock().open.contains_key(&one.id));
        assert!(requests.lock().open.contains_key(&two.id));
        let id = two.id;
        drop(two);
        assert!(!requests.lock().open.contains_key(&id));
    }

    #[tokio::test]
    async fn unread_output_is_bounded_and_everything_else_still_comes() {
        const PIECE: usize = 1024 * 1024;
        let (requests, mut daemon, _queue) = served();
        let (mut unread, mut other) = (requests.open().unwrap(), requests.open().unwrap());
        for n in 0..12 {
            say(&mut daemon, &output(unread.id, n * PIECE, PIECE)).await;
        }
        say(&mut daemon, &refusal(Some(unread.id))).await;
        say(&mut daemon, &refusal(Some(other.id))).await;
        next(&mut other).await.unwrap();
        for n in 0..UNREAD_OUTPUT / PIECE {
            assert_eq!(next(&mut unread).await.unwrap(), output(unread.id, n * PIECE, PIECE));
        }
        assert_eq!(next(&mut unread).await.unwrap(), refusal(Some(unread.id)));
    }

    #[tokio::test]
    async fn room_comes_back_when_output_is_read() {
        const PIECE: usize = UNREAD_OUTPUT / 2 + 1;
        let (requests, mut daemon, _queue) = served();
        let mut inbox = requests.open().unwrap();
        for n in 0..5 {
            say(&mut daemon, &output(inbox.id, n * PIECE, PIECE)).await;
            assert_eq!(next(&mut inbox).await.unwrap(), output(inbox.id, n * PIECE, PIECE));
        }
    }

    #[tokio::test]
    async fn what_the_daemon_says_before_it_closes_is_told_and_the_fate_is_unknown() {
        let (requests, mut daemon, _queue) = served();
        let mut inbox = requests.open().unwrap();
        say(&mut daemon, &refusal(None)).await;
        drop(daemon);
        let error = next(&mut inbox).await.unwrap_err().into_exec_error();
        assert_eq!(error.code, ErrorCode::Unknown);
        assert!(error.message.contains("too much"), "{}", error.message);
        assert!(requests.open().is_err());
    }

    #[tokio::test]
    async fn bytes_that_are_no_message_end_the_connection() {
        let too_long = u32::MAX.to_le_bytes().to_vec();
        let garbage = frame::encode(&[3, 255, 255, 255]).unwrap();
        for bytes in [too_long, garbage] {
            let (requests, mut daemon, _queue) = served();
            let mut inbox = requests.open().unwrap();
            daemon.write_all(&bytes).await.unwrap();
            let error = next(&mut inbox).await.unwrap_err();
            assert!(matches!(error, ClientError::Protocol(_)), "{error:?}");
            assert!(matches!(requests.open(), Err(ClientError::Protocol(_))));
            // It is closed, not kept half open.
            assert_eq!(daemon.read(&mut [0; 1]).await.unwrap_or(0), 0);
        }
    }

    #[tokio::test]
    async fn what_was_queued_is_sent_before_the_socket_closes() {
        let (_requests, mut daemon, queue) = served();
        for _ in 0..3 {
            queue
                .send(Queued {
                    frame: vec![7; 100_000],
                    _room: None,
                })
                .unwrap();
        }
        drop(queue);
        let mut received = Vec::new();
        daemon.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, vec![7; 300_000]);
    }
}
