//! Collection of one output stream: kept tail, events to the client, spill file. Memory is bounded whatever the command prints.
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dsh_policy::ByteString;
use dsh_policy::result::StreamResult;
use dsh_policy::wire::{ServerMessage, StreamName};
use tokio::net::unix::pipe::Receiver;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use crate::feed::Feed;
use crate::outbox::Outbox;
use crate::scratch;
use crate::spill::Spill;
use crate::tail::Tail;
use crate::terminal::Terminal;

/// Where a stream comes from.
#[derive(Debug)]
pub(crate) enum Source {
    /// A stream of its own.
    Pipe(Receiver),
    /// All that a command writes to its terminal.
    Terminal(Arc<Terminal>),
}

impl Source {
    /// The next bytes; none at the end. Loses nothing when it is dropped while it waits.
    async fn read(&self) -> io::Result<Vec<u8>> {
        match self {
            Self::Terminal(terminal) => terminal.read().await,
            Self::Pipe(pipe) => loop {
                pipe.readable().await?;
                match scratch::read(|buffer| pipe.try_read(buffer)) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    read => return read,
                }
            },
        }
    }
}

/// Where events of one request go.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    /// Where they go.
    pub(crate) sink: Sink,
    /// The request.
    pub(crate) id: u64,
    /// Whether output is wanted as it comes.
    pub(crate) stream: bool,
}

/// Who hears of a command while it runs.
#[derive(Clone, Debug)]
pub(crate) enum Sink {
    /// The client that waits for it.
    Client(Outbox),
    /// Nobody now: what a background task writes is kept for whoever reads it.
    Task(Arc<Feed>),
}

impl Events {
    /// Tells something that must not be lost; waits for a slow client.
    pub(crate) async fn send(&self, message: &ServerMessage) {
        match &self.sink {
            // A client that is gone ends its requests by itself.
            Sink::Client(outbox) => drop(outbox.send(message).await),
            Sink::Task(feed) => feed.take(message),
        }
    }

    /// Readers who miss something find the whole stream in `file`.
    fn growing(&self, stream: StreamName, file: Option<&Path>) {
        if let Sink::Task(feed) = &self.sink {
            feed.set_file(stream, file.map(Path::to_owned));
        }
    }

    /// Tells something that a reader who stands still may miss.
    pub(crate) async fn offer(&self, message: &ServerMessage, standing_still: &mut bool) {
        match &self.sink {
            Sink::Client(outbox) => outbox.offer(message, standing_still).await,
            Sink::Task(feed) => feed.take(message),
        }
    }
}

/// Bounds of one stream.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Bytes kept.
    pub(crate) kept: u64,
    /// Largest spill file.
    pub(crate) spill: u64,
    /// Where spill files are.
    pub(crate) folder: Arc<Path>,
    /// Whether the first byte goes to a file already: for output that must survive this process.
    pub(crate) eager: bool,
}

/// One stream being collected.
#[derive(Debug)]
pub(crate) struct Collector {
    name: StreamName,
    tail: Tail,
    limits: Limits,
    spill: SpillState,
    events: Events,
    standing_still: bool,
}

#[derive(Debug)]
enum SpillState {
    /// Everything is in the tail.
    NotNeeded,
    Writing(Spill),
    /// Over the cap, or the disk failed: no path is offered.
    Withheld,
}

impl Collector {
    pub(crate) fn new(name: StreamName, limits: Limits, events: Events) -> Self {
        let kept = usize::try_from(limits.kept).unwrap_or(usize::MAX / 2);
        Self {
            name,
            tail: Tail::new(kept),
            limits,
            spill: SpillState::NotNeeded,
            events,
            standing_still: false,
        }
    }

    /// Reads until end of file, or until `stop` says that it has lasted long enough.
    pub(crate) async fn collect(mut self, source: Source, mut stop: oneshot::Receiver<()>) -> StreamResult {
        loop {
            let read = tokio::select! {
                biased;
                read = source.read() => read,
                _ = &mut stop => break,
            };
            match read {
                Ok(chunk) if chunk.is_empty() => break,
                Ok(chunk) => self.take(chunk).await,
                Err(error) => {
                    tracing::warn!(%error, stream = %self.name, "an output stream could not be read");
                    break;
                }
            }
        }
        drop(source);
        self.finish().await
    }

    async fn take(&mut self, chunk: Vec<u8>) {
        let offset = self.tail.total();
        let chunk = self.store(chunk).await;
        if self.events.stream {
            let output = ServerMessage::Output {
                id: self.events.id,
                stream: self.name,
                offset,
                data: ByteString(chunk),
            };
            self.events.offer(&output, &mut self.standing_still).await;
        }
    }

    /// Keeps the chunk in the tail, and in the spill file once the tail is not enough.
    async fn store(&mut self, chunk: Vec<u8>) -> Vec<u8> {
        let overflows = self.limits.eager || self.tail.total() + chunk.len() as u64 > self.limits.kept;
        let before = if overflows && matches!(self.spill, SpillState::NotNeeded) {
            self.tail.whole()
        } else {
            None
        };
        self.tail.push(&chunk);
        let writing = match std::mem::replace(&mut self.spill, SpillState::Withheld) {
            SpillState::NotNeeded if !overflows => {
                self.spill = SpillState::NotNeeded;
                return chunk;
            }
            SpillState::Withheld => return chunk,
            SpillState::NotNeeded => None,
            SpillState::Writing(spill) => Some(spill),
        };
        let (folder, name, cap) = (Arc::clone(&self.limits.folder), self.name, self.limits.spill);
        // The disk may be slow or hang: that is this stream's affair alone.
        let appended = spawn_blocking(move || {
            let spill = match writing {
                Some(spill) => append(spill, &chunk),
                None => Spill::create(&folder, name, cap).and_then(|spill| {
                    match append(spill, &before.unwrap_or_default())? {
                        Some(spill) => append(spill, &chunk),
                        None => Ok(None),
                    }
                }),
            };
            (spill, chunk)
        })
        .await;
        let Ok((spill, chunk)) = appended else {
            return Vec::new();
        };
        match spill {
            Ok(Some(spill)) => {
                self.events.growing(self.name, Some(spill.path()));
                self.spill = SpillState::Writing(spill);
            }
            Ok(None) => self.events.growing(self.name, None),
            Err(error) => {
                self.events.growing(self.name, None);
                tracing::warn!(%error, stream = %self.name, "no spill file: the rest of the stream is only counted");
            }
        }
        chunk
    }

    async fn finish(self) -> StreamResult {
        let spill_path = match self.spill {
            // The result has it all.
            SpillState::Writing(_) if !self.tail.is_truncated() => None,
            SpillState::Writing(spill) => spawn_blocking(move || spill.finish()).await.ok().and_then(|finished| {
                finished
                    .inspect_err(|error| tracing::warn!(%error, "a spill file could not be named"))
                    .ok()
            }),
            SpillState::NotNeeded | SpillState::Withheld => None,
        };
        let (bytes, truncated) = (self.tail.total(), self.tail.is_truncated());
        let view = self.tail.view();
        StreamResult {
            text: view.text,
            truncated,
            bytes,
            spill_path: spill_path.map(|path: PathBuf| ByteString::from(path)),
            raw: view.raw,
        }
    }
}

/// Appends, or removes the file when it cannot be complete any more.
fn append(mut spill: Spill, bytes: &[u8]) -> io::Result<Option<Spill>> {
    match spill.append(bytes) {
        Ok(true) => Ok(Some(spill)),
        Ok(false) => {
            spill.discard();
            Ok(None)
        }
        Err(error) => {
            spill.discard();
            Err(error)
        }
    }
}
