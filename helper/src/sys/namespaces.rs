//! The namespaces and the file-system view of the namespace tier, tried in a throw-away child: which part of it this host refuses.
//!
//! Some hosts permit the user namespace and refuse what it is for (a masked `/proc` in a container; AppArmor on Ubuntu, by its documentation), so only the whole set-up tells.
use std::ffi::CStr;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::ptr;

use libc::{c_int, c_long};

/// A set-up that takes longer hangs: 300 of them took 0.7 to 31 ms each, 1 ms in the median, on a machine with six times more work than processors.
const DEADLINE_SECONDS: u32 = 3;

/// One thing that the set-up does, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Part {
    UserNamespace,
    Setgroups,
    UidMap,
    GidMap,
    MountNamespace,
    PidNamespace,
    IpcNamespace,
    NetNamespace,
    Init,
    WritableTree,
    ReadOnlyRoot,
    WritableMount,
    Proc,
    SharedMemory,
    Terminals,
    Loopback,
    SelfCheck,
    Done,
}

impl Part {
    const ALL: [Self; 18] = [
        Self::UserNamespace,
        Self::Setgroups,
        Self::UidMap,
        Self::GidMap,
        Self::MountNamespace,
        Self::PidNamespace,
        Self::IpcNamespace,
        Self::NetNamespace,
        Self::Init,
        Self::WritableTree,
        Self::ReadOnlyRoot,
        Self::WritableMount,
        Self::Proc,
        Self::SharedMemory,
        Self::Terminals,
        Self::Loopback,
        Self::SelfCheck,
        Self::Done,
    ];

    /// What it is, for people.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::UserNamespace => "user namespace",
            Self::Setgroups => "write setgroups",
            Self::UidMap => "write uid_map",
            Self::GidMap => "write gid_map",
            Self::MountNamespace => "mount namespace",
            Self::PidNamespace => "pid namespace",
            Self::IpcNamespace => "ipc namespace",
            Self::NetNamespace => "net namespace",
            Self::Init => "fork of the first process",
            Self::WritableTree => "copy of the mount of /tmp",
            Self::ReadOnlyRoot => "read-only root",
            Self::WritableMount => "writable mount of /tmp",
            Self::Proc => "fresh /proc",
            Self::SharedMemory => "private /dev/shm",
            Self::Terminals => "private /dev/pts",
            Self::Loopback => "own loopback interface",
            Self::SelfCheck => "writing below the read-only root was not refused",
            Self::Done => "done",
        }
    }

    /// Whether it is about mounts rather than about making namespaces.
    pub(crate) const fn is_mount(self) -> bool {
        self as u8 >= Self::WritableTree as u8
    }
}

/// Does the whole set-up in a throw-away child; the error says which part was refused. Needs the powers that the helper was started with.
pub(crate) fn try_namespaces() -> Result<(), (Part, io::Error)> {
    let failed = |error: io::Error| (Part::UserNamespace, error);
    // SAFETY: take no argument and cannot fail.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    // Made here: nothing is allocated after the fork.
    let maps = [format!("{uid} {uid} 1"), format!("{gid} {gid} 1")];
    let (mut reader, writer) = io::pipe().map_err(failed)?;
    // SAFETY: the helper has one thread; the child only makes system calls on memory that is there, and ends by `_exit`.
    let child = match unsafe { libc::fork() } {
        -1 => return Err(failed(io::Error::last_os_error())),
        // SAFETY: as above.
        0 => unsafe { set_up(writer.as_raw_fd(), &maps) },
        child => child,
    };
    drop(writer);
    let mut news = [0; NEWS];
    let read = reader.read_exact(&mut news);
    // SAFETY: waits for our own child, which its deadline ends; no status is written. An error means that it is gone already.
    unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
    if read.is_err() {
        return Err(failed(io::Error::from_raw_os_error(libc::ETIMEDOUT)));
    }
    let [part, errno @ ..] = news;
    match Part::ALL.get(usize::from(part)) {
        Some(Part::Done) => Ok(()),
        Some(part) => Err((*part, io::Error::from_raw_os_error(i32::from_ne_bytes(errno)))),
        None => Err(failed(io::Error::from_raw_os_error(libc::EPROTO))),
    }
}

/// A part and an errno.
const NEWS: usize = 5;

/// Says what happened and ends the child.
///
/// # Safety
/// Only in a child that was forked for this.
unsafe fn tell(report: RawFd, part: Part) -> ! {
    // SAFETY: errno is this thread's own; the message lives on this stack.
    unsafe {
        let [a, b, c, d] = (*libc::__errno_location()).to_ne_bytes();
        let message = [part as u8, a, b, c, d];
        libc::write(report, message.as_ptr().cast(), message.len());
        libc::_exit(0)
    }
}

/// Goes on only when `result` is no error.
///
/// # Safety
/// As for [`tell`].
unsafe fn must(report: RawFd, part: Part, result: c_long) -> c_int {
    match c_int::try_from(result) {
        Ok(value) if value >= 0 => value,
        // SAFETY: as for the caller.
        _ => unsafe { tell(report, part) },
    }
}

