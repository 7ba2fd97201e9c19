//! The namespaces of one command and the first process in them.
//!
//! Three processes are forked. The *founder* makes the namespaces, asks the helper to write the id maps, and forks the other two as its own siblings, so
//! that both are children of the helper; then it ends. The *first process* builds the view of the file system when it is told to, gives up its powers, and
//! collects orphans: a command must not be the first process itself, which has no default signal actions. The third one becomes the command.
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

use libc::c_int;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::mounts::{self, Layout, WrittenLayout};
use super::region::Region;
use super::{child, loopback, prepared};

/// A set-up that takes longer hangs: 300 of them took 0.7 to 31 ms each, 1 ms in the median, on a machine with six times more work than processors.
const DEADLINE: Duration = Duration::from_secs(3);

/// One thing that the set-up does, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Part {
    UserNamespace,
    UidMap,
    GidMap,
    MountNamespace,
    PidNamespace,
    IpcNamespace,
    NetNamespace,
    Init,
    Loopback,
    WritableTree,
    ReadOnlyRoot,
    Proc,
    SharedMemory,
    WritableMount,
    SelfCheck,
    Powers,
}

impl Part {
    const ALL: [Self; 16] = [
        Self::UserNamespace,
        Self::UidMap,
        Self::GidMap,
        Self::MountNamespace,
        Self::PidNamespace,
        Self::IpcNamespace,
        Self::NetNamespace,
        Self::Init,
        Self::Loopback,
        Self::WritableTree,
        Self::ReadOnlyRoot,
        Self::Proc,
        Self::SharedMemory,
        Self::WritableMount,
        Self::SelfCheck,
        Self::Powers,
    ];

    /// What it is, for people.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::UserNamespace => "user namespace",
            Self::UidMap => "write uid_map",
            Self::GidMap => "write gid_map",
            Self::MountNamespace => "mount namespace",
            Self::PidNamespace => "pid namespace",
            Self::IpcNamespace => "ipc namespace",
            Self::NetNamespace => "net namespace",
            Self::Init => "fork of the first process",
            Self::Loopback => "own loopback interface",
            Self::WritableTree => "copy of a writable mount",
            Self::ReadOnlyRoot => "read-only root",
            Self::Proc => "fresh /proc",
            Self::SharedMemory => "private /dev/shm",
            Self::WritableMount => "writable mount",
            Self::SelfCheck => "writing below the read-only root was not refused",
            Self::Powers => "giving up the powers of the first process",
        }
    }

    /// Whether it is about mounts rather than about making namespaces.
    pub(crate) const fn is_mount(self) -> bool {
        self as u8 >= Self::WritableTree as u8
    }
}

/// A part of the set-up that this host refused.
#[derive(Debug)]
pub(crate) struct Refused {
    /// Which.
    pub(crate) part: Part,
    /// The kernel's error.
    pub(crate) error: io::Error,
}

impl Refused {
    fn new(part: Part) -> impl Fn(io::Error) -> Self {
        move |error| Self { part, error }
    }

    /// Reads what [`tell`] wrote.
    fn parse(message: &[u8]) -> Self {
        match message {
            [b'N', part, errno @ ..] if errno.len() == 4 => Self {
                part: Part::ALL.get(usize::from(*part)).copied().unwrap_or(Part::Init),
                error: io::Error::from_raw_os_error(errno.try_into().map_or(0, i32::from_ne_bytes)),
            },
            // Whoever had to answer is gone.
            _ => Self {
                part: Part::Init,
                error: io::Error::from_raw_os_error(libc::EPROTO),
            },
        }
    }
}

/// Which namespaces a command gets besides those that every one gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Apart {
    /// A network of its own, with a loopback interface and nothing else.
    pub(crate) network: bool,
}

/// The inside of a command's namespaces, held from outside.
#[derive(Debug)]
pub(crate) struct Inside {
    /// Its first process, as the helper sees it.
    pub(crate) first: i32,
    /// Its root folder.
    pub(crate) root: OwnedFd,
    /// To the first process: orders, questions, and by its end the word that the command has ended.
    gate: OwnedFd,
}

