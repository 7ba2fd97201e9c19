//! Metadata calls in the exact form the kernel takes them, on objects that the supervisor has pinned.
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use super::check;

/// Sets access and modification time of a pinned object; none means now.
pub(crate) fn set_times(object: BorrowedFd<'_>, times: Option<[libc::timespec; 2]>) -> io::Result<()> {
    let times = times.as_ref().map_or(ptr::null(), |times| times.as_ptr());
    // SAFETY: `times` is null or points to two timespecs; the empty path with AT_EMPTY_PATH names the descriptor itself.
    let result = unsafe {
        libc::syscall(
            libc::SYS_utimensat,
            object.as_raw_fd(),
            c"".as_ptr(),
            times,
            libc::AT_EMPTY_PATH,
        )
    };
    check(result).map(|_| ())
}

/// An `ioctl` that sets inode flags from a buffer.
pub(crate) fn flags_ioctl(file: BorrowedFd<'_>, command: u32, argument: &mut [u8; 32]) -> io::Result<()> {
    // SAFETY: every command that reaches this reads at most 28 bytes from the argument.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), command as _, argument.as_mut_ptr()) };
    check(libc::c_long::from(result)).map(|_| ())
}

/// `setxattrat`, `removexattrat` and `file_setattr` in their own form, on a path of the supervisor's that leads to the pinned object.
pub(crate) fn attribute_call(number: i64, path: &CStr, argument: &mut [u8], flags: u64) -> io::Result<()> {
    // SAFETY: the kernel reads at most `argument.len()` bytes, which it is told; path is a C string.
    let result = unsafe {
        libc::syscall(
            number,
            libc::AT_FDCWD,
            path.as_ptr(),
            argument.as_mut_ptr(),
            argument.len(),
            flags,
        )
    };
    check(result).map(|_| ())
}
