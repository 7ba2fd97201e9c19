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

/// Room for the command, its environment and the lists of both. What is larger is forked for.
const ROOM: usize = 1024 * 1024;

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
    restrict_flags: u32,
    prove: bool,
}

/// Memory that a parent and the child that it forks afterwards both see. Never unmapped: a helper lives no longer than its one command, and changing a
/// memory map costs more than all the writing.
struct Region {
    base: *mut u8,
    used: usize,
}

impl Region {
    fn new() -> io::Result<Self> {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice; nothing that exists is touched.
        let base = unsafe { libc::mmap(ptr::null_mut(), ROOM, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            base: base.cast(),
            used: size_of::<Written>(),
        })
    }

    /// Copies `count` values of `T` into the region; none when there is no room.
    fn place<T: Copy>(&mut self, values: *const T, count: usize) -> Option<*const T> {
        let start = self.used.next_multiple_of(align_of::<T>());
        let end = start.checked_add(count.checked_mul(size_of::<T>())?)?;
        if end > ROOM {
            return None;
        }
        self.used = end;
        // SAFETY: `start..end` lies inside the mapping, is aligned for `T`, and was given to nobody before; `values` has `count` values.
        unsafe {
            let target = self.base.add(start).cast::<T>();
            ptr::copy_nonoverlapping(values, target, count);
            Some(target)
        }
    }

    fn place_string(&mut self, string: &CStr) -> Option<*const c_char> {
        let bytes = string.to_bytes_with_nul();
        self.place(bytes.as_ptr().cast(), bytes.len())
    }

    fn place_list(&mut self, strings: &[CString]) -> Option<*const *const c_char> {
        let mut pointers = Vec::with_capacity(strings.len() + 1);
        for string in strings {
            pointers.push(self.place_string(string)?);
        }
        pointers.push(ptr::null());
        self.place(pointers.as_ptr(), pointers.len())
    }

    fn write(&mut self, orders: &Orders<'_>) -> Option<()> {
        let written = Written {
            shell: self.place_string(orders.shell)?,
            argv: self.place_list(orders.arguments)?,
            envp: self.place_list(orders.environment)?,
            workdir: self.place_string(orders.workdir)?,
            umask: orders.umask,
            restrict_flags: orders.restrict_flags,
            prove: orders.prove,
        };
        // SAFETY: the head of the region was kept free for exactly this, and a page is aligned for everything.
        unsafe { self.base.cast::<Written>().write(written) };
        Some(())
    }
}

/// A child that waits for its orders.
pub(crate) struct PreparedChild {
    pid: i32,
    report: OwnedFd,
    region: Region,
}

/// What the child needs before its orders.
struct Waiting<'a> {
    report: RawFd,
    parent: i32,
    filter: &'a [libc::sock_filter],
    orders: *const Written,
}

impl PreparedChild {
    /// Forks a child that gives up its powers, installs `filter` and waits.
    pub(crate) fn fork(filter: &[libc::sock_filter]) -> io::Result<Self> {
        let (report, child_end) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let parent = rustix::process::getpid().as_raw_nonzero().get();
        let region = Region::new()?;
        let waiting = Waiting {
            report: child_end.as_raw_fd(),
            parent,
            filter,
            orders: region.base.cast(),
        };
        // SAFETY: the helper has one thread, so no lock can be held by another one at the fork; the child calls only async-signal-safe functions.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            // SAFETY: this is the child of a single-threaded process, and everything it uses was made before the fork.
            0 => unsafe { wait_for_orders(&waiting) },
            pid => Ok(Self { pid, report, region }),
        }
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
        let sent = self
            .region
            .write(orders)
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
    }
}

/// # Safety
/// Only in the child of a fork of a single-threaded process. `waiting.orders` is the head of a shared region.
unsafe fn wait_for_orders(waiting: &Waiting<'_>) -> ! {
    let report = waiting.report;
    // SAFETY: numbers, or pointers to what was made before the fork. The orders are read only after the helper has said that they are written.
    unsafe {
        child::new_session(report, waiting.parent);
        drop_powers(report);
        // The daemon's socket is at 0: it must not be held open by somebody who does not serve it.
        if libc::dup2(1, 0) < 0 {
            child::fail(report, SESSION);
        }
        child::no_new_privileges(report);
        let listener = child::filter(report, waiting.filter, true);
        child::self_check(report, true);
        let [stdin, stdout, stderr, ruleset] = receive_descriptors(report);
        let orders = &*waiting.orders;
        child::take_streams(report, [stdin, stdout, stderr], orders.umask);
        if libc::chdir(orders.workdir) != 0 {
            child::fail(report, WORKDIR);
        }
        if libc::syscall(libc::SYS_landlock_restrict_self, ruleset, orders.restrict_flags) != 0 {
            child::fail(report, LANDLOCK);
        }
        if orders.prove && !is_scoped(waiting.parent) {
            child::fail(report, SELF_CHECK);
        }
        child::await_taken(report, listener);
        child::execute(report, orders.shell, orders.argv, orders.envp)
    }
}

/// Every capability set emptied. The bounding set only shrinks for who may change it; without that, `no_new_privs` keeps the rest from coming back.
///
/// # Safety
/// As for [`wait_for_orders`].
unsafe fn drop_powers(report: RawFd) {
    const VERSION_3: u32 = 0x2008_0522;
    // SAFETY: numbers, and two arrays of the sizes that version 3 has.
    unsafe {
        let mut number = 0;
        while libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) == 0 {
            number += 1;
        }
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
        let header: [u32; 2] = [VERSION_3, 0];
        let nothing = [0u32; 6];
        if libc::syscall(libc::SYS_capset, header.as_ptr(), nothing.as_ptr()) != 0 {
            child::fail(report, DROP_CAPABILITIES);
        }
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

/// Whether Landlock keeps this process from signalling the helper. The signal is one that is ignored, and that is never notified: see `calls.rs`.
///
/// # Safety
/// As for [`wait_for_orders`].
unsafe fn is_scoped(parent: i32) -> bool {
    // SAFETY: numbers only.
    unsafe {
        libc::syscall(libc::SYS_tgkill, parent, parent, libc::SIGURG) == -1 && *libc::__errno_location() == libc::EPERM
    }
}