impl Inside {
    /// Has the view of the file system built.
    pub(super) fn furnish(&self, layout: &Layout, region: &mut Region) -> Result<(), Refused> {
        let failed = Refused::new(Part::WritableTree);
        let written = layout
            .write(region)
            .ok_or_else(|| failed(io::Error::from_raw_os_error(libc::E2BIG)))?;
        let address = (written as usize).to_ne_bytes();
        send(&self.gate, &address, SendFlags::NOSIGNAL).map_err(|errno| failed(errno.into()))?;
        let mut answer = [0; NEWS];
        match recv(&self.gate, &mut answer, RecvFlags::empty()) {
            Ok((1, _)) => Ok(()),
            Ok((length, _)) => Err(Refused::parse(&answer[..length])),
            Err(errno) => Err(failed(errno.into())),
        }
    }

    /// The newest process number inside. Numbers above it were never a process of the command's.
    pub(crate) fn last_number(&self) -> Option<i32> {
        send(&self.gate, b"?", SendFlags::NOSIGNAL).ok()?;
        let mut answer = [0; 4];
        match recv(&self.gate, &mut answer, RecvFlags::empty()) {
            Ok((4, _)) => Some(i32::from_ne_bytes(answer)),
            _ => None,
        }
    }

    /// The command has ended: the first process ends as soon as nothing is left inside.
    pub(crate) fn let_go(&self) {
        let _ = rustix::net::shutdown(&self.gate, rustix::net::Shutdown::Both);
    }
}

/// A part and an errno, with a letter before them.
const NEWS: usize = 6;

/// Forks the command's process in new namespaces; it runs `command`, which never returns, when everything is in place. Needs the powers that the helper
/// was started with, so that the ids of a privileged user can all be mapped.
pub(super) fn fork_apart(
    apart: Apart,
    (helper_end, command_end): (&OwnedFd, RawFd),
    command: &prepared::Waiting<'_>,
) -> Result<(i32, Inside), Refused> {
    let failed = Refused::new(Part::Init);
    let (gate, first_end) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|errno| failed(errno.into()))?;
    for socket in [helper_end, &gate] {
        set_socket_timeout(socket, Timeout::Recv, Some(DEADLINE)).map_err(|errno| failed(errno.into()))?;
    }
    // The maps of a process that hides itself belong to root. It hides itself again at once, as does everything that is forked from it.
    show_memory(true);
    // SAFETY: the helper has one thread; the children only make system calls on memory that is there, and never return.
    let founder = match unsafe { libc::fork() } {
        -1 => Err(failed(io::Error::last_os_error())),
        // SAFETY: as above.
        0 => unsafe { found(apart, command_end, first_end.as_raw_fd(), command) },
        founder => Ok(founder),
    };
    show_memory(false);
    let founder = founder?;
    let outcome = attend(founder, helper_end);
    // SAFETY: waits for our own child, which ends by itself after its last word or when its socket closes; no status is written.
    unsafe {
        if outcome.is_err() {
            libc::kill(founder, libc::SIGKILL);
        }
        libc::waitpid(founder, ptr::null_mut(), libc::__WALL);
    }
    let (root, first, pid) = outcome?;
    let _ = send(helper_end, b"g", SendFlags::NOSIGNAL);
    Ok((pid, Inside { first, root, gate }))
}

fn show_memory(shown: bool) {
    // SAFETY: numbers only.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, libc::c_ulong::from(shown), 0, 0, 0) };
}

/// Answers the founder until it has said which processes it made: the root folder, the first process, the command's.
fn attend(founder: i32, socket: &OwnedFd) -> Result<(OwnedFd, i32, i32), Refused> {
    let failed = Refused::new(Part::Init);
    let mut root = None;
    loop {
        let mut message = [0u8; 9];
        let length = recv(socket, &mut message, RecvFlags::empty())
            .map_err(|errno| failed(errno.into()))?
            .0;
        match (&message[..length], root.take()) {
            (b"U", None) => {
                write_maps(founder)?;
                let _ = send(socket, b"u", SendFlags::NOSIGNAL);
            }
            (b"R", None) => {
                let folder = openat(
                    CWD,
                    format!("/proc/{founder}/root"),
                    OFlags::PATH | OFlags::CLOEXEC,
                    Mode::empty(),
                );
                root = Some(folder.map_err(|errno| failed(errno.into()))?);
                let _ = send(socket, b"r", SendFlags::NOSIGNAL);
            }
            ([b'P', a, b, c, d, e, f, g, h], Some(root)) => {
                let first = i32::from_ne_bytes([*a, *b, *c, *d]);
                let command = i32::from_ne_bytes([*e, *f, *g, *h]);
                return Ok((root, first, command));
            }
            (other, _) => return Err(Refused::parse(other)),
        }
    }
}

