//! What a background task has written, kept in memory for any number of readers, each with a cursor of its own.
use std::path::PathBuf;
use std::sync::Mutex;

use dsh_policy::ByteString;
use dsh_policy::task::Cursor;
use dsh_policy::wire::{ServerMessage, StreamName};
use tokio::sync::watch;

use crate::helper::lock;

/// Bytes of one stream that stay in memory. The spill file has the whole of a longer one.
pub(crate) const KEPT: usize = 256 * 1024;

/// The newest bytes of a stream.
#[derive(Debug, Default)]
struct Kept {
    /// Position of the first byte that is kept.
    start: u64,
    bytes: Vec<u8>,
}

impl Kept {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    fn push(&mut self, offset: u64, data: &[u8]) {
        if offset > self.end() {
            self.bytes.clear();
            self.start = offset;
        }
        self.bytes.extend_from_slice(data);
        // Dropped half at a time, so that a byte is moved once on average.
        if self.bytes.len() > 2 * KEPT {
            let gone = self.bytes.len() - KEPT;
            self.bytes.drain(..gone);
            self.start += gone as u64;
        }
    }

    /// Forgets what is kept, not where the stream ends.
    fn clear(&mut self) {
        self.start = self.end();
        self.bytes = Vec::new();
    }

    /// From `cursor` on, and whether something before it is gone.
    fn since(&self, cursor: u64) -> (Vec<u8>, bool) {
        let from = cursor.clamp(self.start, self.end());
        let skipped = usize::try_from(from - self.start).unwrap_or(0);
        (self.bytes[skipped..].to_vec(), cursor < self.start)
    }
}

/// Both streams of a task.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    streams: Mutex<[Kept; 2]>,
    /// The growing files of the streams, once they have any.
    files: Mutex<[Option<PathBuf>; 2]>,
    /// Changes with everything that comes.
    news: watch::Sender<u64>,
}

/// What one read gives.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Delta {
    pub(crate) stdout: ByteString,
    pub(crate) stderr: ByteString,
    pub(crate) next: Cursor,
    pub(crate) lossy: bool,
}

impl Feed {
    /// Keeps what a command writes; everything else a task is asked for.
    pub(crate) fn take(&self, message: &ServerMessage) {
        let ServerMessage::Output {
            stream, offset, data, ..
        } = message
        else {
            return;
        };
        lock(&self.streams)[index(*stream)].push(*offset, data.as_bytes());
        self.wake();
    }

    /// Keeps what is new of `data`, which begins at `start` and may be known in part.
    pub(crate) fn fill(&self, stream: StreamName, start: u64, data: &[u8]) {
        let mut streams = lock(&self.streams);
        let kept = &mut streams[index(stream)];
        let known = usize::try_from(kept.end().saturating_sub(start)).unwrap_or(usize::MAX);
        if let Some(fresh) = data.get(known..).filter(|fresh| !fresh.is_empty()) {
            kept.push(start.max(kept.end()), fresh);
            drop(streams);
            self.wake();
        }
    }

    /// How much there is.
    pub(crate) fn end(&self) -> Cursor {
        let streams = lock(&self.streams);
        Cursor {
            stdout: streams[0].end(),
            stderr: streams[1].end(),
        }
    }

    /// Where the whole of a stream is while it grows; none when there is no such place any more.
    pub(crate) fn set_file(&self, stream: StreamName, file: Option<PathBuf>) {
        lock(&self.files)[index(stream)] = file;
    }

    /// The growing files that there are.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        lock(&self.files).iter().flatten().cloned().collect()
    }

    /// Bytes in memory.
    pub(crate) fn size(&self) -> usize {
        lock(&self.streams).iter().map(|stream| stream.bytes.capacity()).sum()
    }

    /// Lets the memory go; a reader that has not read it hears that it missed something.
    pub(crate) fn clear(&self) {
        lock(&self.streams).iter_mut().for_each(Kept::clear);
    }

    /// Something has changed that readers wait for.
    pub(crate) fn wake(&self) {
        self.news.send_modify(|count| *count += 1);
    }

    /// Hears of everything from now on.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// What was written since `cursor`.
    pub(crate) fn since(&self, cursor: Cursor) -> Delta {
        let streams = lock(&self.streams);
        let (stdout, stdout_lost) = streams[0].since(cursor.stdout);
        let (stderr, stderr_lost) = streams[1].since(cursor.stderr);
        Delta {
            stdout: ByteString(stdout),
            stderr: ByteString(stderr),
            next: Cursor {
                stdout: streams[0].end(),
                stderr: streams[1].end(),
            },
            lossy: stdout_lost || stderr_lost,
        }
    }
}

fn index(stream: StreamName) -> usize {
    usize::from(stream == StreamName::Stderr)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(offset: u64, data: &[u8]) -> ServerMessage {
        ServerMessage::Output {
            id: 1,
            stream: StreamName::Stdout,
            offset,
            data: data.into(),
        }
    }

    #[test]
    fn each_reader_gets_every_byte_once() {
        let feed = Feed::default();
        feed.take(&output(0, b"one"));
        let first = feed.since(Cursor::default());
        assert_eq!((first.stdout.0.as_slice(), first.lossy), (&b"one"[..], false));
        feed.take(&output(3, b"two"));
        assert_eq!(feed.since(first.next).stdout.0, b"two");
        assert_eq!(feed.since(Cursor::default()).stdout.0, b"onetwo");
        assert_eq!(feed.since(feed.since(first.next).next).stdout.0, b"");
    }

    #[test]
    fn memory_is_bounded_and_a_reader_hears_of_what_it_missed() {
        let feed = Feed::default();
        let chunk = vec![b'x'; 64 * 1024];
        for n in 0..100 {
            feed.take(&output(n * chunk.len() as u64, &chunk));
        }
        let late = feed.since(Cursor::default());
        assert!(late.lossy && late.stdout.0.len() >= KEPT && late.stdout.0.len() <= 2 * KEPT);
        assert_eq!(late.next.stdout, 100 * chunk.len() as u64);
        let ahead = feed.since(Cursor {
            stdout: u64::MAX,
            stderr: 0,
        });
        assert_eq!((ahead.stdout.0.len(), ahead.lossy), (0, false));
    }
}
