//! Another process's descriptors taken over, and what is done with its sockets: each exactly one call on bytes that were read before.
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use super::check;

/// From Linux 6.9 on: a descriptor of one thread rather than of its process. Threads usually share descriptors, but need not.
const PIDFD_THREAD: u32 = libc::O_EXCL.cast_unsigned();

/// A copy of descriptor `fd` of the thread; `process` is the process that the thread belongs to.
pub(crate) fn take_descriptor(thread: i32, process: i32, fd: RawFd) -> io::Result<OwnedFd> {
    let target = match open_process(thread, PIDFD_THREAD) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => open_process(process, 0)?,
        other => other?,
    };
    take(target.as_fd(), fd)
}

fn open_process(pid: i32, flags: u32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

fn take(process: BorrowedFd<'_>, fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0u32) })?;
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Whether descriptors of other processes can be taken over here at all: kernels before 5.6 and some containers' filters have no such call.
pub(crate) fn can_take_descriptors() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        open_process(own, 0)
            .and_then(|process| take(process.as_fd(), process.as_raw_fd()))
            .is_ok()
    })
}

/// Connects `socket` to an address in the kernel's form.
pub(crate) fn connect(socket: BorrowedFd<'_>, address: &[u8]) -> io::Result<()> {
    // SAFETY: the kernel reads exactly `address`.
    let result = unsafe {
        libc::connect(
            socket.as_raw_fd(),
            address.as_ptr().cast(),
            address.len() as libc::socklen_t,
        )
    };
    check(libc::c_long::from(result)).map(|_| ())
}

/// Sends `data` with control messages, to `address` when there is one. Never raises SIGPIPE.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    address: Option<&[u8]>,
    data: &[u8],
    control: &[u8],
    flags: i32,
) -> io::Result<usize> {
    let mut part = libc::iovec {
        iov_base: data.as_ptr().cast_mut().cast(),
        iov_len: data.len(),
    };
    // SAFETY: all-zero is a message without content.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    if let Some(address) = address {
        message.msg_name = address.as_ptr().cast_mut().cast();
        message.msg_namelen = address.len() as libc::socklen_t;
    }
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if !control.is_empty() {
        message.msg_control = control.as_ptr().cast_mut().cast();
        message.msg_controllen = control.len() as _;
    }
    // SAFETY: every pointer above refers to a slice of the length that is given with it, and the kernel only reads them.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags | libc::MSG_NOSIGNAL) };
    check(sent as libc::c_long).map(|sent| sent as usize)
}

/// Writes to the memory of another process.
pub(crate) fn write_memory(pid: i32, address: u64, bytes: &[u8]) -> io::Result<()> {
    let local = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let remote = libc::iovec {
        iov_base: address as *mut libc::c_void,
        iov_len: bytes.len(),
    };
    // SAFETY: `local` is only read; the kernel checks the remote address.
    let written = unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
    check(written as libc::c_long).map(|_| ())
}
