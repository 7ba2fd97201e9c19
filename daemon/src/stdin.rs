//! A command's standard input: nothing, given bytes, or what the client sends while the command runs.
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use dsh_policy::ByteString;
use dsh_policy::request::BashExecRequest;
use dsh_policy::wire::{INPUT_WINDOW, ServerMessage};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::unix::pipe::Sender;
use tokio::task::JoinHandle;

use crate::output::Events;

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
    let task = tokio::spawn(feed(writer, given, input, events.clone()));
    Ok((reader, Feeder(Some(task))))
}

/// A command that does not read any more is within its rights: the rest is taken and dropped, so that nobody waits with it.
async fn feed(writer: Sender, given: Option<ByteString>, input: Option<DuplexStream>, events: Events) {
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
}

async fn write(writer: &mut Option<Sender>, data: &[u8]) {
    if let Some(open) = writer
        && open.write_all(data).await.is_err()
    {
        *writer = None;
    }
}
