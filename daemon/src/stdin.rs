//! A command's standard input: nothing, given bytes, or what the client sends while the command runs.
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use dsh_policy::ByteString;
use dsh_policy::request::BashExecRequest;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::pipe::Sender;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinHandle;

/// One piece of input; the permit keeps its room in the request's queue until it is written.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) data: ByteString,
    pub(crate) _room: OwnedSemaphorePermit,
}

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
    pieces: Option<mpsc::Receiver<Piece>>,
) -> io::Result<(OwnedFd, Feeder)> {
    let given = request.stdin.take();
    if given.is_none() && pieces.is_none() {
        return Ok((File::open("/dev/null")?.into(), Feeder::default()));
    }
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    let writer = Sender::from_owned_fd(writer)?;
    Ok((reader, Feeder(Some(tokio::spawn(feed(writer, given, pieces))))))
}

/// An error means that the command does not read any more, which is its right.
async fn feed(mut writer: Sender, given: Option<ByteString>, pieces: Option<mpsc::Receiver<Piece>>) {
    if let Some(given) = given
        && writer.write_all(given.as_bytes()).await.is_err()
    {
        return;
    }
    let Some(mut pieces) = pieces else { return };
    while let Some(piece) = pieces.recv().await {
        if writer.write_all(piece.data.as_bytes()).await.is_err() {
            return;
        }
    }
}
