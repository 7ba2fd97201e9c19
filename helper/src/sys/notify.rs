//! The seccomp notification listener: receive a parked call, answer it, ask whether it still waits.
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::check;

/// A call that waits for an answer.
pub(crate) type Notification = libc::seccomp_notif;

/// What a parked call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The kernel goes on with the call as if nothing had been. Only where another layer enforces the same rule.
    Continue,
    /// The call fails with this error and does not happen.
    Fail(i32),
    /// The call returns this value and does not happen: the supervisor has done it.
    Value(i64),
    /// A descriptor has been put into the process and its number returned; nothing is left to say.
    Delivered,
    /// The call may block: a thread of its own does it and answers then.
    Later,
}

/// The supervisor's end of a filter.
#[derive(Debug)]
pub(crate) struct Listener {
    fd: OwnedFd,
}

impl Listener {
    /// Takes the descriptor and asks the kernel for synchronous wake-ups (from 6.6; without them an idle machine answers three times slower).
    pub(crate) fn new(fd: OwnedFd) -> Self {
        const SYNC_WAKE_UP: u64 = 1;
        // SAFETY: the argument is a number; an older kernel refuses it, which costs only speed.
        unsafe { libc::ioctl(fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS as _, SYNC_WAKE_UP) };
        Self { fd }
    }

    /// The same listener, for a thread that answers one call when it is done.
    pub(crate) fn share(&self) -> io::Result<Self> {
        Ok(Self {
            fd: self.fd.try_clone()?,
        })
    }

    /// The next parked call. [`io::ErrorKind::NotFound`] means that its process has died meanwhile.
    pub(crate) fn receive(&self) -> io::Result<Notification> {
        // SAFETY: all-zero is a valid notification, and the kernel insists on it.
        let mut notification: Notification = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes exactly this structure.
        let result = unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_RECV as _,
                &raw mut notification,
            )
        };
        check(libc::c_long::from(result))?;
        Ok(notification)
    }

    /// Answers a parked call. A process that has died meanwhile is no error.
    pub(crate) fn answer(&self, id: u64, answer: Answer) {
        let (val, error, flags) = match answer {
            Answer::Continue => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
            Answer::Fail(errno) => (0, -errno, 0),
            Answer::Value(value) => (value, 0, 0),
            Answer::Delivered | Answer::Later => return,
        };
        let response = libc::seccomp_notif_resp { id, val, error, flags };
        // SAFETY: the kernel reads exactly this structure. The only failure is ENOENT: the caller is gone.
        unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_SEND as _,
                &raw const response,
            )
        };
    }

    /// Whether the call still waits, so that its process is still the one whose memory was read.
    pub(crate) fn is_waiting(&self, id: u64) -> bool {
        // SAFETY: the kernel reads one number.
        unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_ID_VALID as _,
                &raw const id,
            ) == 0
        }
    }

    /// Puts a copy of `source` into the waiting process as the result of its call.
    pub(crate) fn deliver(&self, id: u64, source: BorrowedFd<'_>, close_on_exec: bool) -> io::Result<()> {
        const SEND: u32 = 2;
        let request = libc::seccomp_notif_addfd {
            id,
            flags: SEND,
            srcfd: source.as_raw_fd().cast_unsigned(),
            newfd: 0,
            newfd_flags: if close_on_exec {
                libc::O_CLOEXEC.cast_unsigned()
            } else {
                0
            },
        };
        // SAFETY: the kernel reads exactly this structure.
        let result = unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_ADDFD as _,
                &raw const request,
            )
        };
        check(libc::c_long::from(result)).map(|_| ())
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
