//! What happens between fork and exec: raw, async-signal-safe calls on values that were prepared before, never a return.
//!
//! The order is the safety argument. Privilege only shrinks: the session and streams first (they need nothing), the working directory while it can
//! still be reached, then `no_new_privs` (both filters need it), Landlock, the seccomp filters last so that they need not permit the steps before
//! them, and at the end an attempt at what must be refused.
use std::ffi::{CStr, c_char, c_int};
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::ptr;

use dsh_policy::plan::Step;

/// Everything the child needs, made before the fork: after it nothing may allocate.
pub(crate) struct Launch<'a> {
    /// Executable.
    pub(crate) shell: &'a CStr,
    /// Null-terminated, pointing into strings that live as long as this.
    pub(crate) argv: &'a [*const c_char],
    /// Null-terminated, likewise.
    pub(crate) envp: &'a [*const c_char],
    /// Entered before confinement.
    pub(crate) workdir: &'a CStr,
    /// File mode creation mask.
    pub(crate) umask: u32,
    /// The command's streams.
    pub(crate) stdio: [RawFd; 3],
    /// They are one terminal, which the session gets.
    pub(crate) terminal: bool,
    /// Where failures and the listener go; closes itself at exec.
    pub(crate) report: RawFd,
    /// The helper, for the race between fork and the parent-death signal.
    pub(crate) parent: i32,
    /// Set for confined commands.
    pub(crate) confine: Option<Confine<'a>>,
}

/// The confining part of a launch.
pub(crate) struct Confine<'a> {
    /// A Landlock ruleset.
    pub(crate) ruleset: RawFd,
    /// Flags of `landlock_restrict_self`.
    pub(crate) restrict_flags: u32,
    /// Whether writing to one's own `/proc` must fail once Landlock is on (not so when a writable root is `/`).
    pub(crate) expect_refusal: bool,
    /// The seccomp program.
    pub(crate) filter: &'a [libc::sock_filter],
    /// Ask for a notification listener and hand it over.
    pub(crate) listen: bool,
}

/// What the child says over its report socket. End of file means that the shell was executed.
#[derive(Debug)]
pub(crate) enum ChildReport {
    /// The child has a notification listener under this number; it waits for [`Taken`] before it becomes the shell.
    HasListener(RawFd),
    /// The notification listener itself.
    Listener(OwnedFd),
    /// Every step is done; what follows is the shell.
    Complete,
    /// A step failed and the child is gone.
    Failed(Step, i32),
}

/// What the helper answers to [`ChildReport::HasListener`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The helper has taken the listener by itself.
    Yes,
    /// It cannot; the child is to send it. Only where `sendmsg` is not notified.
    Send,
}

impl Taken {
    /// The one byte that travels.
    pub(crate) fn word(self) -> &'static [u8] {
        match self {
            Self::Yes => b"T",
            Self::Send => b"S",
        }
    }
}

/// Steps of the child, in order; their position is what travels.
const STEPS: [Step; 8] = [
    Step::DropCapabilities,
    Step::Session,
    Step::Workdir,
    Step::NoNewPrivs,
    Step::Landlock,
    Step::Seccomp,
    Step::SelfCheck,
    Step::Exec,
];
/// Of a prepared child only; the others are forked by a helper that has dropped them.
pub(super) const DROP_CAPABILITIES: u8 = 0;
pub(super) const SESSION: u8 = 1;
pub(super) const WORKDIR: u8 = 2;
pub(super) const NO_NEW_PRIVS: u8 = 3;
pub(super) const LANDLOCK: u8 = 4;
pub(super) const SECCOMP: u8 = 5;
pub(super) const SELF_CHECK: u8 = 6;
pub(super) const EXEC: u8 = 7;

impl ChildReport {
    /// Reads one message of the child's; none at end of file.
    pub(crate) fn parse(bytes: &[u8], fd: Option<OwnedFd>) -> Option<Self> {
        match (bytes, fd) {
            ([b'L', ..], Some(fd)) => Some(Self::Listener(fd)),
            ([b'N', a, b, c, d], _) => Some(Self::HasListener(i32::from_le_bytes([*a, *b, *c, *d]))),
            ([b'X'], _) => Some(Self::Complete),
            ([b'F', step, a, b, c, d], _) => {
                let step = STEPS.get(usize::from(*step)).copied().unwrap_or(Step::Exec);
                Some(Self::Failed(step, i32::from_le_bytes([*a, *b, *c, *d])))
            }
            _ => None,
        }
    }
}

/// Forks; the child becomes the command as `launch` says. Returns the child's process id.
pub(crate) fn spawn(launch: &Launch<'_>) -> io::Result<i32> {
    // SAFETY: the helper has one thread, so no lock can be held by another one at the fork; the child calls only async-signal-safe functions.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: this is the child of a single-threaded process and `launch` was prepared completely.
        0 => unsafe { become_command(launch) },
        pid => Ok(pid),
    }
}

