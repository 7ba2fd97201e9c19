//! The system calls that no safe wrapper offers. All `unsafe` of the helper is in this folder, one file per concern.
//!
//! Everything here is thin: it turns Rust values into one call and the result into [`io::Result`]. Nothing here decides anything.
mod child;
mod loopback;
mod metadata;
mod mounts;
mod namespaces;
mod notify;
mod prepared;
mod region;
mod sockets;

use std::io;
use std::ptr;

pub(crate) use child::{ChildReport, Confine, Launch, Taken, spawn};
pub(crate) use metadata::{attribute_call, flags_ioctl, set_times};
pub(crate) use mounts::{Layout, Mount};
pub(crate) use namespaces::{Apart, Inside, Refused};
pub(crate) use notify::{Answer, Listener, Notification};
pub(crate) use prepared::{Orders, Preparation, PrepareError, PreparedChild};
pub(crate) use region::ROOM;
pub(crate) use sockets::{can_take_descriptors, connect, send, take_descriptor, write_memory};

/// Turns the `-1` of libc into an error.
fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Closes every descriptor from 3 up: none of them was given to the helper on purpose.
pub(crate) fn close_inherited_fds() -> io::Result<()> {
    // SAFETY: no Rust object owns a descriptor above 2 yet: this is called first in `main`, and std opens none before.
    check(unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32) }).map(|_| ())
}

/// Empties the environment; the command gets the plan's and nothing else.
pub(crate) fn clear_environment() {
    // SAFETY: the process has one thread, so nobody reads the environment meanwhile.
    unsafe { libc::clearenv() };
}

/// Puts every signal back to its default: what the daemon or its parents ignored must not be inherited by commands.
pub(crate) fn default_signals() {
    const SIGNALS: i32 = 64;
    /// The kernel's own form of a signal action; all zero is "the default".
    const DEFAULT: [u64; 4] = [0; 4];
    for signal in 1..=SIGNALS {
        // SAFETY: reads one structure of the kernel's size and installs no handler. The C library's wrapper would leave out two signals. Those that
        // cannot be changed (SIGKILL, SIGSTOP) give an error that does not matter.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                DEFAULT.as_ptr(),
                ptr::null_mut::<u8>(),
                8usize,
            )
        };
    }
}

/// The Landlock ABI of this kernel, 0 when there is none.
pub(crate) fn landlock_abi() -> u32 {
    const VERSION: u32 = 1;
    // SAFETY: with this flag the kernel reads no memory; it only returns a number.
    let abi = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0usize,
            VERSION,
        )
    };
    u32::try_from(abi).unwrap_or(0)
}

/// Reads the memory of another process, as much as is there.
pub(crate) fn read_memory(pid: i32, address: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let remote = libc::iovec {
        iov_base: address as *mut libc::c_void,
        iov_len: buffer.len(),
    };
    // SAFETY: `local` describes `buffer`, which outlives the call; the kernel checks the remote address.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    match usize::try_from(read) {
        Ok(read) => Ok(read),
        Err(_) => {
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                // An outer filter forbids the call (then the file may still do), or the process hides its memory (then it will not either).
                Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => read_memory_file(pid, address, buffer),
                _ => Err(error),
            }
        }
    }
}

fn read_memory_file(pid: i32, address: u64, buffer: &mut [u8]) -> io::Result<usize> {
    use std::os::unix::fs::FileExt as _;
    let memory =
        std::fs::File::open(format!("/proc/{pid}/mem")).map_err(|_| io::Error::from_raw_os_error(libc::EPERM))?;
    // What is not mapped gives EIO here.
    memory
        .read_at(buffer, address)
        .map_err(|_| io::Error::from_raw_os_error(libc::EFAULT))
}

/// Sends `signal` to `pid`; 0 only asks.
pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: takes numbers only.
    check(libc::c_long::from(unsafe { libc::kill(pid, signal) })).map(|_| ())
}

/// Waits until `pid` is a zombie or not, without reaping it: whether it has already ended.
pub(crate) fn has_exited(pid: i32) -> bool {
    // SAFETY: a zeroed siginfo_t is valid, and the kernel fills it in.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is a valid out-parameter; the other arguments are numbers.
    let result = unsafe { libc::waitid(libc::P_PID, pid.cast_unsigned(), &raw mut info, flags) };
    // SAFETY: after a successful WNOHANG call si_pid is 0 when nothing had ended.
    result != 0 || unsafe { info.si_pid() } != 0
}

/// A system call by number with three numbers, for the probe's attempts at what must be refused.
pub(crate) fn attempt(number: libc::c_long, arguments: [libc::c_long; 3]) -> io::Result<()> {
    let [first, second, third] = arguments;
    // SAFETY: the probe passes numbers and null pointers only.
    check(unsafe { libc::syscall(number, first, second, third) }).map(|_| ())
}