/// The child: makes the namespaces, one at a time so that each has its own answer, and the first process in them.
///
/// # Safety
/// As for [`tell`].
unsafe fn set_up(report: RawFd, [uid_map, gid_map]: &[String; 2]) -> ! {
    // SAFETY: numbers, literals, and strings that the parent made before the fork.
    unsafe {
        libc::alarm(DEADLINE_SECONDS);
        let enter = |part, flag: c_int| must(report, part, libc::unshare(flag).into());
        enter(Part::UserNamespace, libc::CLONE_NEWUSER);
        must(report, Part::Setgroups, write_file(c"/proc/self/setgroups", b"deny"));
        must(
            report,
            Part::UidMap,
            write_file(c"/proc/self/uid_map", uid_map.as_bytes()),
        );
        must(
            report,
            Part::GidMap,
            write_file(c"/proc/self/gid_map", gid_map.as_bytes()),
        );
        enter(Part::MountNamespace, libc::CLONE_NEWNS);
        enter(Part::PidNamespace, libc::CLONE_NEWPID);
        enter(Part::IpcNamespace, libc::CLONE_NEWIPC);
        enter(Part::NetNamespace, libc::CLONE_NEWNET);
        match must(report, Part::Init, libc::fork().into()) {
            0 => first_process(report),
            init => {
                libc::waitpid(init, ptr::null_mut(), 0);
                libc::_exit(0)
            }
        }
    }
}

/// Process 1 of the new namespaces: builds the view of the file system.
///
/// # Safety
/// As for [`tell`].
unsafe fn first_process(report: RawFd) -> ! {
    // SAFETY: numbers and literals.
    unsafe {
        // An alarm does not end a first process; its parent's does, and this passes it on.
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // Before the root becomes read-only, or the copy would be read-only too.
        let tree = must(
            report,
            Part::WritableTree,
            libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, c"/tmp".as_ptr(), OPEN_TREE),
        );
        must(report, Part::ReadOnlyRoot, make_read_only());
        must(report, Part::WritableMount, place(tree, c"/tmp"));
        must(report, Part::Proc, mount(c"proc", &[], c"/proc"));
        must(
            report,
            Part::SharedMemory,
            mount(c"tmpfs", &[(c"mode", c"1777")], c"/dev/shm"),
        );
        must(
            report,
            Part::Terminals,
            mount(c"devpts", &[(c"ptmxmode", c"0666"), (c"mode", c"0600")], c"/dev/pts"),
        );
        must(report, Part::Loopback, raise_loopback());
        // A file without a name: would leave nothing behind if it were made.
        let refused = libc::open(c"/".as_ptr(), libc::O_TMPFILE | libc::O_WRONLY | libc::O_CLOEXEC, 0o600) == -1
            && *libc::__errno_location() == libc::EROFS;
        if !refused || libc::getpid() != 1 {
            *libc::__errno_location() = 0;
            tell(report, Part::SelfCheck);
        }
        tell(report, Part::Done)
    }
}

/// A copy of a tree of mounts, with what is mounted below it: without that a user namespace may not copy.
const OPEN_TREE: u32 = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | libc::AT_RECURSIVE as u32;

/// # Safety
/// As for [`tell`].
unsafe fn write_file(path: &CStr, text: &[u8]) -> c_long {
    // SAFETY: `text` has its length; the descriptor is ours until the child ends.
    unsafe {
        match libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) {
            -1 => -1,
            file => libc::write(file, text.as_ptr().cast(), text.len()) as c_long,
        }
    }
}

/// Every mount read-only, and none of them told of later ones outside.
///
/// # Safety
/// As for [`tell`].
unsafe fn make_read_only() -> c_long {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_RDONLY,
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    // SAFETY: the structure outlives the call and has the given size.
    unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            c"/".as_ptr(),
            libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    }
}

/// Puts a detached mount over `target`.
///
/// # Safety
/// As for [`tell`].
unsafe fn place(mount: c_int, target: &CStr) -> c_long {
    // SAFETY: numbers and terminated strings.
    unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount,
            c"".as_ptr(),
            libc::AT_FDCWD,
            target.as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        )
    }
}

/// Mounts a new file system over `target`.
///
/// # Safety
/// As for [`tell`].
unsafe fn mount(kind: &CStr, options: &[(&CStr, &CStr)], target: &CStr) -> c_long {
    const CLOEXEC: c_int = 1;
    const SET_STRING: c_int = 1;
    const CREATE: c_int = 6;
    const NOTHING: *const libc::c_char = ptr::null();
    let attributes = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;
    // SAFETY: numbers, terminated strings, and null where the kernel expects none.
    unsafe {
        let context = libc::syscall(libc::SYS_fsopen, kind.as_ptr(), CLOEXEC);
        if context < 0 {
            return context;
        }
        for (key, value) in options {
            let set = libc::syscall(libc::SYS_fsconfig, context, SET_STRING, key.as_ptr(), value.as_ptr(), 0);
            if set < 0 {
                return set;
            }
        }
        let created = libc::syscall(libc::SYS_fsconfig, context, CREATE, NOTHING, NOTHING, 0);
        if created < 0 {
            return created;
        }
        match c_int::try_from(libc::syscall(libc::SYS_fsmount, context, CLOEXEC, attributes)) {
            Ok(mounted) if mounted >= 0 => place(mounted, target),
            _ => -1,
        }
    }
}

/// Brings up the loopback interface of a new net namespace.
///
/// # Safety
/// As for [`tell`].
unsafe fn raise_loopback() -> c_long {
    // SAFETY: a zeroed ifreq is valid; the flags are the member of the union that both requests use.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return -1;
        }
        let mut request: libc::ifreq = std::mem::zeroed();
        ptr::copy_nonoverlapping(c"lo".as_ptr(), request.ifr_name.as_mut_ptr(), 2);
        if libc::ioctl(socket, libc::SIOCGIFFLAGS, &raw mut request) == -1 {
            return -1;
        }
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short;
        libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw mut request).into()
    }
}
