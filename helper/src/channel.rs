//! The control socket: the helper's fd 0, frames of `policy::plan` in both directions, and the three descriptors that come with the plan.
//!
//! The daemon may be slow to read, so nothing is written directly: messages queue here and leave when the socket takes them.
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use dsh_policy::codec::{self, CodecError};
use dsh_policy::frame::{self, Decoder, FRAME_LIMIT};
use dsh_policy::plan::{FromHelper, ToHelper};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg,
};

/// Why the channel cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChannelError {
    /// The daemon closed its end.
    #[error("the daemon is gone")]
    Closed,
    /// The kernel's error.
    #[error("control socket: {0}")]
    Socket(#[from] Errno),
    /// The bytes are no message.
    #[error("control socket: {0}")]
    Codec(#[from] CodecError),
    /// The first message must be a plan and bring exactly three descriptors.
    #[error("expected a plan with three descriptors")]
    NoPlan,
}

/// The helper's end.
pub(crate) struct Channel<'a> {
    socket: BorrowedFd<'a>,
    decoder: Decoder,
    queue: VecDeque<u8>,
}

impl Channel<'static> {
    /// The socket at fd 0; none when fd 0 is something else.
    pub(crate) fn open() -> Option<Self> {
        let socket = rustix::stdio::stdin();
        let stat = rustix::fs::fstat(socket).ok()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
            return None;
        }
        Some(Self::on(socket))
    }
}

impl<'a> Channel<'a> {
    /// A channel on another socket, for the probe.
    pub(crate) fn on(socket: BorrowedFd<'a>) -> Self {
        Self {
            socket,
            decoder: Decoder::new(FRAME_LIMIT),
            queue: VecDeque::new(),
        }
    }

    /// Whether something has arrived already.
    pub(crate) fn is_readable(&self) -> bool {
        let now = rustix::event::Timespec::default();
        let mut fds = [PollFd::from_borrowed_fd(self.socket, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Waits for the first message, which carries the command's streams.
    pub(crate) fn receive_plan(&mut self) -> Result<(ToHelper, [OwnedFd; 3]), ChannelError> {
        let mut fds = Vec::with_capacity(3);
        let message = loop {
            self.fill(&mut fds, RecvFlags::empty())?;
            if let Some(message) = self.next()? {
                break message;
            }
        };
        let fds = <[OwnedFd; 3]>::try_from(fds).map_err(|_| ChannelError::NoPlan)?;
        Ok((message, fds))
    }

    /// Whatever has arrived, without waiting.
    pub(crate) fn receive(&mut self) -> Result<Vec<ToHelper>, ChannelError> {
        let mut unexpected = Vec::new();
        match self.fill(&mut unexpected, RecvFlags::DONTWAIT) {
            Ok(()) | Err(ChannelError::Socket(Errno::AGAIN | Errno::INTR)) => {}
            Err(error) => return Err(error),
        }
        let mut messages = Vec::new();
        while let Some(message) = self.next()? {
            messages.push(message);
        }
        Ok(messages)
    }

    fn next(&mut self) -> Result<Option<ToHelper>, ChannelError> {
        Ok(self
            .decoder
            .next_payload()?
            .map(|payload| codec::from_binary(&payload))
            .transpose()?)
    }

    fn fill(&mut self, fds: &mut Vec<OwnedFd>, flags: RecvFlags) -> Result<(), ChannelError> {
        let mut buffer = [0u8; 16 * 1024];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            match recvmsg(self.socket, &mut parts, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) if flags.is_empty() => {}
                other => break other?.bytes,
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received == 0 {
            return Err(ChannelError::Closed);
        }
        self.decoder.push(&buffer[..received]);
        Ok(())
    }

    /// Queues a message and sends what the socket takes now.
    pub(crate) fn send(&mut self, message: &FromHelper) -> Result<(), ChannelError> {
        self.queue.extend(frame::encode(&codec::to_binary(message)?)?);
        self.flush()
    }

    /// Sends an event that the final report repeats: dropped when the daemon is behind.
    pub(crate) fn send_if_idle(&mut self, message: &FromHelper) -> Result<(), ChannelError> {
        if self.queue.is_empty() {
            self.send(message)
        } else {
            Ok(())
        }
    }

    /// Sends what the socket takes now.
    pub(crate) fn flush(&mut self) -> Result<(), ChannelError> {
        while !self.queue.is_empty() {
            let (bytes, _) = self.queue.as_slices();
            let mut none = SendAncillaryBuffer::default();
            match sendmsg(
                self.socket,
                &[IoSlice::new(bytes)],
                &mut none,
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            ) {
                Ok(sent) => drop(self.queue.drain(..sent)),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ChannelError::Closed),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Whether something waits for the socket to take it.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Sends everything, waiting for a slow daemon up to `limit`.
    pub(crate) fn finish(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.flush().is_ok() && self.has_unsent() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let timeout = rustix::event::Timespec::try_from(left).ok();
            let mut wait = [PollFd::from_borrowed_fd(self.socket, PollFlags::OUT)];
            if !matches!(
                rustix::event::poll(&mut wait, timeout.as_ref()),
                Ok(_) | Err(Errno::INTR)
            ) {
                return;
            }
        }
    }
}

impl AsFd for Channel<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket
    }
}
