//! A command's standard input: nothing, given bytes, or what the client sends while the command runs; through a pipe or typed into a terminal.
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use dsh_policy::ByteString;
use dsh_policy::request::BashExecRequest;
use dsh_policy::wire::{INPUT_WINDOW, ServerMessage};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::unix::pipe::Sender;
use tokio::task::JoinHandle;

use crate::output::Events;
use crate::terminal::{END_OF_FILE, Terminal};

/// Read at once.
const CHUNK: usize = 32 * 1024;
/// The client hears of what was taken in steps, so that it never waits for room that there is, and is not told of every byte.
const STEP: u64 = INPUT_WINDOW as u64 / 8;

/// Writes the input; stops when dropped.
#[derive(Debug, Default)]
pub(crate) struct Feeder(Option<JoinHandle<()>>);

impl Drop for Feeder {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}

/// The command's end of its standard input, and whoever writes to the other end.
pub(crate) fn open(
    request: &mut BashExecRequest,
    input: Option<DuplexStream>,
    events: &Events,
) -> io::Result<(OwnedFd, Feeder)> {
    let given = request.stdin.take();
    if given.is_none() && input.is_none() {
        return Ok((File::open("/dev/null")?.into(), Feeder::default()));
    }
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    let writer = Sender::from_owned_fd(writer)?;
    let task = tokio::spawn(feed(Writer::Pipe(writer), given, input, events.clone()));
    Ok((reader, Feeder(Some(task))))
}

/// Types what the client sends, then the end of the file; that at once when the client will send nothing.
pub(crate) fn type_into(terminal: Arc<Terminal>, input: Option<DuplexStream>, events: &Events) -> Feeder {
    let writer = Writer::Terminal {
        terminal,
        mid_line: false,
    };
    // An input without a sender is at its end.
    let input = input.unwrap_or_else(|| tokio::io::duplex(1).1);
    Feeder(Some(tokio::spawn(feed(writer, None, Some(input), events.clone()))))
}

/// Where input goes.
enum Writer {
    Pipe(Sender),
    Terminal {
        terminal: Arc<Terminal>,
        /// The last byte did not end a line.
        mid_line: bool,
    },
}

impl Writer {
    async fn write_all(&mut self, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Pipe(pipe) => pipe.write_all(data).await,
            Self::Terminal { terminal, mid_line } => {
                terminal.write_all(data).await?;
                *mid_line = data.last().map_or(*mid_line, |last| !matches!(last, b'\n' | b'\r'));
                Ok(())
            }
        }
    }

    /// A pipe is closed. A terminal stays; within a line the first end of file only hands over the line, as for a user.
    async fn end(self) {
        if let Self::Terminal { terminal, mid_line } = self {
            let end: &[u8] = if mid_line {
                &[END_OF_FILE, END_OF_FILE]
            } else {
                &[END_OF_FILE]
            };
            // The other end is gone: then nobody reads.
            let _ = terminal.write_all(end).await;
        }
    }
}

/// A command that does not read any more is within its rights: the rest is taken and dropped, so that nobody waits with it.
async fn feed(writer: Writer, given: Option<ByteString>, input: Option<DuplexStream>, events: Events) {
    let mut writer = Some(writer);
    if let Some(given) = given {
        write(&mut writer, given.as_bytes()).await;
    }
    let Some(mut input) = input else { return };
    let mut chunk = vec![0; CHUNK];
    let (mut taken, mut told) = (0, 0);
    while let Ok(count @ 1..) = input.read(&mut chunk).await {
        write(&mut writer, &chunk[..count]).await;
        taken += count as u64;
        if taken - told >= STEP {
            told = taken;
            let message = ServerMessage::InputTaken {
                id: events.id,
                bytes: taken,
            };
            events.send(&message).await;
        }
    }
    if let Some(writer) = writer {
        writer.end().await;
    }
}

async fn write(writer: &mut Option<Writer>, data: &[u8]) {
    if let Some(open) = writer
        && open.write_all(data).await.is_err()
    {
        *writer = None;
    }
}