/// # Safety
/// Only in the child of a fork of a single-threaded process, with pointers in `launch` that are valid.
unsafe fn become_command(launch: &Launch<'_>) -> ! {
    // SAFETY: every call takes numbers, or pointers into `launch` or this stack frame. `fail` does not return.
    unsafe {
        session(launch);
        if libc::chdir(launch.workdir.as_ptr()) != 0 {
            fail(launch.report, WORKDIR);
        }
        if let Some(confine) = &launch.confine {
            no_new_privileges(launch.report);
            restrict(launch, confine);
            let listener = filter(launch.report, confine.filter, confine.listen);
            self_check(launch.report, confine.listen);
            if confine.listen {
                await_taken(launch.report, listener);
            }
        }
        execute(
            launch.report,
            launch.shell.as_ptr(),
            launch.argv.as_ptr(),
            launch.envp.as_ptr(),
        )
    }
}

/// # Safety
/// As for [`become_command`].
pub(super) unsafe fn no_new_privileges(report: RawFd) {
    // SAFETY: numbers only.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            fail(report, NO_NEW_PRIVS);
        }
    }
}

/// The last step.
///
/// # Safety
/// As for [`become_command`]; the pointers are those of a null-terminated string and two null-terminated lists of such.
pub(super) unsafe fn execute(
    report: RawFd,
    shell: *const c_char,
    argv: *const *const c_char,
    envp: *const *const c_char,
) -> ! {
    // SAFETY: as the caller says.
    unsafe {
        // Says that only the shell itself is missing, so that a death before this is told from one after it.
        libc::send(report, c"X".as_ptr().cast(), 1, libc::MSG_NOSIGNAL);
        libc::execve(shell, argv, envp);
        fail(report, EXEC)
    }
}

/// A new session, the death signal, the streams, and nothing else that was open.
///
/// # Safety
/// As for [`become_command`].
unsafe fn session(launch: &Launch<'_>) {
    // SAFETY: numbers only.
    unsafe {
        new_session(launch.report, launch.parent);
        take_streams(launch.report, launch.stdio, launch.terminal, launch.umask);
    }
}

/// A new session, and death with the helper.
///
/// # Safety
/// As for [`become_command`].
pub(super) unsafe fn new_session(report: RawFd, parent: i32) {
    // SAFETY: numbers only, except the signal set, which lives on this stack.
    unsafe {
        if libc::setsid() < 0 || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
            fail(report, SESSION);
        }
        // The helper may have died before the death signal was set; then nobody would ever send it.
        if libc::getppid() != parent {
            libc::_exit(125);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        if libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()) != 0 {
            fail(report, SESSION);
        }
    }
}

/// Every capability set emptied; whether that succeeded. The bounding set only shrinks for who may change it; without that, `no_new_privs` keeps the rest
/// from coming back.
///
/// # Safety
/// As for [`become_command`].
pub(super) unsafe fn give_up_powers() -> bool {
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
        libc::syscall(libc::SYS_capset, header.as_ptr(), nothing.as_ptr()) == 0
    }
}

/// The command's streams and nothing else that was open.
///
/// # Safety
/// As for [`become_command`]. The descriptors are all above 2, so none is overwritten before its turn.
pub(super) unsafe fn take_streams(report: RawFd, stdio: [RawFd; 3], terminal: bool, umask: u32) {
    // SAFETY: numbers only.
    unsafe {
        for (target, fd) in stdio.into_iter().enumerate() {
            if libc::dup2(fd, target as c_int) < 0 {
                fail(report, SESSION);
            }
        }
        // The session is new and this process leads it, so it has no terminal yet; one that another session has is refused, also to root (argument 0).
        if terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) != 0 {
            fail(report, SESSION);
        }
        // All of the helper's descriptors close themselves at exec already; this holds even if one was forgotten.
        let close = libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        if close != 0 {
            fail(report, SESSION);
        }
        libc::umask(umask);
    }
}