/// Every id means the same inside as outside, as far as this user may say so: all of them for a privileged one, otherwise the own.
fn write_maps(pid: i32) -> Result<(), Refused> {
    let write = |name: &str, text: &str| std::fs::write(format!("/proc/{pid}/{name}"), text);
    let same = |name: &str| std::fs::read_to_string(format!("/proc/self/{name}")).map(|map| identity(&map));
    if rustix::process::geteuid().is_root() && same("uid_map").and_then(|map| write("uid_map", &map)).is_ok() {
        return same("gid_map")
            .and_then(|map| write("gid_map", &map))
            .map_err(Refused::new(Part::GidMap));
    }
    let own = |id: u32| format!("{id} {id} 1");
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    write("uid_map", &own(uid.as_raw())).map_err(Refused::new(Part::UidMap))?;
    write("setgroups", "deny")
        .and_then(|()| write("gid_map", &own(gid.as_raw())))
        .map_err(Refused::new(Part::GidMap))
}

/// The map that gives every id of `map` to itself.
fn identity(map: &str) -> String {
    let mut same = String::new();
    for line in map.lines() {
        let mut words = line.split_ascii_whitespace();
        if let (Some(inside), _, Some(count)) = (words.next(), words.next(), words.next()) {
            same.push_str(&format!("{inside} {inside} {count}\n"));
        }
    }
    same
}

/// Says which part failed, with the current errno, and ends the process.
///
/// # Safety
/// Only in a child that was forked for this.
unsafe fn tell(socket: RawFd, part: Part) -> ! {
    // SAFETY: errno is this thread's own; the message lives on this stack.
    unsafe {
        let [a, b, c, d] = (*libc::__errno_location()).to_ne_bytes();
        let message: [u8; NEWS] = [b'N', part as u8, a, b, c, d];
        libc::send(socket, message.as_ptr().cast(), message.len(), libc::MSG_NOSIGNAL);
        libc::_exit(125)
    }
}

/// Says a letter and waits for the answer; ends when there is none.
///
/// # Safety
/// As for [`tell`].
unsafe fn ask(socket: RawFd, letter: u8) {
    // SAFETY: one byte on this stack.
    unsafe {
        libc::send(socket, (&raw const letter).cast(), 1, libc::MSG_NOSIGNAL);
        await_byte(socket);
    }
}

/// Waits for the helper's word; ends when the helper is gone.
///
/// # Safety
/// As for [`tell`].
unsafe fn await_byte(socket: RawFd) {
    let mut answer = 0u8;
    // SAFETY: one byte on this stack.
    unsafe {
        if libc::recv(socket, (&raw mut answer).cast(), 1, 0) != 1 {
            libc::_exit(125);
        }
    }
}

/// The founder: makes the namespaces, one at a time so that each has its own answer, and the two processes in them.
///
/// # Safety
/// As for [`tell`]; everything in `command` was made before the fork.
unsafe fn found(apart: Apart, report: RawFd, gate: RawFd, command: &prepared::Waiting<'_>) -> ! {
    let namespaces = [
        (Part::UserNamespace, libc::CLONE_NEWUSER, true),
        (Part::MountNamespace, libc::CLONE_NEWNS, true),
        (Part::PidNamespace, libc::CLONE_NEWPID, true),
        (Part::IpcNamespace, libc::CLONE_NEWIPC, true),
        (Part::NetNamespace, libc::CLONE_NEWNET, apart.network),
    ];
    // SAFETY: numbers, and what the caller promises.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        for (part, flag, _) in namespaces.into_iter().filter(|(_, _, wanted)| *wanted) {
            // Not the C library's function: it takes an int and hands the whole register on, and the kernel refuses what was left in its upper half.
            if libc::syscall(libc::SYS_unshare, libc::c_long::from(flag)) != 0 {
                tell(report, part);
            }
            match part {
                Part::UserNamespace => ask(report, b'U'),
                Part::MountNamespace => ask(report, b'R'),
                _ => {}
            }
        }
        let first = fork_sibling(report);
        if first == 0 {
            be_first(gate, apart);
        }
        let other = fork_sibling(report);
        if other == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            await_byte(report);
            prepared::wait_for_orders(command);
        }
        let mut message = [b'P'; 9];
        message[1..5].copy_from_slice(&first.to_ne_bytes());
        message[5..].copy_from_slice(&other.to_ne_bytes());
        libc::send(report, message.as_ptr().cast(), message.len(), libc::MSG_NOSIGNAL);
        libc::_exit(0)
    }
}

