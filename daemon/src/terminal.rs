//! A command's terminal: a pseudo-terminal pair whose one end the command gets as its three streams; here is the other.
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use dsh_policy::ByteString;
use dsh_policy::request::TerminalSize;
use rustix::io::Errno;
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::unix::AsyncFd;

use crate::scratch;

/// What a user types for "no more input" (Ctrl-D).
pub(crate) const END_OF_FILE: u8 = 4;

/// The daemon's end.
#[derive(Debug)]
pub(crate) struct Terminal(AsyncFd<OwnedFd>);

/// The command's end, and its name in the file system.
pub(crate) struct CommandEnd {
    pub(crate) fd: OwnedFd,
    pub(crate) name: ByteString,
}

impl Terminal {
    /// Makes a pair of this size. It never becomes the daemon's own terminal, and the command's end is reached by descriptor, not by name.
    pub(crate) fn open(size: TerminalSize) -> io::Result<(Self, CommandEnd)> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags)?;
        grantpt(&ours)?;
        unlockpt(&ours)?;
        let fd = ioctl_tiocgptpeer(&ours, flags)?;
        let name = ByteString(ptsname(&ours, Vec::new())?.into_bytes());
        rustix::io::ioctl_fionbio(&ours, true)?;
        // Deprecated because of types that name a descriptor they do not own; this one owns it.
        #[allow(deprecated)]
        let terminal = Self(AsyncFd::new(ours)?);
        terminal.resize(size)?;
        Ok((terminal, CommandEnd { fd, name }))
    }

    /// Sets the size; the kernel sends SIGWINCH to the group in the foreground when it is another one.
    pub(crate) fn resize(&self, size: TerminalSize) -> io::Result<()> {
        let size = Winsize {
            ws_row: size.rows,
            ws_col: size.cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        Ok(tcsetwinsize(self.0.get_ref().as_fd(), size)?)
    }

    /// What was written to it; empty when nobody has the other end any more (the kernel calls that an input/output error).
    pub(crate) async fn read(&self) -> io::Result<Vec<u8>> {
        loop {
            let mut ready = self.0.readable().await?;
            let read = ready.try_io(|ours| {
                scratch::read(|buffer| match rustix::io::read(ours.get_ref(), buffer) {
                    Err(Errno::IO) => Ok(0),
                    other => Ok(other?),
                })
            });
            match read {
                Err(_) => {}
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(read) => return read,
            }
        }
    }

    /// Types `data`; waits while the command does not read.
    pub(crate) async fn write_all(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let mut ready = self.0.writable().await?;
            match ready.try_io(|ours| Ok(rustix::io::write(ours.get_ref(), data)?)) {
                Err(_) => {}
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(count) => data = &data[count?..],
            }
        }
        Ok(())
    }
}
