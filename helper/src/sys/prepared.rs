//! A child that is forked, without powers and filtered before there is a command for it. What belongs to the command (streams, folder, Landlock, program)
//! comes later: through memory that both share, and as descriptors. A filter is the dearest part of a set-up, and a waiting helper has the time.
//!
//! The order differs from that of a child that is forked for its command in one thing: Landlock follows the filter. Both only take away, and
//! `no_new_privs`, which both need, is on before either.
use std::ffi::{CStr, CString, c_char};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::child::{self, DROP_CAPABILITIES, LANDLOCK, SELF_CHECK, SESSION, WORKDIR};
use super::mounts::Layout;
use super::namespaces::{Apart, Inside, Refused, fork_apart};
use super::region::Region;

/// What a prepared child is told to become.
pub(crate) struct Orders<'a> {
    /// Executable.
    pub(crate) shell: &'a CStr,
    /// Its arguments, its own name first.
    pub(crate) arguments: &'a [CString],
    /// `NAME=value`.
    pub(crate) environment: &'a [CString],
    /// Entered before Landlock.
    pub(crate) workdir: &'a CStr,
    /// File mode creation mask.
    pub(crate) umask: u32,
    /// The streams are one terminal, which the session gets.
    pub(crate) terminal: bool,
    /// Flags of `landlock_restrict_self`.
    pub(crate) restrict_flags: u32,
    /// Landlock confines signals on this kernel, so that it can be proved to be on.
    pub(crate) prove: bool,
}

/// The orders in the form that needs no work after they were read: addresses are the same in both processes.
#[repr(C)]
struct Written {
    shell: *const c_char,
    argv: *const *const c_char,
    envp: *const *const c_char,
    workdir: *const c_char,
    umask: u32,
    terminal: bool,
    restrict_flags: u32,
    prove: bool,
}

/// Copies the orders to the head of the region.
fn write(orders: &Orders<'_>, region: &mut Region) -> Option<()> {
    let written = Written {
        shell: region.place_string(orders.shell)?,
        argv: region.place_list(orders.arguments)?,
        envp: region.place_list(orders.environment)?,
        workdir: region.place_string(orders.workdir)?,
        umask: orders.umask,
        terminal: orders.terminal,
        restrict_flags: orders.restrict_flags,
        prove: orders.prove,
    };
    // SAFETY: the head of the region was kept free for exactly this, and a page is aligned for everything.
    unsafe { region.head().cast::<Written>().write(written) };
    Some(())
}

/// A child that waits for its orders.
pub(crate) struct PreparedChild {
    pid: i32,
    report: OwnedFd,
    region: Region,
    apart: Option<Apart>,
    inside: Option<Inside>,
}

/// What the child needs before its orders.
pub(super) struct Waiting<'a> {
    report: RawFd,
    /// The helper as the child sees it: 0 from another pid namespace.
    parent: i32,
    filter: &'a [libc::sock_filter],
    listen: bool,
    orders: *const Written,
    /// A process of this user that Landlock puts out of reach: the helper, or the first process of the namespaces.
    witness: i32,
}

/// What a prepared child is from its beginning.
#[derive(Clone, Copy)]
pub(crate) struct Preparation<'a> {
    /// The seccomp program.
    pub(crate) filter: &'a [libc::sock_filter],
    /// Ask for a notification listener.
    pub(crate) listen: bool,
    /// Namespaces of its own.
    pub(crate) apart: Option<Apart>,
    /// Bytes for everything that it will be told, at least [`super::ROOM`].
    pub(crate) room: usize,
}

/// Why no child could be prepared.
#[derive(Debug)]
pub(crate) enum PrepareError {
    /// The fork, or what comes before it.
    Fork(io::Error),
    /// The namespaces.
    Namespaces(Refused),
}

