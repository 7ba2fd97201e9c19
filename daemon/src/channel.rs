//! The daemon's end of the socket to one helper: frames of the private plan protocol, and the one message that carries descriptors.
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dsh_policy::codec::{self, CodecError};
use dsh_policy::frame::{self, Decoder, FRAME_LIMIT};
use dsh_policy::plan::{FromHelper, Plan, ToHelper};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Why the channel to a helper is of no use any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChannelError {
    /// The socket failed.
    #[error("the channel to the helper failed: {0}")]
    Io(#[from] io::Error),
    /// A message could not be made or read.
    #[error("the helper sent something unintelligible: {0}")]
    Codec(#[from] CodecError),
}

/// One connected helper.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: UnixStream,
    decoder: Decoder,
}

impl Channel {
    /// A fresh channel, and the other end for the helper's fd 0.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok((
            Self {
                stream: UnixStream::from_std(ours)?,
                decoder: Decoder::new(FRAME_LIMIT),
            },
            theirs.into(),
        ))
    }

    /// Sends the plan; the three standard streams of the command travel with its first byte.
    pub(crate) async fn send_plan(&self, plan: Plan, streams: [BorrowedFd<'_>; 3]) -> Result<(), ChannelError> {
        let frame = frame::encode(&codec::to_binary(&ToHelper::Run(Box::new(plan)))?)?;
        let mut sent = self
            .stream
            .async_io(Interest::WRITABLE, || self.send_with_streams(&frame, &streams))
            .await?;
        while sent < frame.len() {
            sent += self
                .stream
                .async_io(Interest::WRITABLE, || {
                    Ok(rustix::net::send(
                        self.stream.as_fd(),
                        &frame[sent..],
                        SendFlags::NOSIGNAL,
                    )?)
                })
                .await?;
        }
        Ok(())
    }

    fn send_with_streams(&self, frame: &[u8], streams: &[BorrowedFd<'_>; 3]) -> io::Result<usize> {
        let mut space = [const { MaybeUninit::uninit() }; rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(streams)) {
            return Err(io::Error::other("no room for three descriptors"));
        }
        Ok(sendmsg(
            self.stream.as_fd(),
            &[IoSlice::new(frame)],
            &mut control,
            SendFlags::NOSIGNAL,
        )?)
    }

    /// Sends a message of a few bytes without waiting: a helper that does not read is treated as stuck, not waited for.
    pub(crate) fn send_now(&self, message: &ToHelper) -> Result<(), ChannelError> {
        let frame = frame::encode(&codec::to_binary(message)?)?;
        let sent = rustix::net::send(self.stream.as_fd(), &frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
            .map_err(io::Error::from)?;
        if sent == frame.len() {
            Ok(())
        } else {
            Err(io::Error::from(io::ErrorKind::WriteZero).into())
        }
    }

    /// The next message; none when the helper has closed its end. Can be dropped at any await without losing bytes.
    pub(crate) async fn receive(&mut self) -> Result<Option<FromHelper>, ChannelError> {
        loop {
            if let Some(payload) = self.decoder.next_payload()? {
                return Ok(Some(codec::from_binary(&payload)?));
            }
            self.stream.readable().await?;
            let mut buffer = [0; 4096];
            match self.stream.try_read(&mut buffer) {
                Ok(0) => return Ok(None),
                Ok(count) => self.decoder.push(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