/// Landlock on, and proved.
///
/// # Safety
/// As for [`become_command`].
unsafe fn restrict(launch: &Launch<'_>, confine: &Confine<'_>) {
    // SAFETY: numbers, and a constant string.
    unsafe {
        if libc::syscall(
            libc::SYS_landlock_restrict_self,
            confine.ruleset,
            confine.restrict_flags,
        ) != 0
        {
            fail(launch.report, LANDLOCK);
        }
        if confine.expect_refusal {
            // One's own name is the one file that everybody may write to, so only Landlock can refuse it. Tried here, before calls are
            // notified, because the supervisor opens such files on behalf of the command. So does the supervisor of an outer sandbox of
            // ours; there the scope of signals shows that Landlock is on: the helper is the same user's process, but outside.
            let fd = libc::open(c"/proc/self/comm".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            let refused = fd < 0 && *libc::__errno_location() == libc::EACCES;
            let scoped = || libc::kill(launch.parent, 0) != 0 && *libc::__errno_location() == libc::EPERM;
            if !refused && (fd < 0 || !scoped()) {
                fail(launch.report, SELF_CHECK);
            }
        }
    }
}

/// The seccomp program. When `listen` says so the helper is told the number of its listener, which is returned.
///
/// # Safety
/// As for [`become_command`].
pub(super) unsafe fn filter(report: RawFd, filter: &[libc::sock_filter], listen: bool) -> RawFd {
    let program = libc::sock_fprog {
        len: filter.len() as libc::c_ushort,
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel only reads the program, which the caller keeps alive.
    let install = |flags: libc::c_ulong| unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const program,
        )
    };
    // SAFETY: as for the callers.
    unsafe {
        if !listen {
            if install(0) != 0 {
                fail(report, SECCOMP);
            }
            return -1;
        }
        let listener = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
        let mut fd = install(listener | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV);
        if fd < 0 && *libc::__errno_location() == libc::EINVAL {
            fd = install(listener); // Kernels before 5.19 do not know the other flag.
        }
        if fd < 0 {
            fail(report, SECCOMP);
        }
        // The helper is closed to other processes, and so is its copy until it executes the shell: also to the helper, which has to take this out. What
        // the copy holds of the command the shell shows as well.
        libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
        let [a, b, c, d] = (fd as RawFd).to_le_bytes();
        let message = [b'N', a, b, c, d];
        // Without an address, and so never notified: a call that is would wait for a helper that waits for this.
        libc::send(report, message.as_ptr().cast(), message.len(), libc::MSG_NOSIGNAL);
        fd as RawFd
    }
}

/// Waits until the helper has the listener: it is closed when the shell is executed.
///
/// # Safety
/// As for [`become_command`].
pub(super) unsafe fn await_taken(report: RawFd, listener: RawFd) {
    let mut word = [0u8; 1];
    // SAFETY: the kernel writes at most one byte into `word`.
    unsafe {
        let mut received = libc::recv(report, word.as_mut_ptr().cast(), 1, 0);
        while received < 0 && *libc::__errno_location() == libc::EINTR {
            received = libc::recv(report, word.as_mut_ptr().cast(), 1, 0);
        }
        match (received, word) {
            (1, [b'T']) => {}
            (1, [b'S']) => hand_over(report, listener),
            // The helper has given up.
            _ => libc::_exit(125),
        }
    }
}

/// Sends the listener over the report socket, where `sendmsg` is not notified.
///
/// # Safety
/// As for [`become_command`].
unsafe fn hand_over(report: RawFd, fd: RawFd) {
    const SPACE: usize = 64;
    #[repr(C, align(8))]
    struct Control([u8; SPACE]);
    let mut kind = *b"L";
    let mut control = Control([0; SPACE]);
    let mut iov = libc::iovec {
        iov_base: kind.as_mut_ptr().cast(),
        iov_len: 1,
    };
    // SAFETY: a zeroed msghdr is valid; the pointers set below point to locals that outlive the call, and SPACE holds one descriptor.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as _;
        ptr::write_unaligned(libc::CMSG_DATA(header).cast::<c_int>(), fd);
        if libc::sendmsg(report, &raw const message, libc::MSG_NOSIGNAL) != 1 {
            fail(report, SECCOMP);
        }
    }
}

/// Tries what must be refused now, and gives up when it is not. With a listener nothing is tried that the supervisor would have to answer: that costs two
/// wake-ups of an idle processor, a tenth of a whole command; the probe has tried it on this host.
///
/// # Safety
/// As for [`become_command`].
pub(super) unsafe fn self_check(report: RawFd, listen: bool) {
    // SAFETY: numbers and null pointers; each call is refused before it does anything, or the child ends.
    unsafe {
        let filtered = libc::syscall(libc::SYS_openat2, -1, ptr::null::<u8>(), ptr::null::<u8>(), 0usize) == -1
            && *libc::__errno_location() == libc::ENOSYS;
        let no_namespace =
            listen || (libc::unshare(libc::CLONE_NEWUSER) == -1 && *libc::__errno_location() == libc::EPERM);
        let locked = libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1;
        if !(filtered && no_namespace && locked) {
            *libc::__errno_location() = 0;
            fail(report, SELF_CHECK);
        }
    }
}

/// Reports `step` with the current errno and ends the child without running any destructor.
///
/// # Safety
/// As for [`become_command`].
pub(super) unsafe fn fail(report: RawFd, step: u8) -> ! {
    // SAFETY: errno is this thread's own; the message lives on this stack.
    unsafe {
        let [a, b, c, d] = (*libc::__errno_location()).to_le_bytes();
        let message = [b'F', step, a, b, c, d];
        libc::send(report, message.as_ptr().cast(), message.len(), libc::MSG_NOSIGNAL);
        libc::_exit(125)
    }
}