impl PreparedChild {
    /// Forks a child that gives up its powers, installs the filter and waits.
    pub(crate) fn fork(preparation: Preparation<'_>) -> Result<Self, PrepareError> {
        let (report, child_end) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|errno| PrepareError::Fork(errno.into()))?;
        let region = Region::new(preparation.room, size_of::<Written>()).map_err(PrepareError::Fork)?;
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let waiting = Waiting {
            report: child_end.as_raw_fd(),
            parent: if preparation.apart.is_some() { 0 } else { own },
            filter: preparation.filter,
            listen: preparation.listen,
            orders: region.head().cast(),
            witness: if preparation.apart.is_some() { 1 } else { own },
        };
        let (pid, inside) = match preparation.apart {
            Some(apart) => fork_apart(apart, (&report, waiting.report), &waiting)
                .map(|(pid, inside)| (pid, Some(inside)))
                .map_err(PrepareError::Namespaces)?,
            None => (fork_here(&waiting).map_err(PrepareError::Fork)?, None),
        };
        Ok(Self {
            pid,
            report,
            region,
            apart: preparation.apart,
            inside,
        })
    }

    /// The namespaces that it was made for.
    pub(crate) fn apart(&self) -> Option<Apart> {
        self.apart
    }

    /// Has the view of the file system built for a child that is apart, and gives the inside to whoever supervises.
    pub(crate) fn furnish(&mut self, layout: &Layout) -> Result<Option<Inside>, Refused> {
        let Some(inside) = self.inside.take() else {
            return Ok(None);
        };
        inside.furnish(layout, &mut self.region)?;
        Ok(Some(inside))
    }

    /// Gives the orders, the command's streams and the ruleset. Returns the process id and the socket on which the child reports. An error means that the
    /// child is not usable, and gone.
    pub(crate) fn start(
        mut self,
        orders: &Orders<'_>,
        stdio: [BorrowedFd<'_>; 3],
        ruleset: BorrowedFd<'_>,
    ) -> io::Result<(i32, OwnedFd)> {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let sent = write(orders, &mut self.region)
            .ok_or(io::ErrorKind::ArgumentListTooLong.into())
            .and_then(|()| {
                let fds = [stdio[0], stdio[1], stdio[2], ruleset];
                let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                control.push(SendAncillaryMessage::ScmRights(&fds));
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                sendmsg(&self.report, &[io::IoSlice::new(b"G")], &mut control, flags).map_err(io::Error::from)
            });
        match sent {
            Ok(_) => Ok((self.pid, self.report)),
            Err(error) => {
                self.discard();
                Err(error)
            }
        }
    }

    /// Ends a child that is not needed. Whoever waits for children finds it among them.
    pub(crate) fn discard(self) {
        let _ = super::kill(self.pid, libc::SIGKILL);
        if let Some(inside) = self.inside {
            let _ = super::kill(inside.first, libc::SIGKILL);
        }
    }
}

fn fork_here(waiting: &Waiting<'_>) -> io::Result<i32> {
    // SAFETY: the helper has one thread, so no lock can be held by another one at the fork; the child calls only async-signal-safe functions.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: this is the child of a single-threaded process, and everything it uses was made before the fork.
        0 => unsafe { wait_for_orders(waiting) },
        pid => Ok(pid),
    }
}

/// # Safety
/// Only in the child of a fork of a single-threaded process. `waiting.orders` is the head of a shared region.
pub(super) unsafe fn wait_for_orders(waiting: &Waiting<'_>) -> ! {
    let report = waiting.report;
    // SAFETY: numbers, or pointers to what was made before the fork. The orders are read only after the helper has said that they are written.
    unsafe {
        child::new_session(report, waiting.parent);
        if !child::give_up_powers() {
            child::fail(report, DROP_CAPABILITIES);
        }
        // The daemon's socket is at 0: it must not be held open by somebody who does not serve it.
        if libc::dup2(1, 0) < 0 {
            child::fail(report, SESSION);
        }
        child::no_new_privileges(report);
        let listener = child::filter(report, waiting.filter, waiting.listen);
        child::self_check(report, waiting.listen);
        let [stdin, stdout, stderr, ruleset] = receive_descriptors(report);
        let orders = &*waiting.orders;
        child::take_streams(report, [stdin, stdout, stderr], orders.terminal, orders.umask);
        if libc::chdir(orders.workdir) != 0 {
            child::fail(report, WORKDIR);
        }
        if libc::syscall(libc::SYS_landlock_restrict_self, ruleset, orders.restrict_flags) != 0 {
            child::fail(report, LANDLOCK);
        }
        if orders.prove && !is_scoped(waiting.witness) {
            child::fail(report, SELF_CHECK);
        }
        if waiting.listen {
            child::await_taken(report, listener);
        }
        child::execute(report, orders.shell, orders.argv, orders.envp)
    }
}

/// Waits for the helper's word and what comes with it; ends when the helper has no use for this child.
///
/// # Safety
/// As for [`wait_for_orders`].
unsafe fn receive_descriptors(report: RawFd) -> [RawFd; 4] {
    const SPACE: usize = 64;
    #[repr(C, align(8))]
    struct Control([u8; SPACE]);
    let mut word = [0u8; 1];
    let mut control = Control([0; SPACE]);
    let mut iov = libc::iovec {
        iov_base: word.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut fds = [0; 4];
    // SAFETY: a zeroed msghdr is valid; the pointers set below point to locals that outlive the call, and SPACE holds four descriptors.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = SPACE as _;
        let received = libc::recvmsg(report, &raw mut message, libc::MSG_CMSG_CLOEXEC);
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if received != 1 || header.is_null() || (*header).cmsg_len != libc::CMSG_LEN(16) as usize {
            libc::_exit(125);
        }
        ptr::copy_nonoverlapping(libc::CMSG_DATA(header).cast::<RawFd>(), fds.as_mut_ptr(), fds.len());
    }
    fds
}

/// Whether Landlock keeps this process from signalling `witness`. The signal is one that is ignored, and that is never notified: see `calls.rs`.
///
/// # Safety
/// As for [`wait_for_orders`].
unsafe fn is_scoped(witness: i32) -> bool {
    // SAFETY: numbers only.
    unsafe {
        libc::syscall(libc::SYS_tgkill, witness, witness, libc::SIGURG) == -1
            && *libc::__errno_location() == libc::EPERM
    }
}
