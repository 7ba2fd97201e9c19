//! What a connection still has to send: one bounded queue, one writer. Answers wait for room; output of a reader that stands still is left out.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dsh_policy::wire::{Encoding, ServerMessage};
use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

/// Bytes that may wait for one reader.
const HIGH_WATER: usize = 512 * 1024;
/// Messages that may wait for one reader.
const QUEUE: usize = 512;
/// A reader that takes nothing for this long stands still: output is no longer offered to it, and its commands are no longer slowed.
const PATIENCE: Duration = Duration::from_secs(1);

/// The connection is closed: nobody will read an answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Closed;

/// The sending side, shared by all requests of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    queue: mpsc::Sender<Vec<u8>>,
    load: Arc<Load>,
    encoding: Encoding,
}

/// How much waits, and a signal for every frame that has gone.
#[derive(Debug, Default)]
struct Load {
    bytes: AtomicUsize,
    sent: Notify,
}

/// The receiving side: the connection's one writer.
#[derive(Debug)]
pub(crate) struct Writer {
    queue: mpsc::Receiver<Vec<u8>>,
    load: Arc<Load>,
}

/// A queue for one connection.
pub(crate) fn channel(encoding: Encoding) -> (Outbox, Writer) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let load = Arc::new(Load::default());
    (
        Outbox {
            queue: sender,
            load: Arc::clone(&load),
            encoding,
        },
        Writer { queue: receiver, load },
    )
}

impl Outbox {
    /// Whether nobody can read from it any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }

    /// Queues a message that must not be lost; waits for room.
    pub(crate) async fn send(&self, message: &ServerMessage) -> Result<(), Closed> {
        let frame = match self.encoding.frame(message) {
            Ok(frame) => frame,
            Err(error) => {
                tracing::error!(%error, "an answer could not be encoded");
                return Err(Closed);
            }
        };
        self.load.bytes.fetch_add(frame.len(), Ordering::Relaxed);
        self.queue.send(frame).await.map_err(|_| Closed)
    }

    /// Queues a message that may be left out. `standing_still` is what the caller knows about this reader from the last time.
    pub(crate) async fn offer(&self, message: &ServerMessage, standing_still: &mut bool) {
        let Ok(mut frame) = self.encoding.frame(message) else {
            return;
        };
        loop {
            // Asked for before looking, so that a frame sent in between is not missed.
            let sent = self.load.sent.notified();
            if self.load.bytes.load(Ordering::Relaxed) < HIGH_WATER {
                let length = frame.len();
                self.load.bytes.fetch_add(length, Ordering::Relaxed);
                match self.queue.try_send(frame) {
                    Ok(()) => {
                        *standing_still = false;
                        return;
                    }
                    Err(mpsc::error::TrySendError::Closed(_)) => return,
                    Err(mpsc::error::TrySendError::Full(back)) => frame = back,
                }
                self.load.bytes.fetch_sub(length, Ordering::Relaxed);
            }
            if *standing_still || self.queue.is_closed() || timeout(PATIENCE, sent).await.is_err() {
                *standing_still = true;
                return;
            }
        }
    }
}

impl Writer {
    /// Writes until every sender is gone or the peer is. Closing the queue wakes whoever waits for room.
    pub(crate) async fn run(mut self, mut half: OwnedWriteHalf) {
        while let Some(frame) = self.queue.recv().await {
            let written = half.write_all(&frame).await;
            self.load.bytes.fetch_sub(frame.len(), Ordering::Relaxed);
            self.load.sent.notify_waiters();
            if let Err(error) = written {
                tracing::debug!(%error, "the client does not read any more");
                break;
            }
        }
        self.queue.close();
        self.load.sent.notify_waiters();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dsh_policy::ByteString;
    use dsh_policy::wire::StreamName;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixStream;

    fn output(offset: u64) -> ServerMessage {
        ServerMessage::Output {
            id: 1,
            stream: StreamName::Stdout,
            offset,
            data: ByteString(vec![b'x'; 60_000]),
        }
    }

    #[tokio::test]
    async fn a_reader_that_stands_still_is_waited_for_once_and_then_left_out() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (outbox, writer) = channel(Encoding::Bincode);
        let writer = tokio::spawn(writer.run(ours.into_split().1));
        let mut standing_still = false;
        let mut offered = 0;
        while !standing_still {
            outbox.offer(&output(offered), &mut standing_still).await;
            offered += 60_000;
        }
        let begun = tokio::time::Instant::now();
        for _ in 0..100 {
            outbox.offer(&output(offered), &mut standing_still).await;
        }
        assert!(begun.elapsed() < PATIENCE, "it must not be waited for again");
        assert!(outbox.load.bytes.load(Ordering::Relaxed) < HIGH_WATER + 64 * 1024);
        // It reads again: everything that was queued comes, and new output is offered again.
        let mut buffer = vec![0; 1 << 20];
        let mut got = 0;
        while outbox.load.bytes.load(Ordering::Relaxed) > 0 {
            got += theirs.read(&mut buffer).await.unwrap();
        }
        outbox.offer(&output(offered), &mut standing_still).await;
        assert!(!standing_still && got > 0);
        drop(outbox);
        while theirs.read(&mut buffer).await.unwrap() > 0 {}
        writer.await.unwrap();
    }

    #[tokio::test]
    async fn when_the_peer_is_gone_answers_fail_and_nobody_waits() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (outbox, writer) = channel(Encoding::Json);
        drop(theirs);
        let writer = tokio::spawn(writer.run(ours.into_split().1));
        let mut standing_still = false;
        outbox.offer(&output(0), &mut standing_still).await;
        writer.await.unwrap();
        assert_eq!(outbox.send(&output(0)).await, Err(Closed));
    }
}