/// Forks a child of the helper.
///
/// # Safety
/// As for [`tell`].
unsafe fn fork_sibling(report: RawFd) -> i32 {
    let flags = libc::c_long::from(libc::CLONE_PARENT | libc::SIGCHLD);
    // SAFETY: without a stack of its own the child goes on with a copy of this one, as after a fork.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0usize, 0usize, 0usize, 0usize) };
    match i32::try_from(pid) {
        Ok(pid) if pid >= 0 => pid,
        // SAFETY: as for the caller.
        _ => unsafe { tell(report, Part::Init) },
    }
}

/// The first process. It lives until the helper has let go and nothing else is left inside; when it is killed, the kernel kills everything inside.
///
/// # Safety
/// As for [`tell`].
unsafe fn be_first(gate: RawFd, apart: Apart) -> ! {
    // SAFETY: numbers, and an address that the helper sends of memory that both share.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        keep_only(gate);
        if apart.network && loopback::raise() < 0 {
            tell(gate, Part::Loopback);
        }
        let mut address = 0usize;
        if libc::recv(gate, (&raw mut address).cast(), size_of::<usize>(), 0) != size_of::<usize>() as isize {
            libc::_exit(0); // There is no use for it.
        }
        if let Err(part) = mounts::build(ptr::with_exposed_provenance_mut::<WrittenLayout>(address)) {
            tell(gate, part);
        }
        if !child::give_up_powers() {
            tell(gate, Part::Powers);
        }
        libc::send(gate, c"D".as_ptr().cast(), 1, libc::MSG_NOSIGNAL);
        collect_orphans(gate)
    }
}

/// Closes everything but `gate` and the helper's stdout and stderr. The daemon's socket is at 0: it must not be held open by somebody who does not serve it.
///
/// # Safety
/// As for [`tell`].
unsafe fn keep_only(gate: RawFd) {
    // SAFETY: numbers only; `gate` is above 2, as everything that the helper opens.
    unsafe {
        let number = gate.cast_unsigned();
        libc::dup2(1, 0);
        if number > 3 {
            libc::syscall(libc::SYS_close_range, 3u32, number - 1, 0u32);
        }
        libc::syscall(libc::SYS_close_range, number + 1, u32::MAX, 0u32);
    }
}

/// Waits for children that others left, and answers the helper.
///
/// # Safety
/// As for [`tell`].
unsafe fn collect_orphans(gate: RawFd) -> ! {
    // SAFETY: zeroed sets and poll entries are valid, live on this stack, and have the lengths that are told.
    unsafe {
        let mut ended: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut ended);
        libc::sigaddset(&raw mut ended, libc::SIGCHLD);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const ended, ptr::null_mut());
        let signals = libc::signalfd(-1, &raw const ended, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC);
        loop {
            let entry = |fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            };
            let mut entries = [entry(gate), entry(signals)];
            libc::poll(entries.as_mut_ptr(), 2, -1);
            if entries[1].revents != 0 {
                let mut news = [0u8; 128];
                while libc::read(signals, news.as_mut_ptr().cast(), news.len()) > 0 {}
                while libc::waitpid(-1, ptr::null_mut(), libc::WNOHANG | libc::__WALL) > 0 {}
            }
            if entries[0].revents != 0 {
                let mut question = 0u8;
                match libc::recv(gate, (&raw mut question).cast(), 1, libc::MSG_DONTWAIT) {
                    1 => {
                        let number = last_number();
                        libc::send(gate, (&raw const number).cast(), size_of::<c_int>(), libc::MSG_NOSIGNAL);
                    }
                    0 => break,
                    _ => {}
                }
            }
        }
        while libc::waitpid(-1, ptr::null_mut(), libc::__WALL) > 0 || *libc::__errno_location() == libc::EINTR {}
        libc::_exit(0)
    }
}

/// The newest process number here: that of a child which ends at once.
///
/// # Safety
/// As for [`tell`].
unsafe fn last_number() -> c_int {
    // SAFETY: the child only ends.
    unsafe {
        match libc::fork() {
            0 => libc::_exit(0),
            pid => pid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::identity;

    #[test]
    fn every_id_is_mapped_to_itself() {
        assert_eq!(identity("         0          0 4294967295\n"), "0 0 4294967295\n");
        // In a container that has ids of its own.
        assert_eq!(identity("0 100000 65536\n65536 1000 1\n"), "0 0 65536\n65536 65536 1\n");
        assert_eq!(identity(""), "");
    }
}
