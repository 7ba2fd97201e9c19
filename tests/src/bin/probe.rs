//! `dsh-probe NAME ARGUMENT…`: makes exactly one system call of interest and prints `OK` or the name of the error.
//!
//! Exit code 0 for `OK`, 1 for an error of the kernel, 2 for a wrong use of this program. What a door needs first (a descriptor to act on) is
//! opened for reading only, so that the one call is what a sandbox has to judge. The only unsafe code of this crate is in [`sys`].
use std::cell::Cell;
use std::ffi::CString;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::time::{Duration, Instant};

#[path = "probe/kernel.rs"]
mod kernel;
#[path = "probe/sockets.rs"]
mod sockets;

/// What a door gives: the kernel's value, or its errno.
type Answer = Result<usize, i32>;
/// One sub-command: its name, how many arguments it takes, what it does.
type Door = (&'static str, usize, fn(&[CString]) -> Answer);

const CWD: usize = libc::AT_FDCWD as usize;
const EMPTY: usize = libc::AT_EMPTY_PATH as usize;
const NOFOLLOW: usize = libc::AT_SYMLINK_NOFOLLOW as usize;
const FOLLOW: usize = libc::AT_SYMLINK_FOLLOW as usize;
/// What writing doors write once they are through, so that a breach leaves a mark.
const MARK: &[u8] = b"probe was here\n";
const XATTR: &[u8] = b"user.dsh\0";
const ACL: &[u8] = b"system.posix_acl_access\0";
/// owner rwx, group rwx, other rwx: a minimal access-control list in the kernel's format.
const ACL_VALUE: [u8; 28] = [
    2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 4, 0, 7, 0, 255, 255, 255, 255, 32, 0, 7, 0, 255, 255, 255, 255,
];
const NO_DUMP: u64 = 0x40;
const FS_IOC_GETFLAGS: usize = 0x8008_6601;
const FS_IOC_SETFLAGS: usize = 0x4008_6602;
const FS_IOC_FSSETXATTR: usize = 0x401c_5820;
const X_NO_DUMP: u32 = 0x80;

/// Calls that libc has no number for yet.
mod nr {
    pub(super) const FCHMODAT2: i64 = 452;
    pub(super) const SETXATTRAT: i64 = 463;
    pub(super) const REMOVEXATTRAT: i64 = 466;
    pub(super) const FILE_SETATTR: i64 = 469;
}

/// The call itself. A raw number, because the variant of a call is what is under test and libc would choose another.
fn sys(number: i64, arguments: &[usize]) -> Answer {
    let mut six = [0; 6];
    six[..arguments.len()].copy_from_slice(arguments);
    let [a, b, c, d, e, f] = six;
    // SAFETY: every pointer that callers pass refers to memory that lives across the call and is as long as the call may use.
    let value = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    usize::try_from(value).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

/// `chmod` of the 32-bit world, by the gate that needs no other program.
#[cfg(target_arch = "x86_64")]
fn int80_chmod(_argument: &CString) -> Answer {
    let result: i32;
    // SAFETY: the 32-bit gate sees only the low half of an address, so the call gets a null path and touches no memory; it gives back a number.
    unsafe {
        std::arch::asm!("push rbx", "xor ebx, ebx", "int 0x80", "pop rbx",
            inlateout("eax") 15 => result, in("ecx") 0o777, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    usize::try_from(result).map_err(|_| -result)
}
#[cfg(not(target_arch = "x86_64"))]
fn int80_chmod(_argument: &CString) -> Answer {
    Err(libc::ENOSYS)
}

/// The address of an argument.
fn at<T: ?Sized>(value: &T) -> usize {
    std::ptr::from_ref(value).cast::<u8>() as usize
}
fn path(argument: &CString) -> usize {
    argument.as_ptr() as usize
}
fn open(argument: &CString, flags: i32) -> Answer {
    sys(libc::SYS_openat, &[CWD, path(argument), flags as usize, 0o644])
}
/// Opens for writing and leaves a mark in what was opened.
fn write_mark(argument: &CString, flags: i32) -> Answer {
    open(argument, flags).and_then(|fd| sys(libc::SYS_write, &[fd, at(MARK), MARK.len()]))
}
/// `/proc/self/fd/N` of a descriptor.
fn magic(fd: usize) -> CString {
    CString::new(format!("/proc/self/fd/{fd}")).unwrap_or_default()
}
fn sockaddr(argument: &CString) -> (libc::sockaddr_un, usize) {
    let mut address = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as u16,
        sun_path: [0; 108],
    };
    for (slot, byte) in address.sun_path.iter_mut().zip(argument.as_bytes()) {
        *slot = *byte as libc::c_char;
    }
    (address, 2 + argument.as_bytes().len() + 1)
}
fn unix_socket() -> Answer {
    sys(libc::SYS_socket, &[libc::AF_UNIX as usize, libc::SOCK_STREAM as usize])
}
/// `[seconds, nanoseconds]` twice: the second day of the epoch.
const TIMES: [i64; 4] = [86_400, 0, 86_400, 0];
/// `file_attr` and `fsxattr` begin alike enough for one buffer each.
fn fsxattr() -> [u32; 7] {
    [X_NO_DUMP, 0, 0, 0, 0, 0, 0]
}
fn file_attr() -> [u64; 3] {
    [u64::from(X_NO_DUMP), 0, 0]
}
/// `struct xattr_args`: address of the value, its size, flags.
fn xattr_args() -> [u64; 2] {
    [at(MARK) as u64, MARK.len() as u64]
}
fn own_ids() -> [usize; 2] {
    [
        sys(libc::SYS_geteuid, &[]).unwrap_or(0),
        sys(libc::SYS_getegid, &[]).unwrap_or(0),
    ]
}

/// Opening, by every kind of flag and by every way to name the file.
const OPENS: &[Door] = &[
    ("open-wronly", 1, |a| write_mark(&a[0], libc::O_WRONLY)),
    ("open-rdwr", 1, |a| write_mark(&a[0], libc::O_RDWR)),
    ("open-append", 1, |a| write_mark(&a[0], libc::O_WRONLY | libc::O_APPEND)),
    ("open-trunc", 1, |a| open(&a[0], libc::O_WRONLY | libc::O_TRUNC)),
    ("open-trunc-rdonly", 1, |a| open(&a[0], libc::O_RDONLY | libc::O_TRUNC)),
    ("open-creat", 1, |a| write_mark(&a[0], libc::O_WRONLY | libc::O_CREAT)),
    ("open-creat-rdonly", 1, |a| open(&a[0], libc::O_RDONLY | libc::O_CREAT)),
    ("open-creat-excl", 1, |a| {
        write_mark(&a[0], libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL)
    }),
    ("open-tmpfile", 1, |a| open(&a[0], libc::O_RDWR | libc::O_TMPFILE)),
    ("open-rdonly", 1, |a| open(&a[0], libc::O_RDONLY)),
    ("open-dirfd", 2, |a| {
        let dir = open(&a[0], libc::O_DIRECTORY)?;
        let flags = (libc::O_WRONLY | libc::O_CREAT) as usize;
        let fd = sys(libc::SYS_openat, &[dir, path(&a[1]), flags, 0o644])?;
        sys(libc::SYS_write, &[fd, at(MARK), MARK.len()])
    }),
    ("reopen-rdonly", 1, |a| {
        let fd = open(&a[0], libc::O_RDONLY)?;
        write_mark(&magic(fd), libc::O_WRONLY)
    }),
    ("reopen-path", 1, |a| {
        let fd = open(&a[0], libc::O_PATH)?;
        write_mark(&magic(fd), libc::O_WRONLY)
    }),
    ("open-held-dir", 4, |a| held_directory(&a[0], &a[1], &a[2], &a[3])),
    ("truncate", 1, |a| sys(libc::SYS_truncate, &[path(&a[0]), 1])),
    ("access-w", 1, |a| {
        sys(libc::SYS_faccessat, &[CWD, path(&a[0]), libc::W_OK as usize])
    }),
];

/// Names: made, removed, moved, linked.
const NAMES: &[Door] = &[
    ("mkdirat", 1, |a| sys(libc::SYS_mkdirat, &[CWD, path(&a[0]), 0o755])),
    ("unlinkat", 1, |a| sys(libc::SYS_unlinkat, &[CWD, path(&a[0]), 0])),
    ("unlinkat-dir", 1, |a| {
        sys(libc::SYS_unlinkat, &[CWD, path(&a[0]), libc::AT_REMOVEDIR as usize])
    }),
    ("unlinkat-dirfd", 2, |a| {
        let dir = open(&a[0], libc::O_DIRECTORY)?;
        sys(libc::SYS_unlinkat, &[dir, path(&a[1]), 0])
    }),
    ("renameat2", 2, |a| {
        sys(libc::SYS_renameat2, &[CWD, path(&a[0]), CWD, path(&a[1]), 0])
    }),
    ("renameat2-noreplace", 2, |a| {
        sys(
            libc::SYS_renameat2,
            &[CWD, path(&a[0]), CWD, path(&a[1]), libc::RENAME_NOREPLACE as usize],
        )
    }),
    ("renameat2-exchange", 2, |a| {
        sys(
            libc::SYS_renameat2,
            &[CWD, path(&a[0]), CWD, path(&a[1]), libc::RENAME_EXCHANGE as usize],
        )
    }),
    ("linkat", 2, |a| {
        sys(libc::SYS_linkat, &[CWD, path(&a[0]), CWD, path(&a[1]), 0])
    }),
    ("linkat-follow", 2, |a| {
        sys(libc::SYS_linkat, &[CWD, path(&a[0]), CWD, path(&a[1]), FOLLOW])
    }),
    ("linkat-empty", 2, |a| {
        let fd = open(&a[0], libc::O_PATH)?;
        sys(libc::SYS_linkat, &[fd, at(b"\0"), CWD, path(&a[1]), EMPTY])
    }),
    ("linkat-magic", 2, |a| {
        let fd = open(&a[0], libc::O_PATH)?;
        sys(libc::SYS_linkat, &[CWD, path(&magic(fd)), CWD, path(&a[1]), FOLLOW])
    }),
    ("symlinkat", 2, |a| {
        sys(libc::SYS_symlinkat, &[path(&a[0]), CWD, path(&a[1])])
    }),
    ("mkfifo", 1, |a| {
        sys(
            libc::SYS_mknodat,
            &[CWD, path(&a[0]), (libc::S_IFIFO | 0o644) as usize, 0],
        )
    }),
    ("mknod-file", 1, |a| {
        sys(
            libc::SYS_mknodat,
            &[CWD, path(&a[0]), (libc::S_IFREG | 0o644) as usize, 0],
        )
    }),
    ("mknod-socket", 1, |a| {
        sys(
            libc::SYS_mknodat,
            &[CWD, path(&a[0]), (libc::S_IFSOCK | 0o644) as usize, 0],
        )
    }),
    ("mknod-null", 1, |a| {
        sys(
            libc::SYS_mknodat,
            &[CWD, path(&a[0]), (libc::S_IFCHR | 0o644) as usize, 0x103],
        )
    }),
    ("bind-unix", 1, |a| {
        let (address, length) = sockaddr(&a[0]);
        sys(libc::SYS_bind, &[unix_socket()?, at(&address), length])
    }),
];

/// The numbers that only older architectures have; glibc's plain wrappers use some of them.
#[cfg(target_arch = "x86_64")]
const LEGACY: &[Door] = &[
    ("open", 1, |a| {
        sys(
            libc::SYS_open,
            &[path(&a[0]), (libc::O_WRONLY | libc::O_TRUNC) as usize],
        )
    }),
    ("creat", 1, |a| sys(libc::SYS_creat, &[path(&a[0]), 0o644])),
    ("mkdir", 1, |a| sys(libc::SYS_mkdir, &[path(&a[0]), 0o755])),
    ("rmdir", 1, |a| sys(libc::SYS_rmdir, &[path(&a[0])])),
    ("unlink", 1, |a| sys(libc::SYS_unlink, &[path(&a[0])])),
    ("rename", 2, |a| sys(libc::SYS_rename, &[path(&a[0]), path(&a[1])])),
    ("renameat", 2, |a| {
        sys(libc::SYS_renameat, &[CWD, path(&a[0]), CWD, path(&a[1])])
    }),
    ("link", 2, |a| sys(libc::SYS_link, &[path(&a[0]), path(&a[1])])),
    ("symlink", 2, |a| sys(libc::SYS_symlink, &[path(&a[0]), path(&a[1])])),
    ("mknod", 1, |a| {
        sys(libc::SYS_mknod, &[path(&a[0]), (libc::S_IFIFO | 0o644) as usize, 0])
    }),
    ("chmod", 1, |a| sys(libc::SYS_chmod, &[path(&a[0]), 0o777])),
    ("chown", 1, |a| {
        sys(libc::SYS_chown, &[path(&a[0]), own_ids()[0], own_ids()[1]])
    }),
    ("lchown", 1, |a| {
        sys(libc::SYS_lchown, &[path(&a[0]), own_ids()[0], own_ids()[1]])
    }),
    ("utime", 1, |a| {
        sys(libc::SYS_utime, &[path(&a[0]), at(&[86_400i64; 2])])
    }),
    ("utimes", 1, |a| sys(libc::SYS_utimes, &[path(&a[0]), at(&TIMES)])),
    ("futimesat", 1, |a| {
        sys(libc::SYS_futimesat, &[CWD, path(&a[0]), at(&TIMES)])
    }),
];
#[cfg(not(target_arch = "x86_64"))]
const LEGACY: &[Door] = &[];

/// Metadata: mode, owner, times, extended attributes, flags.
const METADATA: &[Door] = &[
    ("fchmodat", 1, |a| sys(libc::SYS_fchmodat, &[CWD, path(&a[0]), 0o777])),
    ("fchmod-rdonly", 1, |a| {
        sys(libc::SYS_fchmod, &[open(&a[0], libc::O_RDONLY)?, 0o777])
    }),
    ("fchmodat2-empty", 1, |a| {
        sys(nr::FCHMODAT2, &[open(&a[0], libc::O_PATH)?, at(b"\0"), 0o777, EMPTY])
    }),
    ("chmod-magic", 1, |a| {
        sys(
            libc::SYS_fchmodat,
            &[CWD, path(&magic(open(&a[0], libc::O_PATH)?)), 0o777],
        )
    }),
    ("fchown-rdonly", 1, |a| {
        sys(
            libc::SYS_fchown,
            &[open(&a[0], libc::O_RDONLY)?, own_ids()[0], own_ids()[1]],
        )
    }),
    ("fchownat", 1, |a| {
        sys(libc::SYS_fchownat, &[CWD, path(&a[0]), own_ids()[0], own_ids()[1], 0])
    }),
    ("fchownat-nofollow", 1, |a| {
        sys(
            libc::SYS_fchownat,
            &[CWD, path(&a[0]), own_ids()[0], own_ids()[1], NOFOLLOW],
        )
    }),
    ("fchownat-empty", 1, |a| {
        let fd = open(&a[0], libc::O_PATH)?;
        sys(libc::SYS_fchownat, &[fd, at(b"\0"), own_ids()[0], own_ids()[1], EMPTY])
    }),
    ("utimensat", 1, |a| {
        sys(libc::SYS_utimensat, &[CWD, path(&a[0]), at(&TIMES), 0])
    }),
    ("utimensat-nofollow", 1, |a| {
        sys(libc::SYS_utimensat, &[CWD, path(&a[0]), at(&TIMES), NOFOLLOW])
    }),
    ("utimensat-now", 1, |a| {
        sys(libc::SYS_utimensat, &[CWD, path(&a[0]), 0, 0])
    }),
    ("futimens-rdonly", 1, |a| {
        sys(libc::SYS_utimensat, &[open(&a[0], libc::O_RDONLY)?, 0, at(&TIMES), 0])
    }),
    ("setxattr", 1, |a| {
        sys(libc::SYS_setxattr, &[path(&a[0]), at(XATTR), at(MARK), MARK.len(), 0])
    }),
    ("lsetxattr", 1, |a| {
        sys(libc::SYS_lsetxattr, &[path(&a[0]), at(XATTR), at(MARK), MARK.len(), 0])
    }),
    ("fsetxattr-rdonly", 1, |a| {
        sys(
            libc::SYS_fsetxattr,
            &[open(&a[0], libc::O_RDONLY)?, at(XATTR), at(MARK), MARK.len(), 0],
        )
    }),
    ("setxattrat", 1, |a| {
        sys(nr::SETXATTRAT, &[CWD, path(&a[0]), 0, at(XATTR), at(&xattr_args()), 16])
    }),
    ("removexattr", 1, |a| {
        sys(libc::SYS_removexattr, &[path(&a[0]), at(XATTR)])
    }),
    ("lremovexattr", 1, |a| {
        sys(libc::SYS_lremovexattr, &[path(&a[0]), at(XATTR)])
    }),
    ("fremovexattr-rdonly", 1, |a| {
        sys(libc::SYS_fremovexattr, &[open(&a[0], libc::O_RDONLY)?, at(XATTR)])
    }),
    ("removexattrat", 1, |a| {
        sys(nr::REMOVEXATTRAT, &[CWD, path(&a[0]), 0, at(XATTR)])
    }),
    ("setxattr-acl", 1, |a| {
        sys(
            libc::SYS_setxattr,
            &[path(&a[0]), at(ACL), at(&ACL_VALUE), ACL_VALUE.len(), 0],
        )
    }),
    ("ioctl-setflags", 1, |a| {
        let fd = open(&a[0], libc::O_RDONLY)?;
        // The other flags stay: clearing ext4's extent flag would convert the file, which the file system refuses at times.
        let before = Cell::new(0u64); // the kernel writes to it
        sys(libc::SYS_ioctl, &[fd, FS_IOC_GETFLAGS, at(&before)])?;
        let flags = before.get() | NO_DUMP;
        sys(libc::SYS_ioctl, &[fd, FS_IOC_SETFLAGS, at(&flags)])
    }),
    ("ioctl-fssetxattr", 1, |a| {
        sys(
            libc::SYS_ioctl,
            &[open(&a[0], libc::O_RDONLY)?, FS_IOC_FSSETXATTR, at(&fsxattr())],
        )
    }),
    ("file_setattr", 1, |a| {
        sys(nr::FILE_SETATTR, &[CWD, path(&a[0]), at(&file_attr()), 24, 0])
    }),
];

fn number(argument: &CString) -> usize {
    argument
        .to_str()
        .ok()
        .and_then(|text| text.parse::<usize>().ok())
        .unwrap_or(0)
}

/// Opens a folder, says so by creating `ready`, waits for somebody to create `go`, then creates `name` through the descriptor.
fn held_directory(directory: &CString, name: &CString, ready: &CString, go: &CString) -> Answer {
    let dir = open(directory, libc::O_DIRECTORY)?;
    open(ready, libc::O_WRONLY | libc::O_CREAT)?;
    let deadline = Instant::now() + Duration::from_secs(10);
    while !Path::new(&*go.to_string_lossy()).exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    sys(
        libc::SYS_openat,
        &[dir, path(name), (libc::O_WRONLY | libc::O_CREAT) as usize, 0o644],
    )
}

/// Names of the errors that the tables speak of; any other is its number.
fn errno_name(errno: i32) -> String {
    let known = [
        (libc::EPERM, "EPERM"),
        (libc::ENOENT, "ENOENT"),
        (libc::ESRCH, "ESRCH"),
        (libc::EBADF, "EBADF"),
        (libc::EACCES, "EACCES"),
        (libc::EFAULT, "EFAULT"),
        (libc::EBUSY, "EBUSY"),
        (libc::EEXIST, "EEXIST"),
        (libc::EXDEV, "EXDEV"),
        (libc::ENOTDIR, "ENOTDIR"),
        (libc::EISDIR, "EISDIR"),
        (libc::EINVAL, "EINVAL"),
        (libc::ENOTTY, "ENOTTY"),
        (libc::EROFS, "EROFS"),
        (libc::ENOSYS, "ENOSYS"),
        (libc::ENOTEMPTY, "ENOTEMPTY"),
        (libc::ELOOP, "ELOOP"),
        (libc::ENODATA, "ENODATA"),
        (libc::EOPNOTSUPP, "EOPNOTSUPP"),
        (libc::ECONNREFUSED, "ECONNREFUSED"),
        (libc::ENETUNREACH, "ENETUNREACH"),
        (libc::EAGAIN, "EAGAIN"),
        (libc::ENOTCONN, "ENOTCONN"),
        (libc::EADDRINUSE, "EADDRINUSE"),
        (libc::EPROTONOSUPPORT, "EPROTONOSUPPORT"),
        (libc::EAFNOSUPPORT, "EAFNOSUPPORT"),
        (libc::ENXIO, "ENXIO"),
        (libc::EINPROGRESS, "EINPROGRESS"),
        (libc::ENOTSOCK, "ENOTSOCK"),
        (libc::ENOMSG, "ENOMSG"),
        (libc::EIDRM, "EIDRM"),
        (libc::ENODEV, "ENODEV"),
        (libc::EPIPE, "EPIPE"),
        (libc::EIO, "EIO"),
    ];
    known
        .iter()
        .find(|(number, _)| *number == errno)
        .map_or_else(|| format!("E{errno}"), |(_, name)| (*name).to_owned())
}

fn main() {
    let arguments: Vec<CString> = std::env::args_os()
        .skip(1)
        .filter_map(|argument| CString::new(argument.into_vec()).ok())
        .collect();
    let doors = || {
        let files = [OPENS, NAMES, LEGACY, METADATA];
        let rest = [
            sockets::UNIX,
            sockets::NETWORK,
            kernel::PROCESSES,
            kernel::NAMESPACES,
            kernel::IPC,
            kernel::INTERFACES,
        ];
        files.into_iter().chain(rest).flatten()
    };
    let found = arguments.split_first().and_then(|(name, rest)| {
        doors()
            .find(|(known, count, _)| known.as_bytes() == name.as_bytes() && *count == rest.len())
            .map(|door| (door.2, rest))
    });
    let Some((run, rest)) = found else {
        let names: Vec<String> = doors().map(|(name, count, _)| format!("{name}/{count}")).collect();
        eprintln!(
            "usage: dsh-probe NAME ARGUMENT…, where NAME/number of arguments is one of: {}",
            names.join(" ")
        );
        std::process::exit(2);
    };
    let answer = run(rest);
    let line = match answer {
        Ok(value) if arguments[0].as_bytes() == b"landlock-abi" => format!("OK {value}"),
        Ok(_) => "OK".to_owned(),
        Err(errno) => errno_name(errno),
    };
    let _ = writeln!(std::io::stdout(), "{line}");
    std::process::exit(i32::from(answer.is_err()));
}
